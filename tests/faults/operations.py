"""The table of operations on files, and what each promises where one of them fails.

An operation is a generator. It yields what to do under each fault, a function without arguments,
and gets an :class:`Outcome` to check, again and again. It prepares and checks without faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import attrs
import torch

from rlskip import SkipManager
from rlskip.dispatch.journal import append_sessions, read_sessions
from rlskip.jobs import alive
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.records import Recorder, Tally, has_token, leave_token, tally, tally_steps
from rlskip.store import AbsentDumpError, DumpError, Identity, StepStore
from rlskip.store.dump import appending
from tests.clock import MockClock
from tests.faulty_files import FaultyFiles
from tests.skip.trainers import Loop


@attrs.frozen
class Outcome:
    """What came of it under a fault: its value or the error that it raised, and what was logged."""

    value: Any
    error: Exception | None
    log: str
    fault: FaultyFiles


Operation = Generator[Callable[[], Any], Outcome, None]
ROLLOUTS = {"a": [1, 2]}
LATER = "0123456789abcdef-1"
"""The name of a call that is not the first of its step."""


def emptied(directory: Path) -> Path:
    """The directory, without what an earlier round left."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def paths_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if alive.WORK not in path.parts)


# -- a dump is read ------------------------------------------------------------------------

READS: dict[str, tuple[Callable[[StepStore], Any], list[Any]]] = {
    "read_meta": (lambda s: getattr(s.read_meta(3), "step", None), [3, None]),
    "steps": (lambda s: s.steps(), [[3, 5], [3], [5], []]),
    "nearest": (lambda s: s.nearest(4), [3, 5, None]),
    "load": (lambda s: s.load(3), [ROLLOUTS, AbsentDumpError]),
    "load aside": (lambda s: s.load(3, part="aside"), ["rng", AbsentDumpError]),
    "load fields": (lambda s: s.load(3, fields=["a"]), [ROLLOUTS, AbsentDumpError]),
    "calls": (
        lambda s: (s.calls(3), sorted(s.listed_by_step())),
        [(["", LATER], [3, 5]), (["", LATER], []), ([], [3, 5]), ([], [])],
    ),
    "in order": (lambda s: s.in_order(3), [["", LATER], [""], [LATER], []]),
    "quarantined": (lambda s: s.quarantined(5), [[LATER], []]),
}


def read(directory: Path, name: str) -> Operation:
    """The dump is absent, for the reason that is named, and is never quarantined."""
    store = StepStore(directory)
    for step, call in ((3, ""), (3, LATER), (5, ""), (5, LATER)):
        store.save(step, ROLLOUTS, call=call, sidecar="rng")
    store.quarantine(5, "for a test", LATER)
    before = paths_in(directory)
    look, allowed = READS[name]
    while True:
        got = yield lambda: look(StepStore(directory))
        found = got.value
        if isinstance(got.error, DumpError):
            assert os.strerror(got.fault.code or 0) in str(got.error) or "no dump" in str(got.error)
            found = AbsentDumpError if isinstance(got.error, AbsentDumpError) else got.error
        assert found in allowed
        assert got.log.count("cannot be read at the moment") <= 1, "said once, of several dumps"
        assert got.fault.happened or found == allowed[0]
        assert paths_in(directory) == before


# -- a dump is saved -------------------------------------------------------------------------


def save(directory: Path, call: str, **options: int) -> Operation:
    """The dump is complete, or OSError is raised and nothing of it is left."""
    while True:
        store = StepStore(emptied(directory), **options)
        StepStore(directory).save(1, "old")
        got = yield lambda store=store: store.save(3, ROLLOUTS, call=call)
        after = StepStore(directory, **options)
        if got.error is not None:
            assert isinstance(got.error, OSError)
            assert after.read_meta(3, call) is None
            if not got.fault.lasting:
                assert not any((directory / alive.WORK).glob("*/*"))
            after.save(3, ROLLOUTS, call=call)
        assert after.load(3, call=call) == ROLLOUTS
        if "keep_last" not in options:
            assert StepStore(directory).load(1) == "old"


def replace_a_shard(directory: Path) -> Operation:
    """The new one is there, or OSError is raised and the old one is there, or none."""
    while True:
        store = StepStore(emptied(directory), world_size=2)
        StepStore(directory, rank=1, world_size=2).save(3, "the other rank's")
        store.save(3, "old")
        got = yield lambda store=store: store.save(3, ROLLOUTS)
        after = StepStore(directory, world_size=2)
        if got.error is not None:
            assert isinstance(got.error, OSError)
            assert after.read_meta(3) is None or after.load(3) == "old"
            after.save(3, ROLLOUTS)
        assert after.load(3) == ROLLOUTS
        assert StepStore(directory, rank=1, world_size=2).load(3) == "the other rank's"
        assert not list(directory.glob("*.bad-*"))


def save_where_no_dump_is(directory: Path) -> Operation:
    """What has the name of a dump and is none is kept under another name."""
    while True:
        emptied(directory / "1").joinpath("notes").write_text("mine")
        got = yield lambda: StepStore(directory).save(1, "new")
        (kept,) = directory.glob("1*/notes")
        assert kept.read_text() == "mine"
        if got.error is not None:
            assert isinstance(got.error, OSError)
            StepStore(directory).save(1, "new")
        assert StepStore(directory).load(1) == "new"
        emptied(directory)


def quarantine(directory: Path) -> Operation:
    """A warning; the dump is where the return value says."""
    while True:
        store = StepStore(emptied(directory))
        store.save(1, "x")
        got = yield lambda store=store: store.quarantine(1, "for a test")
        assert got.error is None
        assert (got.value is None) == (directory / "1").exists()
        assert "cannot be used: for a test" in got.log or got.value is None


def retention(directory: Path) -> Operation:
    """The new dump is there; a step that is generated stays; of another the last calls go first."""
    while True:
        store = StepStore(emptied(directory), keep_last=1)
        for step, call in ((1, ""), (1, LATER), (2, ""), (2, LATER)):
            StepStore(directory).save(step, f"{step}{call}", call=call)
        with appending(directory, 1):
            got = yield lambda store=store: store.save(3, "new")
            after = StepStore(directory)
            assert (got.error is None) == (after.read_meta(3) is not None)
            assert (after.load(1), after.load(1, call=LATER)) == ("1", f"1{LATER}")
            assert after.calls(2) in (["", LATER], [""], [])
            assert [after.load(2, call=call) for call in after.calls(2)] == ["2", f"2{LATER}"][
                : len(after.calls(2))
            ]


# -- leases and records ------------------------------------------------------------------------


def lease_of(directory: Path) -> Path:
    return directory / alive.WORK / f"{alive.LEASE}1"


def take_lease(directory: Path) -> Operation:
    """The step is generated in any case; without a lease there is a warning and no file."""
    while True:
        flight = SingleFlight(emptied(directory))
        got = yield lambda flight=flight: flight.enter(1, lambda: False)
        taken = "no lease for step 1" not in got.log
        assert lease_of(directory).is_symlink() == taken or got.fault.lasting
        got.value.close()
        assert not lease_of(directory).is_symlink() or got.fault.lasting


def take_lease_over(directory: Path) -> Operation:
    """A dead job's lease is taken over, or the step is generated without one."""
    while True:
        clock = MockClock()
        soon = {"poll_s": 40.0, "wait_s": 180.0}
        flight = SingleFlight(emptied(directory), clock=clock, sleep=clock.sleep, **soon)
        lease_of(directory).parent.mkdir(exist_ok=True)
        lease_of(directory).symlink_to("0123456789abcdef-0")
        os.utime(lease_of(directory), (0, 0), follow_symlinks=False)
        got = yield lambda flight=flight: flight.enter(1, lambda: False)
        got.value.close()


EVENTS = Tally(True, 1, 1, 10, 7, 1.5)


def recorded(directory: Path) -> Recorder:
    """A recorder that has written `EVENTS`."""
    recorder = Recorder(directory, "rollout")
    recorder.write("consulted", run="e_p/shape")
    recorder.write("hit", step=3, source=2, bytes=10, seconds_saved=1.5)
    recorder.write("miss", step=4)
    recorder.write("dumped", step=4, bytes=7)
    return recorder


def write_records(directory: Path) -> Operation:
    """What cannot be written is counted by the process itself, with one warning."""
    for number in itertools.count():
        dumps = emptied(directory / str(number))
        got = yield lambda dumps=dumps: recorded(dumps)
        unwritten = got.value.unwritten
        assert tally({"rollout": str(dumps)}, "job")["rollout"] + unwritten == EVENTS
        assert got.log.count("no records can be written") == (unwritten != Tally())


def read_records(directory: Path) -> Operation:
    """What cannot be read is left out."""
    recorded(emptied(directory))
    leave_token(directory, "rollout")

    def act() -> tuple[Any, ...]:
        found = tally({"rollout": str(directory)}, "job")["rollout"]
        return found, tally_steps(directory), has_token(directory, "rollout", "job")

    while True:
        got = yield act
        found, steps, known = got.value
        assert found in (EVENTS, Tally())
        assert set(steps) <= {"e_p/shape"}
        assert known or got.fault.happened


# -- a journal ---------------------------------------------------------------------------------

IDENTITY = Identity.of({"n": 4, "sampling.temperature": 1.0})


def append_to_journal(directory: Path) -> Operation:
    """OSError; what was has_token stays, and so do the earlier sessions."""

    def sessions(path: Path) -> list[int]:
        return [key[2] for key in read_sessions(path, IDENTITY)]

    while True:
        path = emptied(directory) / "3.journal"
        for number in (0, 1):
            kept_already = {("content", 0, number): [{"responses": torch.arange(5)}]}
            append_sessions(path, IDENTITY, kept_already)
        appended: list[int] = []

        def act(path: Path = path, appended: list[int] = appended) -> None:
            assert set(sessions(path)) <= {0, 1}
            for number in (7, 8):
                with contextlib.suppress(OSError):
                    append_sessions(path, IDENTITY, {("content", 0, number): "x"})
                    appended.append(number)

        got = yield act
        assert got.error is None or isinstance(got.error, OSError)
        kept = sessions(path)
        assert kept[:2] == [0, 1]
        assert set(kept) >= set(appended)


# -- a step of a trainer -------------------------------------------------------------------------


@SkipManager.annotate(role="rollout")
def generate(prompts: list[int]) -> dict[str, Any]:
    return {"ids": prompts, "made": torch.arange(3)}


@SkipManager.annotate(role="async_rollout")
async def _generate_one(prompts: list[int], sample_id: str) -> dict[str, Any]:
    return {"ids": prompts}


def _generate_by_queue(step: int) -> dict[str, Any]:
    loop = Loop()
    loop.submit({"uid": ["a", "b"], "text": ["x", str(step)]})
    return {"ids": [step]} if len(loop.sample()) == 2 else {}


STAGES: dict[str, Callable[[int], dict[str, Any]]] = {
    "rollout": lambda step: generate([step]),
    "async_rollout": lambda step: asyncio.run(_generate_one([step], sample_id=f"sample_0_{step}")),
    "rollout_tq": _generate_by_queue,
}


def train(directory: Path, role: str, action: str) -> Operation:
    """Storage ends no training."""
    skip = {"dump_dir": str(directory / "dumps"), "action": action, "n": 1, "wait_s": 0.2}

    def begin() -> None:
        SkipManager.init({"skip": {**skip, role: {"enable": True}}})

    def act() -> None:
        for step in (1, 2):
            SkipManager.set_step(step)
            assert STAGES[role](step)["ids"] in ([step], [1])
        SkipManager.flush()

    begin()
    SkipManager.set_step(1)
    STAGES[role](1)
    shutil.copytree(directory / "dumps", directory / "kept")
    while True:
        emptied(directory / "dumps").rmdir()
        shutil.copytree(directory / "kept", directory / "dumps")
        begin()
        logging.getLogger("rlskip").setLevel(logging.WARNING)
        got = yield act
        assert got.error is None


OPERATIONS: dict[str, Callable[[Path], Operation]] = {
    **{name: functools.partial(read, name=name) for name in READS},
    **{
        f"save call {call!r} {options}": functools.partial(save, call=call, **options)
        for call, options in (
            ("", {}),
            (LATER, {}),
            (LATER, {"keep_last": 1}),
            ("", {"world_size": 2}),
        )
    },
    "replace a shard": replace_a_shard,
    "save where no dump is": save_where_no_dump_is,
    "quarantine": quarantine,
    "retention": retention,
    "take a lease": take_lease,
    "take a lease over": take_lease_over,
    "write records": write_records,
    "read records": read_records,
    "append to a journal": append_to_journal,
    **{
        f"{role} {action}": functools.partial(train, role=role, action=action)
        for role in STAGES
        for action in ("cache", "repeat")
    },
}
