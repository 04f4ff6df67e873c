"""The recorder of a process: gathers small records, and hands them to the dumps' writer."""

from __future__ import annotations

import fnmatch
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from rlskip.batch.columns import is_tensor
from rlskip.batch.padding import refuse
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.config.other_nodes import RecordConfig
from rlskip.errors import RlskipError
from rlskip.format.kinds import Packer
from rlskip.jobs.records import job_id, rank_of
from rlskip.stages.parts import MARK, ROWS, VERSION, WHOLE, Entry, digest, encode
from rlskip.store.layout import part_name, stages_directory
from rlskip.store.step_store import StepStore
from rlskip.store.writer import Writer, WriterTimeoutError

log = logging.getLogger(__name__)

_GATHERED = 1 << 20
"""Bytes of records that are copied and kept until there are enough for a part of the step."""
_BATCHES = 2
"""How many batches the names of whose rows are kept: a stage's batch is mostly the last one's."""


@attrs.define(eq=False)
class _Step:
    """The step that is being recorded: the numbers of its parts, and of its records."""

    number: int
    numbers: Iterator[int]
    order: Iterator[int] = attrs.field(factory=itertools.count)
    # Keys and masks of the rows that a part on disk describes: the writer's thread alone has it.
    known: set[tuple[int, int]] = attrs.field(factory=set)
    # Each with references to its columns: another column may have the id of one that is gone.
    batches: dict[tuple[Any, ...], tuple[list[weakref.ref[Any]], Rows]] = attrs.field(factory=dict)


class Recorder:
    """What :func:`rlskip.record` calls while recording is on.

    A step's records are written as parts of one step in the dumps' format: a large value at once,
    small ones together. Values and tokens are copied before :meth:`record` returns; rows are named
    and parts are written in the background. Nothing that fails here ends a training.
    """

    def __init__(self, settings: RecordConfig, step: Callable[[], int | None]) -> None:
        self._settings = settings
        self._step_of = step
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._gathered: list[Entry] = []
        self._nbytes = 0
        self._warned: set[str] = set()
        self._is_broken = False
        log.info(
            "rlskip: stages are recorded (%s values of %s at steps %s) in %s",
            settings.values, ", ".join(settings.stages), settings.steps, settings.dump_dir,
        )  # fmt: skip

    # These are asked for by the first record: by then the ranks have joined, and share a job.

    @cached_property
    def directory(self) -> Path:
        assert self._settings.dump_dir is not None
        return stages_directory(self._settings.dump_dir, job_id())

    @cached_property
    def _writer(self) -> Writer:
        return Writer(StepStore(self.directory, keep_last=self._settings.keep_last))

    @cached_property
    def _ranks(self) -> tuple[int, int]:
        return rank_of()

    def record(self, name: str, value: Any, rows: Any) -> None:
        if self.process != os.getpid():  # what was gathered is its parent's
            what = "a forked child of the process that records does not"
            self._warn(name, RecordError(what, remedy="record what it returns, in its parent"))
            return
        with self._lock:
            if self._is_broken:
                return
            try:
                self._record(name, value, rows)
            except WriterTimeoutError as error:
                self._is_broken = True
                log.warning("rlskip: nothing more is recorded: %s", error)
            except Exception as error:
                self._warn(name, error)

    def flush(self) -> None:
        """Write what was gathered, and wait until everything is on disk."""
        with self._lock:
            self._save()
        if self._step is not None:
            self._writer.wait()

    def close(self) -> None:
        """As :meth:`flush`, and give the copies' memory back; a failure is logged."""
        if self._step is None:
            return
        try:
            self.flush()
            self._writer.flush()
        except Exception as error:
            log.warning("rlskip: the last stages were not recorded: %s", error)
        log.info("rlskip: compare two runs with `rlskip compare %s OTHER`", self.directory)

    def _record(self, name: str, value: Any, rows: Any) -> None:
        leaves = [
            (leaf, part)
            for leaf, part in _leaves(name, value)
            if any(fnmatch.fnmatchcase(leaf, pattern) for pattern in self._settings.stages)
        ]
        if not leaves:
            return
        number = self._step_of()
        if number is None:
            raise RecordError("no step was set", remedy="call SkipManager.set_step before")
        if number not in self._settings.steps:
            return
        rank, ranks = self._ranks
        if self._step is None or self._step.number != number:
            self._save()
            # The parts of a rank have numbers of their own.
            self._step = _Step(number, itertools.count(rank, ranks))
        named = None if rows is None else self._rows_of(rows, self._step)
        for leaf, part in leaves:
            try:
                self._add(Entry.of(leaf, part, named, order=next(self._step.order), rank=rank))
            except WriterTimeoutError:
                raise
            except Exception as error:  # the others of a mapping are recorded
                self._warn(leaf, error)

    def _add(self, entry: Entry) -> None:
        if self._settings.values == "digest":
            entry = digest(entry)
        entry = entry.copied(self._writer.memory)
        # Refuse a dtype that cannot be kept before it is among others.
        if entry.form in (WHOLE, ROWS):
            Packer().node(entry.value[:0])
        self._gathered.append(entry)
        self._nbytes += entry.nbytes
        if self._nbytes > _GATHERED:
            self._save()

    def _save(self) -> None:
        """Hand what was gathered to the writer as a part of the step."""
        step, entries, nbytes = self._step, self._gathered, self._nbytes
        self._gathered, self._nbytes = [], 0
        if step is None or not entries:
            return

        def write() -> None:
            known = {*step.known}
            for entry in entries:
                if (rows := entry.rows) is not None:
                    names = list(zip(rows.keys.tolist(), rows.masks.tolist(), strict=True))
                    entry.describes = [i for i, name in enumerate(names) if name not in known]
                    known.update(names)
            try:
                store = self._writer.store
                value = encode(entries, tokens=self._settings.values == "all")
                part = store.prepare(step.number, value, info={MARK: VERSION})
                # Another process of the job records the step, too.
                while not store.write(part.named(part_name(next(step.numbers))))[1]:
                    pass
                step.known = known
            except Exception as error:
                self._warn("a part of a step", error)

        self._writer.run(step.number, nbytes, write)

    def _rows_of(self, batch: Any, step: _Step) -> Rows:
        """The rows of `batch`; those of the same unchanged tensors are read once."""
        columns = RowColumns.of(batch)
        tensors = list(columns.tokens.values())
        # A tensor that was made for inference does not tell whether it has changed.
        if not all(is_tensor(one) and not one.is_inference() for one in tensors):
            return self._read(columns)
        key = tuple((id(one), one._version) for one in tensors)
        known, rows = step.batches.get(key, ([], None))
        if rows is None or any(ref() is None for ref in known):
            step.batches.pop(key, None)
            while len(step.batches) >= _BATCHES:
                del step.batches[next(iter(step.batches))]
            rows = self._read(columns)
            step.batches[key] = [weakref.ref(one) for one in tensors], rows
        return rows

    def _read(self, columns: RowColumns) -> Rows:
        rows = Rows.of(columns, self._writer.memory)
        refuse(rows.misfits, "rlskip.record(rows=...)", annotated=False)
        self._nbytes += rows.nbytes
        return rows

    def _warn(self, what: str, error: BaseException) -> None:
        """Say once for each kind of failure of a stage what is not recorded."""
        kind = f"{what} {type(error).__name__}"
        if kind in self._warned:
            return
        self._warned.add(kind)
        log.warning(
            "rlskip: %s is NOT recorded, training goes on (said once): %s: %s",
            what, type(error).__name__, error,
            exc_info=None if isinstance(error, RlskipError | OSError) else error,
        )  # fmt: skip


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their dotted names."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(f"{name}.{key}", item)
