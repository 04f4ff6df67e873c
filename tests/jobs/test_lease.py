"""Single flight: one job generates a step, the others wait for it and load it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs import alive
from rlskip.jobs.lease import SingleFlight, take
from rlskip.jobs.ranks import RankGroup
from rlskip.store import StepStore
from tests.clock import MockClock, in_a_fork


@pytest.fixture
def clock() -> MockClock:
    return MockClock()


@pytest.fixture
def enter(store: StepStore, clock: MockClock) -> Callable[..., ExitStack | None]:
    """A job that lacks step 1, by default, and enters its single flight."""

    def enter(
        is_there: Any = lambda: False, step: int = 1, call: str = "", **options: float
    ) -> Any:
        flight = SingleFlight(store.directory, clock=clock, sleep=clock.sleep, **options)
        return flight.enter(step, is_there, call)

    return enter


@pytest.fixture
def file(store: StepStore) -> Path:
    return store.directory / alive.WORK / "lease-1"


def taken(file: Path) -> ExitStack:
    lease = ExitStack()
    assert take(lease, file.parents[1], file.name)
    return lease


@pytest.fixture
def other(file: Path) -> Path:
    """The file of another host's job, which has the lease; touched, it is a sign of life."""
    file.parent.mkdir(parents=True)
    file.symlink_to("0123456789abcdef-0")
    job = file.with_name("job-0123456789abcdef")
    job.write_text("{}")
    return job


def silence(*files: Path) -> None:
    """Let them be as old as if nobody had touched them since 1970."""
    for file in files:
        os.utime(file, (0, 0), follow_symlinks=False)


def test_what_is_there_needs_no_lease(enter: Any, file: Path) -> None:
    looks = []

    def look() -> bool:
        looks.append(file.is_symlink())
        return True

    assert enter(look) is None
    assert looks == [True], "looked while holding the lease: its last owner may just have finished"
    assert not file.is_symlink()


def test_other_steps_and_calls_do_not_wait(enter: Any, file: Path, clock: MockClock) -> None:
    leases = [enter(step=1), enter(step=2), enter(call="a-0"), enter(call="a-1")]
    assert (None in leases, file.is_symlink(), clock.now) == (False, True, 0)
    for _ in range(2):
        leases[0].close()
    assert not file.is_symlink()
    file.with_name("lease-2").unlink()
    file.with_name("lease-2").symlink_to("0123456789abcdef-0")
    leases[1].close()
    assert file.with_name("lease-2").is_symlink(), "another job has taken it over"


def test_a_forked_child_gives_nothing_back(file: Path) -> None:
    with taken(file) as lease:
        in_a_fork(lease.close)
        assert file.is_symlink()
    assert not file.is_symlink()


_ENDS = """
    import atexit, json, sys, threading, torch
    @atexit.register
    def last():
        print(json.dumps([t.name for t in threading.enumerate() if t.name.startswith("rlskip")]))
    from pathlib import Path
    from rlskip.jobs.lease import SingleFlight
    from rlskip.store import StepStore
    from rlskip.store.writer import Writer
    SingleFlight(Path(sys.argv[1])).enter(1, lambda: False)
    writer = Writer(StepStore(sys.argv[1]))
    for step in range(5):
        writer.save(step, torch.rand(500_000))
"""


def test_an_interpreter_that_ends_writes_everything_and_leaves_nothing(
    python: Any, tmp_path: Path
) -> None:
    running, _ = python.json(_ENDS, tmp_path)
    assert running == []
    assert list((tmp_path / alive.WORK).iterdir()) == []
    assert StepStore(tmp_path).steps() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("owner", ["of this process", "of another", "that cannot be read"])
def test_waiting_is_bounded(
    owner: str, enter: Any, other: Path, file: Path, clock: MockClock,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    if owner == "of this process":
        file.unlink()
        taken(file)
        silence(*file.parent.glob("job-*"))
    elif owner == "that cannot be read":
        monkeypatch.setattr(os, "readlink", fail)
    lease = enter(wait_s=300)
    monkeypatch.undo()
    assert clock.now == pytest.approx(300, abs=2)
    assert "timed out" in caplog.text
    lease.close()
    assert file.is_symlink(), "the owner keeps its own"


def test_of_several_that_take_over_one_does(store: StepStore, other: Path, file: Path) -> None:
    """Many times, and threads in turn: a lease out of its place for a moment is taken twice."""
    generated: list[int] = []

    def job(step: int) -> None:
        flight = SingleFlight(store.directory, poll_s=0.002)
        if (lease := flight.enter(step, lambda: store.read_meta(step) is not None)) is not None:
            with lease:
                generated.append(step)
                store.save(step, step)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as jobs:
            for step in range(1, 41):
                if step > 1:
                    file.with_name(f"lease-{step}").symlink_to(os.path.basename(other)[4:] + "-0")
                    other.write_text("{}")
                silence(other)
                list(jobs.map(job, [step] * 6))
    finally:
        sys.setswitchinterval(interval)
    assert generated == list(range(1, 41))
    assert store.steps() == generated


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make", [lambda file: file.symlink_to("x"), os.mkfifo, Path.touch, Path.mkdir]
)
def test_what_is_not_a_lease_is_taken_over_like_a_dead_one(
    make: Callable[[Path], Any], enter: Any, file: Path
) -> None:
    file.parent.mkdir(parents=True)
    make(file)
    silence(file)
    with enter():
        assert alive.is_mine(os.readlink(file)), "it is a lease now"
    assert not file.with_name("x").exists()


def test_a_lease_that_is_another_jobs_by_now_is_not_taken_away(
    enter: Any, other: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a dead job's lease and its removal a third job takes it over."""
    real, third = os.symlink, list[ExitStack]()

    def symlink(owner: Any, name: Any, **at: Any) -> None:
        real(owner, name, **at)
        if name.startswith("lease-of-") and not third:
            third.append(ExitStack())
            file.unlink()
            assert take(third[0], file.parents[1], file.name)

    silence(other)
    monkeypatch.setattr(os, "symlink", symlink)
    with enter(wait_s=90):  # and then it waits for the third one
        assert file.is_symlink()
    assert file.is_symlink()
    third[0].close()
    assert [f.name for f in file.parent.glob("lease-*")] == []


def test_who_dies_while_it_takes_over_keeps_nobody_out(
    enter: Any, other: Path, file: Path, clock: MockClock
) -> None:
    dead = "fedcba9876543210"
    file.with_name("lease-of-0123456789abcdef-0").symlink_to(f"{dead}-0")
    file.with_name(f"job-{dead}").write_text("{}")
    silence(other, file.with_name(f"job-{dead}"), *file.parent.glob("lease-*"))
    with enter():
        assert clock.now < 5, "a look for each of them"
        assert [f.name for f in file.parent.glob("lease-*")] == [file.name]
    assert [f.name for f in file.parent.iterdir() if not alive.is_mine(f.name)] == []


def test_an_error_while_looking_gives_the_lease_back_and_the_other_ranks_learn_of_it(
    store: StepStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[bool, int]] = []

    def exchange(self: RankGroup, *numbers: int, error: Any = None, **_: Any) -> Any:
        told.append((error is not None, *numbers))
        if error is not None:
            raise error
        return [numbers]

    def look() -> bool:
        raise ValueError("made for other prompts")

    monkeypatch.setattr(RankGroup, "exchange", exchange)
    with pytest.raises(ValueError, match="other prompts"):
        SingleFlight(store.directory).enter(1, look)
    assert told == [(False, True), (True, False)], "it may generate; it fails, and sees no dump"
    assert not file.is_symlink()
