"""The `skip` node: its dataclasses, and the way from any full config to complete roles.

Shared keys stand on top, roles below. What a role was not given (None) it takes from above;
what is given nowhere is taken from where the host's config keeps it (`trainer`, `data`,
`actor_rollout_ref.rollout`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrs
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlskip.config.attach import AttachConfig, read_attach
from rlskip.config.check import Problem, did_you_mean, node_of, raise_all, read
from rlskip.config.steps import Steps, StepsError
from rlskip.errors import ConfigError

ACTIONS = ("cache", "repeat")
# Named for later by verl's SkipAction; refused until they exist.
PLANNED_ACTIONS = ("random", "empty")

DEFAULT_DUMP_DIR = "~/.rlskip/rollout_dump"

# Tells a job's child processes what a relative dump_dir is relative to.
DIRECTORY_VARIABLE = "RLSKIP_DIRECTORY"

_actions = {"choices": ACTIONS + PLANNED_ACTIONS}
_on_miss = {"choices": ("generate", "error")}
_on_mismatch = {"choices": ("error", "regenerate", "ignore")}
_background = {"choices": ("auto", True, False)}
_positive = {"min": 1}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@dataclass
class RoleConfig:
    """One role under `skip`. None means: as `skip.<the same key>` says."""

    # Whether this role skips at all.
    enable: bool = False

    # Steps that are eligible; at any other step the stage runs as if rlskip were not there.
    # A list of ints, a string such as "1-128,200,300-400:10", or all.
    steps: Any = None

    # Where dumps lie. ~ is expanded; relative means relative to the original working directory.
    dump_dir: str | None = None

    # cache: replay the dump of this very step. repeat: when it has none, replay another step's.
    action: str | None = field(default=None, metadata=_actions)

    # No usable dump: generate (run the stage, then dump), or error (the stage is never called).
    on_miss: str | None = field(default=None, metadata=_on_miss)

    # A dump of other prompts or other sampling: error, regenerate (run and replace), or ignore.
    on_mismatch: str | None = field(default=None, metadata=_on_mismatch)

    # Fields to leave out of a replayed result, so that the host computes them again (rewards).
    drop_fields: list[str] | None = None

    # Put the global python, numpy and torch generators where they stood after the stage.
    restore_rng: bool | None = None

    # Write dumps behind the training thread's back: true, false, or auto (where a flush at the
    # end of the job is certain: under the Hydra callback).
    background_write: Any = field(default=None, metadata=_background)

    # How long to wait for another job that is generating the same step, in seconds; 0: never.
    # (async_rollout never waits.)
    wait_s: float | None = field(default=None, metadata={"min": 0})

    # Dumps to keep, the last written; null: all.
    keep_last: int | None = field(default=None, metadata=_positive)

    # What dumps may take together: bytes, or a string such as 200GB; null: any size.
    max_size: int | str | None = None

    # First half of a run's directory; null: trainer.experiment_name, else default_experiment_name.
    experiment_name: str | None = None

    # Second half of a run's directory; null: trainer.project_name, else default_project_name.
    project_name: str | None = None

    # Prompts a step; null: data.gen_batch_size, else data.train_batch_size.
    gbs: int | None = field(default=None, metadata=_positive)

    # Sessions a prompt; null: actor_rollout_ref.rollout.n.
    n: int | None = field(default=None, metadata=_positive)

    # Longest prompt in tokens; null: data.max_prompt_length.
    prompt_len: int | None = field(default=None, metadata=_positive)

    # Longest response in tokens; null: data.max_response_length.
    response_len: int | None = field(default=None, metadata=_positive)


@dataclass
class RolloutSkipConfig(RoleConfig):
    """Role `rollout`: one call generates a whole step; steps are the trainer's global steps."""


@dataclass
class AsyncRolloutSkipConfig(RoleConfig):
    """Role `async_rollout`: one call generates one sample; steps are feed-order indices."""


@dataclass
class RolloutTqSkipConfig(RoleConfig):
    """Role `rollout_tq`: rollouts travel through a queue and are sampled from a replay buffer."""


@dataclass
class SkipManagerConfig:
    """The whole `skip` node. The shared keys mean what :class:`RoleConfig` says of them."""

    # Master switch: false turns every role off; true turns none on.
    enable: bool = True
    steps: Any = "all"
    dump_dir: str = DEFAULT_DUMP_DIR
    action: str = field(default="cache", metadata=_actions)
    on_miss: str = field(default="generate", metadata=_on_miss)
    on_mismatch: str = field(default="error", metadata=_on_mismatch)
    drop_fields: list[str] = field(default_factory=list)
    restore_rng: bool = False
    background_write: Any = field(default="auto", metadata=_background)
    wait_s: float = field(default=3600.0, metadata={"min": 0})
    keep_last: int | None = field(default=None, metadata=_positive)
    max_size: int | str | None = None
    experiment_name: str | None = None
    project_name: str | None = None
    gbs: int | None = field(default=None, metadata=_positive)
    n: int | None = field(default=None, metadata=_positive)
    prompt_len: int | None = field(default=None, metadata=_positive)
    response_len: int | None = field(default=None, metadata=_positive)

    # Functions of somebody else's code that are stages: role to "package.module:Class.method", to
    # a mapping (rlskip.config.attach.AttachConfig), or to a list of these.
    attach: dict[str, Any] = field(default_factory=dict)

    rollout: RolloutSkipConfig = field(default_factory=RolloutSkipConfig)
    async_rollout: AsyncRolloutSkipConfig = field(default_factory=AsyncRolloutSkipConfig)
    rollout_tq: RolloutTqSkipConfig = field(default_factory=RolloutTqSkipConfig)


_BUILT_IN = {"rollout", "async_rollout", "rollout_tq"}

# Where a host keeps what `skip` leaves null, in order of preference, and the last resort.
_FROM_HOST: dict[str, tuple[tuple[str, ...], Any]] = {
    "experiment_name": (("trainer.experiment_name",), "default_experiment_name"),
    "project_name": (("trainer.project_name",), "default_project_name"),
    "gbs": (("data.gen_batch_size", "data.train_batch_size"), None),
    "n": (("actor_rollout_ref.rollout.n",), None),
    "prompt_len": (("data.max_prompt_length",), None),
    "response_len": (("data.max_response_length",), None),
}

# verl >= 0.9 fills every leaf of every role with these; there they say nothing of the user's will.
_VERL_TARGET = "verl.utils.skip"
_VERL_DEFAULTS: dict[str, Any] = {
    "enable": False,
    "steps": [],
    "dump_dir": "~/.verl/rollout_dump",
    "action": "cache",
}


@attrs.frozen
class RoleSpec:
    """What the registry knows of a role: its dataclass and the actions it supports.

    `options` are the keyword options that a stage may have; `online_step` says that every call
    tells its own step.
    """

    config: type[RoleConfig] = RoleConfig
    actions: tuple[str, ...] = ACTIONS
    options: frozenset[str] = frozenset()
    online_step: bool = False


def skip_node(config: Any) -> dict[str, Any] | None:
    """The plain `skip` mapping of a full config; None when there is none.

    Raises what :func:`rlskip.config.check.node_of` raises.
    """
    if isinstance(config, dict) and isinstance(config.get("skip"), SkipManagerConfig):
        config = config["skip"]
    if isinstance(config, SkipManagerConfig):
        return dataclasses.asdict(config)
    node = node_of(config, "skip")
    if node is not None and {"skip", "hydra"} <= node.keys():
        raise ConfigError(
            "an option file was composed into `skip` instead of beside it",
            "skip.skip",
            "choose it with +skip=<option>, without @skip",
        )
    return node


def read_roles(config: Any, registry: Mapping[str, RoleSpec]) -> dict[str, RoleConfig]:
    """The enabled roles of a full config, each complete: nothing left to inherit.

    Parameters
    ----------
    config
        A full DictConfig, a mapping with a `skip` entry, or a :class:`SkipManagerConfig`.
    registry
        The roles that somebody registered.

    Returns
    -------
    dict
        Role to its dataclass, with ``steps`` parsed (:class:`Steps`) and ``dump_dir`` an
        absolute path. Empty when `skip` is absent or switched off.

    Raises
    ------
    ConfigError
        Names *every* problem, whether the role it concerns is enabled or not.
    """
    node = skip_node(config)
    if node is None:
        return {}
    node = _without_host_defaults(node)
    keys = {f.name for f in dataclasses.fields(SkipManagerConfig)}
    shared_keys = keys - _BUILT_IN

    problems: list[Problem] = []
    shared_node = {key: node[key] for key in node if key in shared_keys}
    shared = read(SkipManagerConfig, shared_node, "skip", problems)
    # Here as well as in each role: every role may have a value of its own.
    _parse_steps(shared.steps, "skip.steps", problems)
    _absolute(shared.dump_dir, "skip.dump_dir", problems)
    parse_size(shared.max_size, "skip.max_size", problems)
    read_attach(shared.attach, registry, problems)

    roles: dict[str, RoleConfig] = {}
    for key, value in node.items():
        if key in shared_keys:
            continue
        spec = registry.get(key)
        if spec is None:
            problems.append(_unknown(key, value, shared_keys, registry))
        elif not isinstance(value, Mapping):
            problems.append(Problem(f"skip.{key}", f"expected a mapping, got {value!r}"))
        else:
            role = read(spec.config, value, f"skip.{key}", problems)
            _complete(role, shared, config, key, spec, problems)
            roles[key] = role
    # What several roles inherit is wrong once.
    raise_all(list(dict.fromkeys(problems)))
    return {key: role for key, role in roles.items() if shared.enable and role.enable}


def read_attachments(
    config: Any, registry: Mapping[str, RoleSpec]
) -> dict[str, list[AttachConfig]]:
    """What ``skip.attach`` says, of a config that :func:`read_roles` found right."""
    node = skip_node(config) or {}
    return read_attach(node.get("attach", {}), registry, [])


def look_up(config: Any, key: str) -> Any:
    """The value at a dotted key of a DictConfig or of nested mappings; None when not there.

    Raises
    ------
    ConfigError
        An interpolation on the way does not resolve.
    """
    try:
        if isinstance(config, DictConfig):
            return OmegaConf.select(config, key, default=None)
        for name in key.split("."):
            config = config.get(name) if isinstance(config, (Mapping, DictConfig)) else None
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], key) from error
    return config


def original_directory() -> Path:
    """Where the user typed the command: Hydra may have changed the working directory since."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.cwd)
    # A process that the job started; the callback left it this.
    return Path(os.environ.get(DIRECTORY_VARIABLE) or os.getcwd())


def _complete(
    role: RoleConfig,
    shared: SkipManagerConfig,
    config: Any,
    name: str,
    spec: RoleSpec,
    problems: list[Problem],
) -> None:
    """Fill in place what `role` was not given, from the shared keys, then from the host."""
    own = {f.name for f in dataclasses.fields(RoleConfig) if getattr(role, f.name) is not None}

    def typed(key: str) -> str:
        """The full key at which the value of `key` stands."""
        return f"skip.{name}.{key}" if key in own else f"skip.{key}"

    for f in dataclasses.fields(RoleConfig):
        if f.name not in own:
            setattr(role, f.name, getattr(shared, f.name))
    for key, (keys, last_resort) in _FROM_HOST.items():
        if getattr(role, key) is None:
            found = (look_up(config, key) for key in keys)
            setattr(role, key, next((v for v in found if v is not None), last_resort))
    role.steps = _parse_steps(role.steps, typed("steps"), problems)
    role.max_size = parse_size(role.max_size, typed("max_size"), problems)
    role.dump_dir = _absolute(str(role.dump_dir), typed("dump_dir"), problems)
    if role.action in PLANNED_ACTIONS:
        what = f"{role.action!r} is planned, but not there yet"
        problems.append(Problem(typed("action"), what, f"use one of {', '.join(ACTIONS)}"))
    elif role.action not in spec.actions:
        what = f"role {name} does not support {role.action!r}"
        problems.append(Problem(typed("action"), what, f"use one of {', '.join(spec.actions)}"))
    if role.enable and (role.on_miss, role.on_mismatch) == ("error", "regenerate"):
        what = f"error never runs the stage, and {typed('on_mismatch')}=regenerate runs it"
        problems.append(Problem(typed("on_miss"), what, "choose one of them"))


def _parse_steps(value: Any, key: str, problems: list[Problem]) -> Steps:
    try:
        return Steps.parse(value, key)
    except StepsError as error:
        problems.append(Problem(key, error.what, error.remedy))
        return Steps()


def parse_size(value: int | str | None, key: str, problems: list[Problem]) -> int | None:
    """Bytes of ``200GB``, ``1.5 TiB`` or a plain number."""
    if value is None or (isinstance(value, int) and value >= 0):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        problems.append(Problem(key, f"{value!r} is no size", "write bytes, or e.g. 200GB"))
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _absolute(value: str, key: str, problems: list[Problem]) -> str:
    """`value` as an absolute path, where it is one of a directory."""
    if not value.strip():
        what = "it is empty"
        problems.append(Problem(key, what, "name a directory (is a shell variable unset?)"))
    elif _URL.match(value):
        what = f"{value!r} is a URL; dumps need a file system"
        problems.append(Problem(key, what, "mount it, or name a local directory"))
    else:
        try:
            return str(original_directory() / Path(value).expanduser())
        except RuntimeError as error:  # ~nobody
            problems.append(Problem(key, f"{value!r}: {error}", "name the directory in full"))
    return value


def _unknown(
    key: str, value: Any, shared_keys: Iterable[str], registry: Mapping[str, Any]
) -> Problem:
    known = [*sorted(shared_keys), *registry]
    looks_like_a_typo = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if isinstance(value, Mapping) and not looks_like_a_typo:
        return Problem(
            f"skip.{key}",
            "nobody registered this role",
            f"import the module that holds its `@register_skip({key!r})` before the job starts "
            f"(registered: {', '.join(registry)})",
        )
    return Problem(f"skip.{key}", "unknown key", did_you_mean(key, known, "skip"))


def _without_host_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Drop verl's `_target_` and every role leaf that merely holds verl's own default."""
    target = node.pop("_target_", None)
    if not str(target).startswith(_VERL_TARGET):
        return node
    return {
        key: {k: v for k, v in value.items() if k != "_target_" and not _is_verl_default(k, v)}
        if isinstance(value, Mapping)
        else value
        for key, value in node.items()
    }


def _is_verl_default(key: str, value: Any) -> bool:
    return key in _VERL_DEFAULTS and value == _VERL_DEFAULTS[key]
