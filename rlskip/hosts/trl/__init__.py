"""TRL: `GRPOTrainer._generate` becomes the stage `rollout`.

What samples is below it and skipped; what is above it is computed again. The next method up,
`_generate_and_score_completions`, would replay the rewards too.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import attrs

from rlskip._wrap import around
from rlskip.config.check import raise_all
from rlskip.config.facts import HostFacts
from rlskip.config.nodes import read_record
from rlskip.config.settings import read_skip
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.hosts.standalone_config import ROLE, is_on, read_config, warn_of_idle
from rlskip.hosts.trl.facts import evaluated, facts_of, sampling, uses_vllm
from rlskip.hosts.trl.seams import NoGeneration, Seam, constructing, seam_of, stage_name
from rlskip.hosts.trl.stages import record_stages
from rlskip.skip.manager import SkipManager
from rlskip.skip.names import ALL
from rlskip.skip.preflight import preflight

ROLES = (ROLE, VALIDATION_ROLE)  # the stages of a trainer


def attach(trainer: Any, config: Any = None) -> None:
    """Skip the generation of a trainer of TRL; call this before ``train()``.

    GRPO, RLOO, GMPO, SDPO, SDFT, Distillation and what derives from them. Steps are numbered from
    1, as the trainer logs them. Evaluation is replayed under ``skip.validation: replay`` only, as
    role ``rollout_val`` of the step that was trained last. ``skip.restore_rng`` defaults to true
    here, because the trainer shuffles generated batches with the global random generators.

    `config` is a mapping or DictConfig with a `skip` entry, a SkipManagerConfig, or the path of
    such a YAML file. None: the file that the environment variable ``RLSKIP_CONFIG`` names; without
    one, the config that is already installed (``+skip=...`` under Hydra). Nothing but `trainer` is
    changed.

    Raises ConfigError, which names every problem of the `skip` node, and AttachError where the
    trainer, or this version of it, has no method that a replay can take the place of.
    """
    config = read_config(config)
    if config is not None:
        settings = read_skip(config, HostFacts())
        warn_of_idle(settings.facts.config, "TRL's trainer", "dispatch", "replay", "merge")
        record_stages(trainer, read_record(settings.facts.config))
        if ROLE in settings.roles:
            seam_of(trainer)  # before the facts, which only such trainers have
            settings = settings.complete(facts_of(trainer))
        SkipManager.init(settings)
    if not is_on(config is not None, "TRL's trainer"):
        return
    seam = seam_of(trainer)
    if not SkipManager.start_engine and uses_vllm(trainer):  # else the model itself generates
        _check_without_engine(trainer)
    for role in SkipManager.skip_instances.keys() & {*ROLES}:
        local = SkipManager.skip_instances[role].local_config
        if local.restore_rng is None:
            local.restore_rng = local.match != "prompt"  # of several dumps none has the state
    SkipManager.count_rollouts()
    if not isinstance(trainer._generate, _Generation):
        trainer._generate = generation = _Generation(trainer, seam)
        trainer.log = around(generation.log)(trainer.log)
        if getattr(trainer, "environment_factories", None):
            score = trainer._generate_and_score_completions
            trainer._generate_and_score_completions = around(generation.score)(score)
    trainer._generate.settings = SkipManager.settings


@contextlib.contextmanager
def attached(config: Any = None) -> Iterator[None]:
    """Within it, :func:`attach` follows the construction of every trainer that generates.

    ::

        with rlskip.hosts.trl.attached(config):
            trainer = GRPOTrainer(...)

    With ``skip.start_engine: false`` a trainer whose `use_vllm` is true starts no engine, and asks
    for no server: vLLM need not be installed. `use_vllm` stays true, and so does the importance
    correction. `config` and errors are those of :func:`attach`.
    """
    given = read_config(config)
    settings = given if given is None else read_skip(given, HostFacts())
    starts = SkipManager.start_engine if settings is None else settings.start_engine
    with constructing(functools.partial(attach, config=settings), engine=starts):
        yield


class _Generation:
    """Replaces the method by which a trainer generates."""

    def __init__(self, trainer: Any, seam: Seam) -> None:
        self.trainer = trainer
        self.generate = trainer._generate
        self._seam = seam
        self.settings: Any = None
        self._checked: Any = None
        self._rows: Any = None

    def __call__(self, prompts: Any) -> Any:
        training = self.trainer.model.training
        role = ROLE if training else VALIDATION_ROLE
        if role not in SkipManager.skip_instances:
            return self.generate(prompts)
        if self.settings is not SkipManager.settings:
            what = "another config was installed since, whose names and sizes its dumps would have"
            raise ConfigError(
                what, "rlskip.hosts.trl.attach", "attach a trainer before its train()"
            )
        step = self.trainer.state.global_step + training
        if training and self._checked is not self.settings:
            self._preflight(step)
        SkipManager.set_step(step)
        pad = getattr(getattr(self.trainer, "processing_class", None), "pad_token_id", None)
        stage = SkipManager.annotate(
            role=role,
            stage=stage_name(self.trainer),
            prompts=self._prompts,
            identity=sampling(self.trainer, role),
            lacks=self._lacks,
            rows={"pad": pad} if isinstance(pad, int) else {},
            totals={"metrics": lambda rows: {}, "num_tokens": _num_tokens},
            ignore=[ALL],
        )
        done = stage(around(self._generate_and_record)(self.generate))(prompts)
        if getattr(self.trainer, "environments", None):  # a reward that reads one is refused
            self.trainer.environments = _Hidden()
        # Generated or replayed, it is logged the same way.
        state, metrics = self.trainer.state, self.trainer._metrics["train" if training else "eval"]
        if done["num_tokens"] is not None:
            state.num_input_tokens_seen += done["num_tokens"]
            metrics["num_tokens"] = [state.num_input_tokens_seen]
        for name, values in done["metrics"].items():
            metrics[name] += values
        return self._seam.output(done)

    def score(self, score: Callable[..., Any], rows: Any) -> Any:
        """The trainer's method that resets its environments and generates: `reset` takes a row."""
        self._rows = rows
        return score(rows)

    def log(self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **more: Any) -> Any:
        """The trainer's `log`: what was replayed is among the metrics of training."""
        replayed = SkipManager.logged() if self.trainer.model.training else {}
        return log({**logs, **replayed}, *args, **more)

    def _generate_and_record(self, generate: Callable[..., Any], prompts: Any) -> dict[str, Any]:
        """What the trainer's own method returns, and what it would have changed in the trainer."""
        state, metrics = self.trainer.state, self.trainer._metrics
        mode = "train" if self.trainer.model.training else "eval"
        logged, seen = metrics[mode], state.num_input_tokens_seen
        own: dict[str, list[float]] = defaultdict(list)
        metrics[mode] = own
        try:
            output = generate(prompts)
            num_tokens = state.num_input_tokens_seen - seen
        finally:
            metrics[mode], state.num_input_tokens_seen = logged, seen
        # The sum so far is logged, not what this call adds; some trainers log none.
        counts = own.pop("num_tokens", None) is not None
        return {
            **self._seam.named(output),
            "metrics": dict(own),
            "num_tokens": num_tokens if counts else None,
        }

    def _preflight(self, first: int) -> None:
        """Refuse steps from `first` to the last that would generate and must not."""
        self._checked = self.settings
        args, last = self.trainer.args, getattr(self.trainer.state, "max_steps", 0)
        # One generation may serve several steps, and a step may have several.
        a_step, times = args.gradient_accumulation_steps, getattr(self.trainer, "num_iterations", 1)
        served = times * getattr(args, "steps_per_generation", a_step)
        # Else an epoch may end in a step of few batches, for which nothing is generated.
        fewer, more = sorted((served, a_step))
        if more % fewer or getattr(args, "world_size", 1) > 1:  # each rank has a shard of each step
            return
        facts = attrs.evolve(
            facts_of(self.trainer),
            steps=range(first, last + 1, more // a_step),
            validated=evaluated(self.trainer, first, last),
            called_with={role: sampling(self.trainer, role) for role in ROLES},
        )
        engine = SkipManager.start_engine or not uses_vllm(self.trainer)
        raise_all(preflight(SkipManager.skip_instances, facts, engine=engine))

    def _prompts(self, prompts: Any) -> Any:
        """What the trainer asks completions for: text or tokens, and images."""
        # The tools of an environment may depend on what its prompt does not show.
        rows = self._rows and zip(self._rows, prompts, strict=True)
        return [{**row, "prompt": prompt} for row, prompt in rows] if rows else prompts

    def _lacks(self, done: dict[str, Any]) -> list[str]:
        """The log-probs of the sampled tokens, if the trainer needs them and `done` has none."""
        keys = ("use_vllm", "vllm_importance_sampling_correction")
        needs = all(getattr(self.trainer, key, False) for key in keys)
        lacks = "logprobs" in self._seam.parts and not any(done.get("logprobs") or ())
        return [f"logprobs ({' and '.join(keys)} are on)"] if needs and lacks else []


def _num_tokens(done: dict[str, Any]) -> int:
    """How many tokens the trainer counts for these rows."""
    return sum(len(row) for name in ("prompt_ids", "completion_ids") for row in done[name])


def _check_without_engine(trainer: Any) -> None:
    if not isinstance(getattr(trainer, "vllm_generation", None), NoGeneration):
        what = "the trainer has made its engine already"
        remedy = "make it within `with rlskip.hosts.trl.attached(config):`, which leaves out the "
        remedy += "engine of GRPO, RLOO and Distillation; for another one set use_vllm=False"
        raise ConfigError(what, "skip.start_engine=false", remedy)
    raise_all(preflight(SkipManager.skip_instances, facts_of(trainer), engine=False))


class _Hidden:
    """The environments of the present batch, of which a replay skips the calls of their tools."""

    def __getitem__(self, _: Any) -> NoReturn:  # to iterate is to ask for items, too
        what = "a reward reads `environments`, whose state a replay does not restore"
        remedy = "compute the reward from `completions`, which hold the calls of tools and their "
        remedy += "results, or train without skip"
        raise ConfigError(what, "rlskip.hosts.trl.attach", remedy)
