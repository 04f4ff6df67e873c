"""What ``SkipManager`` refuses, and what is said of prompts that cannot be compared."""

from __future__ import annotations

import difflib
from typing import Any

from rlskip.config.skip import BUILT_IN_ROLES, SHARED_KEYS, SKIP_REGISTRY
from rlskip.errors import ConfigError
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.skip.arguments import is_single
from rlskip.skip.stage import Given


def refuse_without_node(config: Any) -> None:
    if isinstance(config, dict) and not {"skip", "record"} & config.keys():
        raise ConfigError(
            f"the config has no entry skip, only {', '.join(map(str, config)) or 'nothing'}",
            "SkipManager.init",
            "give the full config, e.g. SkipManager.init({'skip': {'rollout': {'enable': True}}})",
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
    near = difflib.get_close_matches(str(role), known, n=1, cutoff=0.75)
    is_name = isinstance(role, str) and role.isidentifier()
    is_key = is_name and role in SHARED_KEYS
    also = f": skip.{role} is a key" if is_key else ""
    if not is_name or is_key or (near and role not in known):
        raise ConfigError(
            f"there is no role {role!r}{also}",
            "SkipManager.annotate",
            f"did you mean {near[0]!r}? A role of your own needs a name that is less alike"
            if near
            else f"known: {', '.join(sorted(known))}",
        )


# -- prompts ---------------------------------------------------------------------------------


def explained(call: Given, error: UnsupportedTypeError) -> UnsupportedTypeError:
    """`error`; where it is about an argument that was not named as the prompts, it says so."""
    taken, of_prompts = call.holder, error.where.startswith("prompts")
    others = [name for name in call.stage.names if name != taken]
    if call.stage.prompts is not None or taken == "prompts" or not others or not of_prompts:
        return error
    first = ", the first argument," if taken == call.stage.names[0] else ""
    return type(error)(
        f"{error.what}; {taken!r}{first} was taken for the prompts",
        error.where,
        f"name the argument that holds them: annotate(prompts={others[0]!r})",
    )


def nothing_to_tell_by(call: Given) -> UnsupportedTypeError:
    """The error for prompts all of whose names are such as are never compared."""
    from rlskip.batch.columns import columns_of  # needs numpy

    names, by = [str(name) for name in columns_of(call.prompts)], "lambda ...: ..."
    if call.stage.has_only_ignored and is_single(call.prompts):
        names, by = call.stage.names, repr(call.stage.names[-1])
    has = f"only {', '.join(names)}, which no replay compares" if names else "no fields"
    return UnsupportedTypeError(
        f"nothing tells the prompts of {call.stage.name} apart: they have {has}",
        "prompts",
        f"give them a field with their content, or name what does: annotate(prompts={by})",
    )
