"""Names that rlskip, verl and Ray agree on: modules, environment variables, config keys, fields."""

from __future__ import annotations

#: The module that verl loads in each of its processes, and the entry-point group that names it.
PLUGIN = "rlskip.hosts.verl.plugin"
PLUGIN_GROUP = "verl.plugins"

#: verl's variable of the entry points to load.
PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"

#: Set where the launcher process left a token in each dump_dir.
TOKEN_VARIABLE = "RLSKIP_TOKEN"

#: Ray's variable for a hook that edits the runtime environment, and ours for the hook it replaces.
RAY_HOOK_VARIABLE = "RAY_RUNTIME_ENV_HOOK"
NEXT_HOOK_VARIABLE = "RLSKIP_NEXT_RUNTIME_ENV_HOOK"

#: Applications of verl that do not train by ``trainer.use_v1``.
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"

#: Keys of verl's config that the V1 trainer reads its manager and its replay buffer from.
MANAGER_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
SAMPLER_KEY = "trainer.v1.sampler"
SAMPLER_CLASS_KEY = f"{SAMPLER_KEY}.custom_sampler"
MODE_KEY = "trainer.v1.trainer_mode"
FILTER = "algorithm.filter_groups"
FILTER_KEY = f"{FILTER}.enable"

#: What rlskip puts there.
OUR_MANAGER = "rlskip.hosts.verl.session_workers.SessionManager"
OUR_SAMPLER = {"path": "pkg://rlskip.hosts.verl.buffer", "name": "FailClosedReplayBuffer"}

#: The field of a row that holds its rewards, token by token.
SCORES = "rm_scores"
