"""Names of a package that load on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def load_on_use(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for `package` that imports a module when one of its `names` is used.

    For type checkers the package imports the same names under ``TYPE_CHECKING``.
    """
    home = {name: module for module, its_names in names.items() for name in its_names}

    def __getattr__(name: str) -> Any:
        if name in home:
            # The next use finds it in the package, without this function.
            value = vars(sys.modules[package])[name] = getattr(import_module(home[name]), name)
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
