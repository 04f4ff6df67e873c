"""A function of the user's by its name on the command line."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from rlskip.errors import ConfigError


def named_function(spec: str, option: str) -> Any:
    """What ``package.module:name`` names; modules of the working directory come first.

    A typo is found in the module's source, before the module imports what takes seconds.

    Parameters
    ----------
    option
        Where the user gave it, for messages.

    Raises
    ------
    ConfigError
        There is no such function, or its module cannot be imported.
    """
    module, _, name = spec.partition(":")
    if not name:
        raise ConfigError(f"{spec!r} names no function", option, "give package.module:name")
    sys.path.insert(0, os.getcwd())
    if (names := _names_in(module)) is not None and name.partition(".")[0] not in names:
        close = difflib.get_close_matches(name, names, 1)
        what = f"{spec} does not exist: the module has no such function"
        there = f"did you mean {module}:{close[0]}?" if close else f"it has {', '.join(names):.200}"
        raise ConfigError(what, option, there)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # of what the module runs
        what = f"{spec} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(what, option) from error
    return found


def _names_in(module: str) -> list[str] | None:
    """The functions and other names that a module's source binds, without running it.

    None where that does not tell: in a package, with a star or `__getattr__`, or without a source.
    """
    if "." in module or not (file := Path(f"{module}.py")).is_file():
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.alias):
            names[node.asname or node.name.partition(".")[0]] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "vars", "setattr"):
            return None
    return None if not names or {"*", "__getattr__"} & names.keys() else list(names)
