"""`skip.attach`: which functions of a third-party trainer are stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs

from rlskip.config.check import Problem, did_you_mean, read
from rlskip.config.skip import RoleSpec
from rlskip.errors import ConfigError

_NAMES = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_TARGET = re.compile(rf"({_NAMES}):({_NAMES})")
# After the first name, a part may also be a key of a mapping or an index.
_PATH = re.compile(r"[^\W\d]\w*(?:\.\w+)*")


@attrs.frozen
class Target:
    """``package.module:function`` or ``package.module:Class.method``."""

    module: str
    path: str

    @classmethod
    def parse(cls, text: str, where: str = "") -> Target:
        """Parse `text`, the value of config key `where`; raises ConfigError."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} does not name a function",
                where,
                'write "package.module:Class.method" or "package.module:function"',
            )
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


def _parse_target(value: str, key: str) -> str:
    return str(Target.parse(value, key))


def _parse_path(value: str, key: str) -> str:
    if _PATH.fullmatch(value):
        return value
    raise ConfigError(f"{value!r} is not a path", key, "write e.g. self.state.global_step")


def _parse_paths(values: list[str], key: str) -> list[str]:
    return [_parse_path(value, f"{key}.{i}") for i, value in enumerate(values)]


def _parse_step(value: str, key: str) -> str:
    return _parse_target(value, key) if ":" in value else _parse_path(value, key)


@dataclass
class AttachConfig:
    """One function under ``skip.attach.<role>``; a plain string is short for `target`.

    A path starts at an argument of the function and continues through attributes and keys:
    ``self.state.global_step``, ``prompts.meta_info.global_steps``.
    """

    # The function: package.module:Class.method or package.module:function.
    target: str = field(default="", metadata={"parse": _parse_target})

    # Path of the step, or a package.module:function that takes the call's arguments and returns
    # the step, or None if the call must not be skipped. null: the step of SkipManager.set_step.
    step: str | None = field(default=None, metadata={"parse": _parse_step})

    # Path of the prompts; null: the argument called prompts, else the first after self and
    # after a step or seed.
    prompts: str | None = field(default=None, metadata={"parse": _parse_path})

    # Paths of other values that must be equal for a dump to replace the call.
    identity: list[str] = field(default_factory=list, metadata={"parse": _parse_paths})

    # Names of arguments that are not compared, although they are plain data.
    ignore: list[str] = field(default_factory=list)

    # What the fields of the function's rows hold, where their names do not tell: {reward: won}.
    rows: dict[str, Any] = field(default_factory=dict)


def read_attach(
    node: Mapping[str, Any], registry: Mapping[str, RoleSpec], problems: list[Problem]
) -> dict[str, AttachConfig]:
    """The function of each role; `node` is the mapping at ``skip.attach``.

    Problems are appended to `problems`.
    """
    attach: dict[str, AttachConfig] = {}
    attached: dict[str, str] = {}
    for role, entry in node.items():
        at = f"skip.attach.{role}"
        if role not in registry:
            what = "this role is not registered"
            problems.append(Problem(at, what, did_you_mean(str(role), registry, "skip.attach")))
        elif "queue" in registry[role].options:
            what = "its stages need a queue, which no path names"
            remedy = f"decorate them: SkipManager.annotate({role!r}, queue=..., phase=...)"
            problems.append(Problem(at, what, remedy))
        elif not isinstance(entry, str | Mapping):
            what = f"expected a function's name or a mapping, got {entry!r}"
            problems.append(Problem(at, what, 'write "package.module:Class.method"'))
        else:
            given = {"target": entry} if isinstance(entry, str) else entry
            one = attach[role] = read(AttachConfig, given, at, problems)
            if one.step and registry[role].online_step:
                what = "this role reads the step from each call"
                problems.append(Problem(f"{at}.step", what, "leave it out"))
            if attached.setdefault(one.target, at) != at:
                what = f"{one.target} is already attached at {attached[one.target]}"
                problems.append(Problem(at, what, "one function is one stage"))
    return attach
