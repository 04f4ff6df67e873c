"""What ``SkipManager`` refuses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from typing import Any

from rlskip.config.skip import BUILT_IN_ROLES, SHARED_KEYS, SKIP_REGISTRY
from rlskip.errors import ConfigError

_KINDS: dict[str, tuple[Any, str]] = {
    "prompts": (str, "the name of an argument, or a function"),
    "identity": (Mapping, "a mapping, or a function"),
    "lacks": ((), "a function"),
    "ignore": ((list, tuple, Set), "a list of names"),
    "rows": (Mapping, "a mapping, or a function"),
    "on_replay": ((), "a function"),
}
"""What an option of ``annotate`` is, besides a function, and in words."""


def refuse_without_node(config: Any) -> None:
    if isinstance(config, dict) and not {"skip", "record"} & config.keys():
        raise ConfigError(
            f"the config has no entry skip, only {', '.join(map(str, config)) or 'nothing'}",
            "SkipManager.init",
            "give the full config, e.g. SkipManager.init({'skip': {'rollout': {'enable': True}}})",
        )


def refuse_other_kinds(role: str, **options: Any) -> None:
    for name, value in options.items():
        kind, words = _KINDS[name]
        if not (value is None or callable(value) or isinstance(value, kind)):
            raise ConfigError(
                f"expected {words}, got {value!r:.80}",
                f"SkipManager.annotate(role={role!r}, {name}=...)",
            )


def refuse_other_objects(func: Any) -> None:
    if isinstance(func, type) or not callable(func):
        raise ConfigError(
            f"{func!r:.80} is not a function",
            "SkipManager.annotate",
            "decorate a function, a method, a functools.partial or a callable object",
        )


def refuse_misspelt(role: str) -> None:
    """Refuse a role that is not known and looks like one that is, or has the name of a key."""
    known = {*BUILT_IN_ROLES, *SKIP_REGISTRY}
    is_name = isinstance(role, str) and role.isidentifier()
    is_key = is_name and role in SHARED_KEYS
    near = difflib.get_close_matches(str(role), known, n=1, cutoff=0.75)
    if is_name and not is_key and (role in known or not near):
        return
    what = f"there is no role {role!r}" + (f": skip.{role} is a key" if is_key else "")
    remedy = f"known: {', '.join(sorted(known))}"
    if near:
        remedy = f"did you mean {near[0]!r}? A role of your own needs a name that is less alike"
    raise ConfigError(what, "SkipManager.annotate", remedy)
