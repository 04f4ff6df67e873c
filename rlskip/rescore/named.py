"""A function of the user's by its name on the command line."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from rlskip.errors import ConfigError

_DYNAMIC = re.compile(r"import \*|\b(__getattr__|globals|vars|setattr|exec)\b")
_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def named_function(spec: str, option: str) -> Any:
    """What ``package.module:name`` names; modules of the working directory come first.

    Raises ConfigError, which names the `option`, without such a function, or where its module
    cannot be imported.
    """
    module, _, name = spec.partition(":")
    if not name:
        raise ConfigError(f"{spec!r} names no function", option, "give package.module:name")
    sys.path.insert(0, os.getcwd())
    _refuse_typo(module, name, option)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # of what the module runs
        what = f"{spec} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(what, option) from error
    return found


def _refuse_typo(module: str, name: str, option: str) -> None:
    """Refuse a name that a module's source lacks, before the module imports what takes seconds."""
    file = Path(f"{module}.py")
    source = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    names, word = _DEFINED.findall(source), rf"\b{re.escape(name.partition('.')[0])}\b"
    if not names or re.search(word, source) or _DYNAMIC.search(source):
        return
    close = difflib.get_close_matches(name, names, 1)
    there = f"did you mean {module}:{close[0]}?" if close else f"it has {', '.join(names):.200}"
    what = f"{module}:{name} does not exist: the module has no such function"
    raise ConfigError(what, option, there)
