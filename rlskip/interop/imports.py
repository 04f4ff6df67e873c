"""Import of other programs' files into a dump_dir."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.interop import from_verl, samples
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.content import Format, Imported, Into
from rlskip.interop.pickles import named_errors
from rlskip.runs.on_disk import dumps_of
from rlskip.runs.opened import NoSuchPlaceError
from rlskip.store import StepStore

FORMATS = (from_verl.DUMPS, *samples.FORMATS)


def find(source: Path, step: int | None) -> list[tuple[Path, Format]]:
    """The files at or below `source` that are in one of the formats, in the order of numbers.

    A single file in none of the others is taken for a dump of verl.

    Raises
    ------
    NoSuchPlaceError
        There are none.
    ConfigError
        There are several, for the one `step` that is given.
    """
    if not source.exists():
        raise NoSuchPlaceError("no such file or directory", str(source))
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    found = [
        (file, form)
        for file in sorted(files, key=lambda path: [part.zfill(20) for part in path.parts])
        if (form := next((one for one in FORMATS if one.matches(file)), None)) is not None
    ]
    if source.is_file():
        return found or [(source, from_verl.DUMPS)]
    if not found:
        remedy = "expected dumps of verl, slime or miles, or episodes of verifiers"
        raise NoSuchPlaceError("no dumps of other programs here", str(source), remedy)
    if step is not None and len(found) > 1:
        what = f"{len(found)} dumps cannot all be of one step"
        raise ConfigError(what, "--step", "name one of the files")
    return found


def import_files(found: Iterable[tuple[Path, Format]], into: Into) -> Iterator[Imported]:
    """Store what each file holds. A dump that exists already stays.

    Raises
    ------
    ForeignDumpError
        A file is not what it should be, or would be the dump that another file has become. The
        dumps before it are stored.
    ConfigError
        Neither the user nor the path gives the name of a run.
    """
    taken: dict[tuple[Path, int, int | None], Path] = {}
    for file, form in found:
        with named_errors(file):
            assert form.read is not None
            for one in form.read(file, into):
                run = one.run or into.run or f"{into.name}/GBSany_Nany_inany_outany"
                directory, nbytes = into.directory_of(run), None
                if one.role == VALIDATION_ROLE:
                    directory, run = directory / one.role, f"{run}/{one.role}"
                other = taken.setdefault((directory, one.step, one.part), file)
                if other != file:
                    what = f"it is of step {one.step}, and so is {other}"
                    remedy = "import it alone, with --run EXPERIMENT_PROJECT/GBSany_..."
                    raise ForeignDumpError(what, remedy=remedy)
                if not dumps_of(directory, one.step, one.part):
                    info = {"job": "import", "imported": str(file), **one.info}
                    saved = StepStore(directory).save(
                        one.step, one.rollouts, info=info, part=one.part
                    )
                    nbytes = saved.nbytes
                yield Imported(str(file), one.role, one.step, one.part, run, one.rows, nbytes)
