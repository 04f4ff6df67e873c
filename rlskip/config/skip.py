"""The `skip` node: its dataclasses.

Shared keys are on top, roles below. A role's key that is None inherits the shared one.
:func:`rlskip.config.settings.read_skip` reads the node.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs

from rlskip.config.dump_dir import DEFAULT_DUMP_DIR


class SkipAction(str, enum.Enum):
    """What to do instead of running a stage."""

    CACHE = "cache"
    REPEAT = "repeat"
    # verl names these, too, and implements neither; a config that chooses one is refused.
    RANDOM = "random"
    EMPTY = "empty"


ACTIONS = ("cache", "repeat")
PLANNED_ACTIONS = ("random", "empty")

_actions = {"choices": ACTIONS + PLANNED_ACTIONS}
_on_miss = {"choices": ("generate", "error")}
_on_mismatch = {"choices": ("error", "regenerate", "ignore")}
_validation = {"choices": ("generate", "replay")}
_match = {"choices": ("step", "run")}
_background = {"choices": ("auto", True, False)}
_positive = {"min": 1}


@dataclass
class RoleConfig:
    """One role under `skip`. None means that the role takes the value of ``skip.<key>``."""

    # Whether this role skips at all.
    enable: bool = False

    # Steps that are eligible; at any other step the stage runs as if rlskip were not installed.
    # A list of ints, a string such as "1-128,200,300-400:10", or all.
    steps: Any = None

    # Directory of the dumps. ~ is expanded; a relative path starts at the original working
    # directory.
    dump_dir: str | None = None

    # cache: replay the step's own dump. repeat: if it has none, replay another step's.
    action: str | None = field(default=None, metadata=_actions)

    # No usable dump: generate (run the stage, then dump), or error (the stage is never called).
    on_miss: str | None = field(default=None, metadata=_on_miss)

    # A dump of other prompts or other sampling: error, regenerate (run and replace), or ignore.
    on_mismatch: str | None = field(default=None, metadata=_on_mismatch)

    # Where a call's dump is looked for: step (its own step), or run (the run's other steps, too).
    match: str | None = field(default=None, metadata=_match)

    # Keys of the config whose values must be those the dump was made with, besides the host's own:
    # [sampling.temperature].
    identity: list[str] | None = None

    # Fields to leave out of a replayed result, so that the host computes them again (rewards).
    drop_fields: list[str] | None = None

    # Restore the global python, numpy and torch generators to their state after the stage.
    restore_rng: bool | None = None

    # Write dumps in a background thread: true, false, or auto (true under the Hydra callback,
    # which flushes at the end of the job).
    background_write: Any = field(default=None, metadata=_background)

    # Seconds to wait for another job that generates the same step; 0: never.
    # (async_rollout never waits.)
    wait_s: float | None = field(default=None, metadata={"min": 0})

    # How many steps to keep, the last written, each with all its calls; null: all.
    keep_last: int | None = field(default=None, metadata=_positive)

    # Total size of the dumps: bytes, or a string such as 200GB; null: any size.
    max_size: int | str | None = None

    # First half of the name of the run's directory; null: the host's name of the experiment, else
    # the name of the Hydra application, else default_experiment_name.
    experiment_name: str | None = None

    # Second half of the name of the run's directory; null: the host's name of the project, else
    # default_project_name.
    project_name: str | None = None

    # Prompts a step; null: the host's number (rollout_tq: of those that a step submits).
    gbs: int | None = field(default=None, metadata=_positive)

    # Sessions a prompt; null: the host's number.
    n: int | None = field(default=None, metadata=_positive)

    # Longest prompt in tokens; null: the host's limit.
    prompt_len: int | None = field(default=None, metadata=_positive)

    # Longest response in tokens; null: the host's limit.
    response_len: int | None = field(default=None, metadata=_positive)


@dataclass
class RolloutValSkipConfig(RoleConfig):
    """Role `rollout_val`: a call generates a batch of a validation; ``skip.validation`` enables it.

    Steps are the trainer's global steps: 0 before training.
    """

    # Not inherited: ``skip.steps`` lists steps of training.
    steps: Any = "all"


@dataclass
class SkipManagerConfig(RoleConfig):
    """The whole `skip` node: keys of :class:`RoleConfig` for all roles, and the roles."""

    # Master switch: false turns every role off; true turns none on.
    enable: bool = True
    steps: Any = "all"
    dump_dir: str = DEFAULT_DUMP_DIR
    action: str = field(default="cache", metadata=_actions)
    on_miss: str = field(default="generate", metadata=_on_miss)
    on_mismatch: str = field(default="error", metadata=_on_mismatch)
    match: str = field(default="step", metadata=_match)
    identity: list[str] = field(default_factory=list)
    drop_fields: list[str] = field(default_factory=list)
    restore_rng: bool = False
    background_write: Any = field(default="auto", metadata=_background)
    wait_s: float = field(default=3600.0, metadata={"min": 0})

    # false: the host starts no inference engine, and on_miss is error in every role.
    start_engine: bool = True

    # Validation: generate, or replay (cached as the role rollout_val, beside any other role).
    validation: str = field(default="generate", metadata=_validation)

    # Functions of third-party code that are stages: role to "package.module:Class.method", to
    # a mapping (rlskip.config.attachments.AttachConfig), or to a list of these.
    attach: dict[str, Any] = field(default_factory=dict)

    # One call generates a whole step; steps are the trainer's global steps.
    rollout: RoleConfig = field(default_factory=RoleConfig)

    # One call generates one sample; steps are feed-order indices.
    async_rollout: RoleConfig = field(default_factory=RoleConfig)

    # Rollouts travel through a queue and are sampled from a replay buffer.
    rollout_tq: RoleConfig = field(default_factory=RoleConfig)

    rollout_val: RolloutValSkipConfig = field(default_factory=RolloutValSkipConfig)


#: The roles whose dumps lie in the run's directory itself.
TRAINING_ROLES = ("rollout", "async_rollout", "rollout_tq")
VALIDATION_ROLE = "rollout_val"
BUILT_IN_ROLES = (*TRAINING_ROLES, VALIDATION_ROLE)

#: The options of ``annotate`` that the role for groups has.
QUEUE_OPTIONS = frozenset({"queue", "partition_id", "phase"})


@attrs.frozen
class RoleSpec:
    """What is known of a role before there is an instance of it.

    Parameters
    ----------
    config
        The role's dataclass.
    actions
        The actions that the role supports.
    options
        The keyword options that a stage of the role may have.
    online_step
        Whether the role reads the step from each call.
    """

    config: type[RoleConfig] = RoleConfig
    actions: tuple[str, ...] = ACTIONS
    options: frozenset[str] = frozenset()
    online_step: bool = False


BUILT_IN_SPECS: Mapping[str, RoleSpec] = {
    "rollout": RoleSpec(),
    "async_rollout": RoleSpec(online_step=True),
    "rollout_tq": RoleSpec(options=QUEUE_OPTIONS),
    VALIDATION_ROLE: RoleSpec(RolloutValSkipConfig),
}
