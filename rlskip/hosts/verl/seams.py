"""The one table of what rlskip depends on in verl; the modules beside this declare what runs."""

from __future__ import annotations

import ast
from pathlib import Path

from rlskip._wrap import Seam, Seams

#: Modules and classes of verl that hold the seams.
_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
LOOPS = f"{_AGENT_LOOP}:AgentLoopManager"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
MANAGER = "verl.utils.skip.skip_manager:SkipManager"
V1_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
ROLLOUTS = "verl.workers.rollout.base:_ROLLOUT_REGISTRY"
REPLICAS = "verl.workers.rollout.replica:RolloutReplicaRegistry.register"
WEIGHTS = "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights"
REWARD_LOOP = "verl.experimental.reward_loop.reward_loop:RewardLoopManager"
# The trainers that those of verl's applications derive from.
V0_TRAINER = f"{RAY_TRAINER}:RayPPOTrainer"
V1_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
# One-step-off's, and the fully async application's, make their workers themselves.
SEPARATE_TRAINER = "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer"
_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncAgentLoopManager"

#: What is off where an optional seam is gone.
NO_ENGINE = "skip.start_engine=false"
LATER_STAGES = "the roles ref and reward, skip.drop_fields=[rm_scores]"
RECORD = "record"
LOGGED = "record of logged metrics, skip.log_metrics"

_IS = "is the stage of role"
_SAMPLES = "dumps the groups of a batch that is sampled"
_PREFLIGHT = "refuses steps without a dump and leaves the engine out"
_SUBMITS = "replays prompts that are submitted, refills among them"

TABLE = (
    # -- the manager: verl's own decorators become rlskip's
    Seam(f"{MANAGER}.init", "reads the config"),
    Seam(f"{MANAGER}.set_step", "learns the step"),
    Seam(f"{MANAGER}.annotate", "decorates verl's stages and yours"),
    Seam(f"{MANAGER}.annotate_tq", "decorates what samples V1's batches"),
    Seam(f"{LOOPS}.generate_sequences", f"{_IS} rollout", role="rollout", decorated=True),
    Seam(f"{_ROLLOUTER}.generate_sequences_single", f"{_IS} async_rollout", decorated=True),
    Seam(f"{V1_BUFFER}.sample", _SAMPLES, role="rollout_tq", decorated=True),
    Seam(f"{V1_BUFFER}Async.sample", _SAMPLES, role="rollout_tq", decorated=True),
    # -- V0
    Seam(f"{V0_TRAINER}.init_workers", _PREFLIGHT, role="rollout"),
    Seam(f"{SEPARATE_TRAINER}.init_workers", _PREFLIGHT, role="rollout"),
    # -- V1
    Seam(f"{V1_TRAINER}.__init__", "plugs in dispatch and replay", role="rollout_tq"),
    Seam(f"{V1_TRAINER}._init_dataloader", _PREFLIGHT, role="rollout_tq"),
    Seam(f"{V1_TRAINER}._submit_batch_to_rollout", _SUBMITS, role="rollout_tq"),
    Seam(f"{V1_TRAINER}._next_train_batch", "fetches the prompts of dumped refills"),
    Seam(f"{V1_BUFFER}._clear_groups", "keeps groups that are evicted, for the dump"),
    Seam(f"{V1_BUFFER}._select_prompt_uids", "orders a step's groups as they were submitted"),
    Seam(f"{V1_TRAINER}._validate", "replays and scores validation"),
    # -- no engine
    Seam(ROLLOUTS, "registers a rollout that does nothing", NO_ENGINE),
    Seam(REPLICAS, "registers a replica without servers", NO_ENGINE),
    Seam(f"{LOOPS}._init_agent_loop_workers", "starts none", NO_ENGINE),
    Seam(WEIGHTS, "sends none", NO_ENGINE),
    # -- later stages
    Seam(f"{V0_TRAINER}._validate", "scores validation", LATER_STAGES),
    Seam(f"{V0_TRAINER}._compute_ref_log_prob", f"{_IS} ref", LATER_STAGES),
    Seam(f"{V1_TRAINER}._compute_ref_log_prob", f"{_IS} ref", LATER_STAGES),
    Seam(f"{REWARD_LOOP}.compute_rm_score", f"{_IS} reward; scores again", LATER_STAGES),
    # -- what is recorded and logged
    Seam(f"{V0_TRAINER}.fit", "starts recording", RECORD),
    Seam(f"{V1_TRAINER}.fit", "starts recording", RECORD),
    Seam(f"{RAY_TRAINER}:compute_advantage", "records", RECORD),
    Seam(f"{V1_TRAINER}._compute_advantage", "records", RECORD),
    Seam("verl.utils.tracking:Tracking.log", "records and adds metrics", LOGGED),
)

seams = Seams("verl", TABLE)


def lacking(package: Path) -> list[Seam]:
    """The seams, with their decorators, that the source in `package` lacks; imports nothing."""
    trees: dict[str, ast.Module] = {}
    for module in {seam.module for seam in TABLE}:
        file = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
        trees[module] = ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")
    return [seam for seam in TABLE if not _is_in(trees[seam.module], seam)]


def _is_in(tree: ast.Module, seam: Seam) -> bool:
    node: ast.AST | None = tree
    for name in seam.path.split("."):
        node = next((n for n in getattr(node, "body", ()) if name in _names(n)), None)
    decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
    return node is not None and (not seam.decorated or "SkipManager.annotate" in decorators)


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
