"""Which runs a directory holds, and what a name on the command line means."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from rlskip.batch.decoding import Decode, Decoder
from rlskip.jobs.records import FOLDER
from rlskip.runs import on_disk
from rlskip.runs.opened import NoSuchPlaceError, Run, Runs, Step
from rlskip.store.layout import STAGES, Place, as_step


def open(
    path: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | Any = None
) -> Run | Runs:
    """The runs below a directory, or the run whose own directory it is.

    ``rlskip.open(path).run`` is a :class:`~rlskip.runs.opened.Run` for both, if there is one run.
    Nothing of the dumps is read, and no code from a dump is ever run.

    `path` is a ``skip.dump_dir``, a directory below it, or that of one run. Or a file of another
    program, or the directory of such: verl's ``rollout_data_dir``, ``traces.jsonl`` of verifiers
    and prime-rl, TRL's completions (Parquet), or JSON lines with ``messages``. Raises
    NoSuchPlaceError where there is none.

    `tokenizer` makes ``prompt_text`` and ``response_text`` of tokens: the directory of a local one
    (read by transformers, without code from it), or an object with a method ``decode``.
    """
    decode = None if tokenizer is None else Decoder(tokenizer)
    return _opened(Path(os.path.expanduser(path)), decode)


def _opened(where: Path, decode: Decode | None) -> Run | Runs:
    """The run of that very directory, whatever its roles have below it; else all runs below it."""
    from rlskip.runs.json_lines import files_in, run_of_files  # needs blosc2, as most verbs do not

    if files_in(where) and (where.is_file() or not find_runs(where)):
        return Run(run_of_files(where.resolve()), decode=decode)
    runs = find_runs(where, decode)
    itself = next((run for run in runs if run.directory == where.resolve()), None)
    return Runs(where, tuple(runs)) if itself is None else itself


def find_runs(where: Path, decode: Decode | None = None) -> list[Run]:
    """The runs at or below a directory: a dump_dir, an experiment's, or a run's own.

    A run is a directory with dumps. Names with numbers are in natural order.
    """
    if not where.is_dir():
        what, remedy = "no such file or directory", "name a skip.dump_dir, or a run in it"
        if where.exists():
            what = "it is not a file of rollouts"
            remedy = "give .jsonl or .parquet files of a known program, unpacked; or a directory"
        raise NoSuchPlaceError(what, str(where), remedy)
    os.listdir(where)  # of what it cannot read, "no dumps" would be no answer
    # {dump_dir}/{experiment}_{project}/{shape}[/{role}], which "." and ".." do not tell
    runs = [Run(path, decode=decode) for path in _runs_in(where.resolve(), 3)]
    return sorted(runs, key=lambda run: _natural(run.name))


def _runs_in(path: Path, levels: int) -> Iterator[Path]:
    names = on_disk.folder_names(path)
    if is_run := on_disk.is_run(path, names):
        yield path
    if not levels:
        return
    # Below a run there are only those of its roles, which may have any name.
    others = () if is_run else (FOLDER, STAGES)
    for name in names:
        if as_step(name) is None and not name.startswith(".") and name not in others:
            yield from _runs_in(path / name, 0 if is_run else levels - 1)


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


Target: TypeAlias = Run | Step
"""What a command names."""


def find_target(name: str, within: Path, decode: Decode | None = None) -> Target:
    """What ``3``, ``3/0`` or a path means; a number is a step of the only run in `within`.

    Raises NoSuchPlaceError where it does not exist, or there are several runs for a number.
    """
    numbers = [as_step(part) for part in name.split("/")] if len(name) < 40 else [None]
    if len(numbers) <= 2 and numbers[0] is not None and numbers[-1] is not None:
        return Step(the_run(within, decode), numbers[0], *numbers[1:])
    path = Path(os.path.expanduser(name))
    if not path.exists():
        raise NoSuchPlaceError("no such file or directory", name)
    path = path.resolve()
    place = Place.parse(path.parent, path.name)
    if place is None:
        return the_run(path, decode)
    step = Step(Run(place.root, decode=decode), place.step)
    named = (dump for dump in step.iter_dumps() if dump.place == place and place.call)
    return next((attrs.evolve(step, call=dump.call or 0) for dump in named), step)


def the_run(within: Path, decode: Decode | None = None) -> Run:
    """The run of a directory, or the only one below it; raises NoSuchPlaceError without one."""
    return _opened(within, decode).run
