"""The `skip` node: its dataclasses. :func:`rlskip.config.settings.read_skip` reads it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, fields
from typing import Any

from rlskip.config.dump_dir import DEFAULT_DUMP_DIR, parse_directory
from rlskip.config.steps import FORMS, Steps


class SkipAction(str, enum.Enum):
    """What to do instead of running a stage."""

    CACHE = "cache"
    REPEAT = "repeat"
    # verl names these, too, and implements neither: no role supports them.
    RANDOM = "random"
    EMPTY = "empty"


_actions = {"choices": ("cache", "repeat")}
_on_miss = {"choices": ("generate", "error")}
_on_mismatch = {"choices": ("error", "regenerate")}
_background = {"choices": ("auto", True, False)}
_positive = {"min": 1}
_seconds = {"min": 0, "max": 1e9}
_steps = {"parse": Steps.parse, "like": FORMS}
_directory = {"parse": parse_directory}

_NAMES = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_TARGET = f"{_NAMES}:{_NAMES}"
# After the first name, a part may also be a key of a mapping or an index.
_PATH = r"[^\W\d]\w*(?:\.\w+)*"
_FUNCTION = "package.module:Class.method or package.module:function"
_path = {"pattern": _PATH, "like": "a path, such as self.state.global_step"}
_step = {"pattern": f"{_PATH}|{_TARGET}", "like": f"{_path['like']}, or {_FUNCTION}"}


@dataclass
class AttachConfig:
    """One function under ``skip.attach.<role>``; a path starts at one of its arguments."""

    # The function: package.module:Class.method or package.module:function.
    target: str = field(default="", metadata={"pattern": _TARGET, "like": _FUNCTION})

    # Path of the step, or a package.module:function that takes the call's arguments and returns
    # the step, or None if the call must not be skipped. null: the step of SkipManager.set_step.
    step: str | None = field(default=None, metadata=_step)

    # Path of the prompts; null: the argument prompts, else the first after self, step and seed.
    prompts: str | None = field(default=None, metadata=_path)

    # Paths of other values that must be equal for a dump to replace the call.
    identity: list[str] = field(default_factory=list, metadata=_path)

    # What the fields of the function's rows hold, where their names do not tell: {reward: won}.
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass
class RoleConfig:
    """One role under `skip`. None means that the role takes the value of ``skip.<key>``."""

    # Whether this role skips at all; an option sets it.
    enable: bool = False

    # Steps that are eligible; at any other step the stage runs as if rlskip were not installed.
    # A list of ints, a string such as "1-128,200,300-400:10", or all.
    steps: Any = field(default=None, metadata=_steps)

    # Directory of the dumps. ~ is expanded; a relative path starts where the command was typed.
    dump_dir: str | None = field(default=None, metadata=_directory)

    # cache: replay the step's own dump. repeat: if it has none, replay another step's.
    action: str | None = field(default=None, metadata=_actions)

    # No usable dump: generate (run the stage, then dump), or error (the stage is never called, and
    # steps without a dump are named before the first step).
    on_miss: str | None = field(default=None, metadata=_on_miss)

    # A dump of other prompts or other sampling: error (the run ends and names what differs), or
    # regenerate (run and replace; the old dump is quarantined).
    on_mismatch: str | None = field(default=None, metadata=_on_mismatch)

    # Where a call's dump is looked for: step (its own), run (the run's other steps, too), or prompt
    # (each prompt, in any step). null: step; run for rollout with dynamic sampling.
    match: str | None = field(default=None, metadata={"choices": ("step", "run", "prompt")})

    # Keys of the config to compare besides the host's: [sampling.temperature]; code: the stage's.
    identity: list[str] | None = None

    # Names of arguments that are not compared, besides annotate(ignore=...): [tag,self.lr].
    ignore: list[str] | None = None

    # Fields to leave out of a replayed result, so that the host computes them again: [rm_scores].
    drop_fields: list[str] | None = None

    # Restore python's, numpy's and torch's generators as after the stage; null: only under TRL.
    restore_rng: bool | None = None

    # Write dumps in a background thread: true, false, or auto (true under the Hydra callback, which
    # flushes at the end of the job). async_rollout and rollout_tq always write at once.
    background_write: Any = field(default=None, metadata=_background)

    # Seconds to wait for another job that generates the same step; 0: not at all. async_rollout and
    # rollout_tq never wait.
    wait_s: float | None = field(default=None, metadata=_seconds)

    # How many steps to keep, the last written, each with all its calls; null: all.
    keep_last: int | None = field(default=None, metadata=_positive)

    # The most bytes that a dump's values may take; more ends the run. null: half of the memory.
    max_bytes: int | None = field(default=None, metadata=_positive)

    # First half of the name of the run's directory; null: the host's name of the experiment, else
    # that of the Hydra job, else of the script, else of the working directory (a notebook, -c).
    experiment_name: str | None = None

    # Second half of the name of the run's directory; null: the host's name of the project, else
    # that of the directory with .git, .hg, pyproject.toml or setup.py at or above the script.
    project_name: str | None = None

    # Prompts a step; null: the host's number (rollout_tq: of those that a step submits).
    gbs: int | None = field(default=None, metadata=_positive)

    # Sessions a prompt; null: the host's number.
    n: int | None = field(default=None, metadata=_positive)

    # Longest prompt in tokens; null: the host's limit.
    prompt_len: int | None = field(default=None, metadata=_positive)

    # Longest response in tokens; null: the host's limit.
    response_len: int | None = field(default=None, metadata=_positive)

    # Of a role that was read, for messages: its own keys, and whether it lacks an engine.
    given_keys = frozenset[str]()
    lacks_engine = False


def as_given(text: str, role: str, local: Any) -> str:
    """`text` with each shared key that a role has for itself as that key of the role's."""
    own = "|".join(getattr(local, "given_keys", ()))
    return re.sub(rf"\bskip\.({own})\b", rf"skip.{role}.\1", text) if own else text


def to_generate(role: str, local: Any) -> str:
    """What to type so that a role that never generates does."""
    engine = " skip.start_engine=true" if getattr(local, "lacks_engine", False) else ""
    return as_given(f"skip.on_miss=generate{engine}", role, local)


@dataclass
class RolloutSkipConfig(RoleConfig):
    """One call generates a whole step; steps are the trainer's global steps."""


@dataclass
class AsyncRolloutSkipConfig(RoleConfig):
    """One call generates one sample; steps are feed-order indices."""


@dataclass
class RolloutTqSkipConfig(RoleConfig):
    """Rollouts travel through a queue and are sampled from a replay buffer."""


@dataclass
class RolloutValSkipConfig(RoleConfig):
    """One call generates a batch of a validation; `validation: replay` turns it on."""

    # Not inherited, because ``skip.steps`` lists steps of training. Step 0 is before training.
    steps: Any = field(default="all", metadata=_steps)

    # Not run: the dump of another step shows another model.
    match: str | None = field(default=None, metadata={"choices": ("step", "prompt")})


@dataclass
class SkipManagerConfig(RoleConfig):
    """The whole `skip` node: keys for all roles, and the roles."""

    # Master switch: false turns every role off; true turns none on.
    enable: bool = True
    steps: Any = field(default="all", metadata=_steps)
    dump_dir: str = field(default=DEFAULT_DUMP_DIR, metadata=_directory)
    action: str = field(default="cache", metadata=_actions)
    on_miss: str = field(default="generate", metadata=_on_miss)
    on_mismatch: str = field(default="error", metadata=_on_mismatch)
    identity: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    drop_fields: list[str] = field(default_factory=list)
    background_write: Any = field(default="auto", metadata=_background)
    wait_s: float = field(default=3600.0, metadata=_seconds)

    # false: the host starts no inference engine, and on_miss is error in every role that generates,
    # and in each other that sets none. Only under `skip` itself, as are the next four keys.
    start_engine: bool = True

    # Whether verl, TRL and SkyRL log the shares rlskip/replayed and rlskip/off_policy (generated at
    # another step) of the rollouts of listed steps, and rlskip/seconds_saved.
    log_metrics: bool = True

    # Whose manager reads this node: verl's own refuses the key, so none trains without rlskip.
    provider: str = field(default="rlskip", metadata={"choices": ("rlskip",)})

    # Validation: generate, or replay (cached as the role rollout_val, beside any other role).
    validation: str = field(default="generate", metadata={"choices": ("generate", "replay")})

    # Functions of third-party code that are stages: role to its target, or to a mapping.
    attach: dict[str, Any] = field(default_factory=dict)

    # The roles; the docstrings of their classes say what they are.
    rollout: RolloutSkipConfig = field(default_factory=RolloutSkipConfig)
    async_rollout: AsyncRolloutSkipConfig = field(default_factory=AsyncRolloutSkipConfig)
    rollout_tq: RolloutTqSkipConfig = field(default_factory=RolloutTqSkipConfig)
    rollout_val: RolloutValSkipConfig = field(default_factory=RolloutValSkipConfig)


TRAINING_ROLES = ("rollout", "async_rollout", "rollout_tq")  # dumps in the run's directory itself
VALIDATION_ROLE = "rollout_val"
BUILT_IN_ROLES = (*TRAINING_ROLES, VALIDATION_ROLE)
SHARED_KEYS = tuple(f.name for f in fields(SkipManagerConfig) if f.name not in BUILT_IN_ROLES)

# The class of each role that has one of the user's own, a :class:`rlskip.BaseSkip`.
SKIP_REGISTRY: dict[str, Any] = {}


def role_configs() -> dict[str, type[RoleConfig]]:
    """The dataclass of every role, built in or registered."""
    own = {name: role.config_class for name, role in SKIP_REGISTRY.items()}
    return {name: type(getattr(SkipManagerConfig(), name)) for name in BUILT_IN_ROLES} | own
