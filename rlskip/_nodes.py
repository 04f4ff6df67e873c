"""Where rlskip's nodes are in a config: at its top level, or below a node `rlskip`.

An application may have its own key `skip`, or another of these names. There
``+skip@rlskip=rollout_cache`` puts rlskip's node below `rlskip`, and messages name each key as it
is typed.
"""

from __future__ import annotations

import re

#: The nodes, each with an option that sets it.
NODES = {
    "skip": "rollout_cache",
    "dispatch": "rollout_level",
    "replay": "fail_closed",
    "merge": "prefix",
    "record": "stages",
}
#: The node that may hold the others.
ABOVE = "rlskip"

# The nodes that are below ABOVE in the config that this process read last.
_below: set[str] = set()

_NAMES = "|".join(NODES)
_KEY = re.compile(rf"(?<![\w.@+/])({_NAMES})(?=\.[a-z_])")
_OPTION = re.compile(rf"(?<=\+)({_NAMES})(?==)")


def place(name: str, *, below: bool) -> None:
    """Record where the config that is being read has node `name`."""
    (_below.add if below else _below.discard)(name)


def or_own_key(name: str) -> str:
    """The end of a remedy where a key `name` may be the application's own; else empty."""
    if name in _below or name not in NODES:
        return ""
    return (
        f"; if `{name}` is the application's own key, choose rlskip's option with "
        f"+{name}@{ABOVE}={NODES[name]}"
    )


def as_typed(text: str) -> str:
    """`text` with every key and option of a node below `rlskip` as it is typed there.

    >>> place("skip", below=True)
    >>> as_typed("set skip.steps=1-9, or add +skip=rollout_cache")
    'set rlskip.skip.steps=1-9, or add +skip@rlskip=rollout_cache'
    >>> place("skip", below=False)
    """
    if not _below:
        return text
    if text in _below:
        return f"{ABOVE}.{text}"
    text = _KEY.sub(lambda key: f"{ABOVE}.{key[0]}" if key[0] in _below else key[0], text)
    return _OPTION.sub(lambda key: f"{key[0]}@{ABOVE}" if key[0] in _below else key[0], text)
