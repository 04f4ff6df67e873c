"""`skip.attach`: which functions of a third-party trainer are stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs

from rlskip.config.check import Problem, did_you_mean, read
from rlskip.errors import ConfigError

_NAMES = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_TARGET = rf"({_NAMES}):({_NAMES})"
# After the first name, a part may also be a key of a mapping or an index.
_PATH = r"[^\W\d]\w*(?:\.\w+)*"

_FUNCTION = "package.module:Class.method or package.module:function"
_path = {"pattern": _PATH, "like": "a path, such as self.state.global_step"}
_step = {"pattern": f"{_PATH}|{_TARGET}", "like": f"{_path['like']}, or {_FUNCTION}"}


@attrs.frozen
class Target:
    """``package.module:function`` or ``package.module:Class.method``."""

    module: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse `text`; raises ConfigError."""
        if match := re.fullmatch(_TARGET, text):
            return cls(match[1], match[2])
        raise ConfigError(f"{text!r} does not name a function", remedy=f"write {_FUNCTION}")

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


@dataclass
class AttachConfig:
    """One function under ``skip.attach.<role>``; a plain string is short for `target`.

    A path starts at an argument of the function and continues through attributes and keys:
    ``self.state.global_step``, ``prompts.meta_info.global_steps``.
    """

    # The function: package.module:Class.method or package.module:function.
    target: str = field(default="", metadata={"pattern": _TARGET, "like": _FUNCTION})

    # Path of the step, or a package.module:function that takes the call's arguments and returns
    # the step, or None if the call must not be skipped. null: the step of SkipManager.set_step.
    step: str | None = field(default=None, metadata=_step)

    # Path of the prompts; null: the argument called prompts, else the first after self and
    # after a step or seed.
    prompts: str | None = field(default=None, metadata=_path)

    # Paths of other values that must be equal for a dump to replace the call.
    identity: list[str] = field(default_factory=list, metadata=_path)

    # Names of arguments that are not compared, although they are plain data.
    ignore: list[str] = field(default_factory=list)

    # What the fields of the function's rows hold, where their names do not tell: {reward: won}.
    rows: dict[str, Any] = field(default_factory=dict)


def read_attach(
    node: Mapping[str, Any], registry: Mapping[str, Any], problems: list[Problem]
) -> dict[str, AttachConfig]:
    """The function of each role of `registry`; `node` is the mapping at ``skip.attach``.

    Problems are appended to `problems`.
    """
    attach: dict[str, AttachConfig] = {}
    attached: dict[str, str] = {}
    for role, entry in node.items():
        at = f"skip.attach.{role}"
        if role not in registry:
            known = did_you_mean(str(role), registry, "skip.attach")
            problems.append(Problem(at, "this role is not registered", known))
        elif "queue" in registry[role].stage_options:
            remedy = f"decorate them: SkipManager.annotate({role!r}, queue=..., phase=...)"
            problems.append(Problem(at, "its stages need a queue, which no path names", remedy))
        elif not isinstance(entry, str | Mapping):
            what = f"expected a function's name or a mapping, got {entry!r}"
            problems.append(Problem(at, what, f"write {_FUNCTION}"))
        else:
            given = {"target": entry} if isinstance(entry, str) else {"target": "", **entry}
            one = attach[role] = read(AttachConfig, given, at, problems)
            if one.step and registry[role].support_online_step:
                what = "this role reads the step from each call"
                problems.append(Problem(f"{at}.step", what, "leave it out"))
            other = attached.setdefault(one.target, at)
            if one.target and other != at:
                what = f"{one.target} is already attached at {other}"
                problems.append(Problem(at, what, "one function is one stage"))
    return attach
