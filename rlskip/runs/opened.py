"""A run, opened: runs, their steps and calls, and the rollouts that these hold.

Nothing is changed, and nothing is read before it is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs

from rlskip._human import counted
from rlskip.batch.decoding import Decode, decoder_at
from rlskip.config.steps import compact
from rlskip.errors import ConfigError, RlskipError
from rlskip.jobs import alive
from rlskip.runs import on_disk
from rlskip.runs.on_disk import Dump
from rlskip.store.layout import (
    Place,
    journal_name,
    journaled_steps,
    name_before_quarantine,
    run_name,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from datasets import Dataset

    import rlskip.runs.rollouts
    from rlskip.runs.rollouts import Rollouts, SessionRows

_SHOWN = 20  # runs that are named
# What tells which session a row belongs to, its reward and its length.
OF_SESSIONS = ("group", "session", "turn", "reward", "response")
_Fields = Sequence[str] | None


class NoSuchPlaceError(RlskipError, FileNotFoundError):
    """The directory, run, step or call that was named does not exist."""


class Scope:
    """What rollouts are read of: runs, a run, a step or a call."""

    @property
    def run(self) -> Run:
        """The run that it belongs to; of runs the only one."""
        raise NotImplementedError

    def iter_dumps(self) -> Iterator[Dump]:
        """The dumps in order, looked up one after the other; NoSuchPlaceError without the place."""
        raise NotImplementedError

    def dumps(self) -> list[Dump]:
        return list(self.iter_dumps())

    def fields(self) -> list[str]:
        """The names of the trainer's own fields, in any dump; of a list of rows all is read."""
        return list(dict.fromkeys(name for dump in self.iter_dumps() for name in dump.fields()))

    def rollouts(self, fields: _Fields = None) -> Iterator[Rollouts]:
        """The rollouts of each dump; one dump is in memory at a time.

        `fields` are what the rows are to have: ``group``, ``session``, ``turn``, ``uid``,
        ``prompt``, ``response``, ``mask``, ``log_probs``, ``reward``, or names of the trainer's own
        fields. Only what these need is read and verified; None for everything. Raises DumpError
        where a dump cannot be used, or has no such field; it stays where it is.
        """
        some = None if fields is None else [*fields]  # each dump needs all of an iterator's
        return (self.read(dump, some) for dump in self.iter_dumps())

    def read(self, dump: Dump, fields: _Fields = None) -> Rollouts:
        """The rollouts of one of its dumps."""
        return self.run.read(dump, fields)

    def iter_rows(self, fields: _Fields = None) -> Iterator[dict[str, Any]]:
        """The rows as mappings, with ``step``, ``call`` and ``row``; `fields` as in `rollouts`."""
        return itertools.chain.from_iterable(self.rollouts(fields))

    def sessions(self, fields: _Fields = None) -> Iterator[SessionRows]:
        """The sessions, each with its turns; `fields` are those of the turns."""
        return (session for part in self._named(fields) for session in part.sessions)

    def groups(self, fields: _Fields = None) -> Iterator[rlskip.runs.rollouts.Group]:
        """The groups of sessions of one prompt; `fields` are those of the turns."""
        return (group for part in self._named(fields) for group in part.groups)

    def _named(self, fields: _Fields) -> Iterator[Rollouts]:
        return self.rollouts(None if fields is None else [*OF_SESSIONS, *fields])

    def to_arrow(self, fields: _Fields = None) -> pa.Table:
        """All rows as a table of pyarrow, which the extra `data` brings; RlskipError without."""
        from rlskip.runs.tables import joined, table_of

        return joined(list(map(table_of, self.rollouts(fields))))

    def to_pandas(self, fields: _Fields = None) -> pd.DataFrame:
        """As :meth:`to_arrow`, as a DataFrame of pandas."""
        return self.to_arrow(fields).to_pandas()

    def to_datasets(self, fields: _Fields = None) -> Dataset:
        """As :meth:`to_arrow`, as a Dataset of Hugging Face."""
        from rlskip.runs.tables import extra

        return extra("datasets").Dataset(self.to_arrow(fields))


@attrs.frozen(repr=False)
class Step(Scope):
    """A step of a run, or one `call` of it: a mini-batch, for example."""

    run: Run
    number: int
    call: int | None = None

    @property
    def name(self) -> str:
        name = f"{self.run.name}/{self.number}"
        return name if self.call is None else f"{name}/{self.call}"

    def iter_dumps(self) -> Iterator[Dump]:
        found = on_disk.dumps_of(self.run.directory, self.number, self.call)
        if not found and self.call is not None:
            raise NoSuchPlaceError("this call has no dump", self.name)
        if not found:
            raise self.run._no_step(self.number)
        return iter(found)

    def __repr__(self) -> str:
        return f"<step {self.name}>"


@attrs.frozen(repr=False)
class Run(Scope):
    """The dumps of one run, by step: ``run[1:10]`` is the run with its steps 1 to 9 alone."""

    directory: Path
    _within: tuple[range, ...] = ()
    _decode: Decode | None = attrs.field(default=None, eq=False)
    # Fields of which it was said that they do not fit their tokens.
    _told: set[str] = attrs.field(factory=set, eq=False)

    @property
    def run(self) -> Run:
        return self

    @property
    def name(self) -> str:
        """The directory below the dump_dir: of an experiment, a shape, and maybe a role."""
        return run_name(self.directory)

    @property
    def dump_dir(self) -> Path:
        return self.directory.parents[self.name.count("/")]

    def places(self) -> dict[int, list[Place]]:
        """By step where dumps have a directory, ascending, without a look into it."""
        found = on_disk.families(self.directory)
        return {step: found[step] for step in sorted(found) if self._covers(step)}

    def steps(self) -> list[int]:
        """The numbers of the steps that have a dump, ascending; the directory of each is listed."""
        return [step for step in self.places() if on_disk.has_dump(self.directory, step)]

    def _covers(self, step: int) -> bool:
        return all(step in one for one in self._within)

    def __len__(self) -> int:
        return len(self.steps())

    def __iter__(self) -> Iterator[Step]:
        return (Step(self, step) for step in self.steps())

    def __contains__(self, step: Any) -> bool:
        return self._covers(step) and on_disk.has_dump(self.directory, step)

    @overload
    def __getitem__(self, steps: int) -> Step: ...
    @overload
    def __getitem__(self, steps: slice) -> Run: ...
    def __getitem__(self, steps: int | slice) -> Step | Run:
        if isinstance(steps, slice):
            stop = sys.maxsize if steps.stop is None else steps.stop
            within = range(steps.start or 0, stop, steps.step or 1)
            if min(within.start, within.stop, within.step) < 0:
                raise ConfigError(f"{steps} does not name steps: they are counted upwards from 0")
            return attrs.evolve(self, within=(*self._within, within))
        if steps not in self:
            raise self._no_step(steps)
        return Step(self, int(steps))  # numpy has whole numbers of its own

    def iter_dumps(self) -> Iterator[Dump]:
        for places in self.places().values():
            yield from on_disk.dumps_at(places)

    def read(self, dump: Dump, fields: _Fields = None, **more: Any) -> Rollouts:
        """As :meth:`Scope.read`; `more` is what each row says of its place besides step and call.

        Without a tokenizer that which the dump names makes the text that `fields` ask for.
        """
        from rlskip.runs.reading import read_columns
        from rlskip.runs.rollouts import TEXTS, Rollouts

        with dump.opened() as (reader, meta):
            columns = read_columns(reader, meta, fields)
        decode = self._decode
        if decode is None and not TEXTS.keys().isdisjoint(fields or ()):
            if dump.tokenizer is None:
                remedy = "name one: rlskip.open(path, tokenizer=...)"
                raise RlskipError("the dump names no tokenizer", f"step {dump.step}", remedy)
            decode = decoder_at(dump.tokenizer)
        place = {**more, "step": dump.step, "call": dump.call}
        if dump.place.world_size > 1:
            place["rank"] = dump.place.rank
        return Rollouts(columns, place, fields, decode, self._told)

    def quarantine(self) -> list[Path]:
        """The directories of quarantined dumps."""
        return [
            self.directory / name
            for name in on_disk.folder_names(self.directory)
            if (before := name_before_quarantine(name)) and Place.parse(self.directory, before)
        ]

    def journals(self) -> list[Path]:
        """The journals of steps that were interrupted, or are under way."""
        return [self.directory / journal_name(step) for step in journaled_steps(self.directory)]

    def jobs(self) -> dict[str, list[str]]:
        """The jobs that are at work here, and what each of them reads, writes or generates."""
        jobs: dict[str, list[str]] = {}
        with contextlib.suppress(OSError):
            for label, job in alive.held(self.directory):
                if job:
                    jobs.setdefault(job, []).append(label)
        return jobs

    def _no_step(self, step: int) -> NoSuchPlaceError:
        steps = self.steps()
        there = f"its steps are {compact(steps)}" if steps else "the run has no dumps"
        return NoSuchPlaceError("this step has no dump", f"{self.name}/{step}", there)

    def __repr__(self) -> str:
        return f"<run {self.name}: steps {compact(self.steps()) or 'none'}>"


@attrs.frozen(repr=False)
class Runs(Scope, Sequence[Run]):
    """The runs below a directory, in natural order of their names, by which they are found, too."""

    directory: Path
    _runs: tuple[Run, ...]

    def __getitem__(self, which: int | str) -> Run:  # type: ignore[override]
        if isinstance(which, int):
            return self._runs[which]
        for run in self._runs:
            if run.name == which:
                return run
        names = ", ".join(run.name for run in self._runs[:5]) or "none"
        what = f"it has no run {which!r}"
        raise NoSuchPlaceError(what, str(self.directory), f"its runs are {names}")

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def run(self) -> Run:
        """The only run; raises NoSuchPlaceError for none or several."""
        if len(self) == 1:
            return self[0]
        names = ", ".join(str(run.directory) for run in self._runs[:5])
        what = f"{len(self) or 'no'} runs have dumps here"
        remedy = f"name one: {names}" if names else "name a dump_dir or a run in it"
        raise NoSuchPlaceError(what, str(self.directory), remedy)

    def iter_dumps(self) -> Iterator[Dump]:
        for run in self._runs:
            yield from run.iter_dumps()

    def read(self, dump: Dump, fields: _Fields = None) -> Rollouts:
        return self[0].read(dump, fields, run=run_name(dump.place.root))

    def __repr__(self) -> str:
        shown = [run.name for run in self._runs[:_SHOWN]]
        shown += [f"and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return f"<{counted(len(self), 'run')} in {self.directory}: {', '.join(shown)}>"
