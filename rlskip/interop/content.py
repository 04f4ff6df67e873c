"""What a file of another program holds, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from rlskip.errors import ConfigError
from rlskip.jobs.records import FOLDER
from rlskip.store.layout import STAGES, as_step, refuse_links, safe_name


@attrs.frozen
class Into:
    """Where to import; what the user did not give is None, and a file or its path tells it."""

    dump_dir: Path
    name: str  # of a run that nobody names
    run: str | None = None
    step: int | None = None

    def directory_of(self, run: str | None) -> Path:
        """The directory of a run; raises ConfigError where the name is none, or names a link."""
        parts = [] if run is None else run.split("/")
        others = [p for p in parts if p != safe_name(p) or p[0] == "." or as_step(p) is not None]
        if run is None or len(parts) != 2 or others or parts[0] in (FOLDER, STAGES):
            no_name = f"{run!r} is not the name of a run"
            raise ConfigError(
                "the path does not contain the run" if run is None else no_name,
                "--run",
                "give it: --run EXPERIMENT_PROJECT/GBS.._N.._in.._out.. "
                "(`rlskip doctor -- <your command>` shows it)",
            )
        directory = self.dump_dir / run
        refuse_links(directory)
        return directory


@attrs.frozen
class Content:
    """What a file holds for one dump, with what its meta says besides; of a run if it tells."""

    step: int
    rollouts: Any
    rows: int
    info: dict[str, Any]
    part: int | None = None
    run: str | None = None
    role: str = "rollout"


@attrs.frozen
class Format:
    """A format that is read: how its files are called, and what they hold.

    ``read`` is None where they hold what stages computed (:mod:`rlskip.interop.train_dumps`).
    """

    name: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, Into], Iterator[Content]] | None
    is_pickle: bool = False


@attrs.frozen
class Imported:
    """An imported dump: `nbytes` in memory, None if a dump existed already."""

    file: str
    role: str
    step: int
    part: int | None
    run: str
    rows: int
    nbytes: int | None
