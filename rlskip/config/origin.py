"""What names a run that was given no names: its script, and the project that this is in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.check import look_up
from rlskip.config.dump_dir import hydra_config, original_directory

# For the processes that a job starts: their own script is another one.
ORIGIN_VARIABLE = "RLSKIP_ORIGIN"

_ROOTS = (".git", ".hg", "pyproject.toml", "setup.py")
_INSTALLED = {"site-packages", "dist-packages"}
# Ray copies a working_dir into a directory whose name is a hash of what is in it.
_OF_RAY = "_ray_pkg_"


@attrs.frozen
class Origin:
    """Where a run comes from."""

    name: str  #: of its Hydra job, else of its script, else of the working directory
    project: str  #: the name of the project's root directory
    place: str  #: the script, else the working directory, in full

    @classmethod
    def of(cls, config: Any) -> Origin:
        """That of a run with this full config: its job may have started this process."""
        inherited = os.environ.get(ORIGIN_VARIABLE)
        found = cls(*json.loads(inherited)) if inherited else cls.at(_script())
        job = look_up(config, "hydra.job.name") or look_up(hydra_config(), "hydra.job.name")
        return attrs.evolve(found, name=str(job)) if job else found

    @classmethod
    def at(cls, script: Path | None) -> Origin:
        """That of a script, or of what has none: a notebook, ``-c``, an installed command."""
        folder = Path(os.path.realpath(script.parent if script else original_directory()))
        above = (folder, *folder.parents)
        root = next((f for f in above if any(os.path.exists(f / name) for name in _ROOTS)), folder)
        parts = (folder / script.name if script else folder).parts
        copied = next((i for i, part in enumerate(parts) if part.startswith(_OF_RAY)), 0)
        name = script.stem if script and script.stem != "__main__" else _name(folder)
        return cls(name, _name(root), os.path.join(*parts[copied:]))

    def to_variable(self) -> str:
        """As :data:`ORIGIN_VARIABLE` hands it to other processes."""
        return json.dumps(attrs.astuple(self))


def is_own(script: str) -> bool:
    """Whether a file is a script of the user's, and not an installed command or module."""
    path = Path(script)
    in_environment = path.parent.name == "bin" and path.suffix != ".py"
    return os.path.isfile(path) and not in_environment and _INSTALLED.isdisjoint(path.parts)


def _script() -> Path | None:
    # A worker of joblib's has its own `__main__`, and the arguments of the script.
    files = (getattr(sys.modules.get("__main__"), "__file__", None), sys.argv[0])
    own = (os.path.abspath(file) for file in files if file and is_own(os.path.abspath(file)))
    return next(map(Path, own), None)


def _name(folder: Path) -> str:
    return "ray" if folder.name.startswith(_OF_RAY) else folder.name or "root"
