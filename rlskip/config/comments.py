"""The comments above the fields of a dataclass: docs/keys.md shows them, and errors."""

from __future__ import annotations

import dataclasses
import inspect
import re

_FIELD = re.compile(r"^((?:    # .*\n)+)    (\w+): ", re.MULTILINE)


def comments(schema: type) -> dict[str, str]:
    """The comment of each field, those of base classes included; empty without the source."""
    bases = [base for base in reversed(schema.__mro__) if dataclasses.is_dataclass(base)]
    try:
        source = "".join(map(inspect.getsource, bases))
    except (OSError, TypeError):
        return {}
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in _FIELD.findall(source)}


def meaning(schema: type, name: str) -> str:
    """The first sentence of a field's comment, to stand within a message; empty without one."""
    sentence = re.split(r"[.] ", comments(schema).get(name, ""), maxsplit=1)[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]
