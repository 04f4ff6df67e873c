"""Single flight: one job generates a step, the others wait for it and load it."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlskip._files import Folder
from rlskip.jobs.lease import LEASES, Lease, LeaseWatch, SingleFlight
from rlskip.jobs.ranks import RankGroup
from rlskip.store import StepStore
from rlskip.testing import each_fault


def _flight(store: StepStore, **options: float) -> SingleFlight:
    return SingleFlight(store.directory, **{"ttl_s": 0.5, "poll_s": 0.02, **options})


def _lease_file(store: StepStore, step: int = 1) -> Path:
    return store.directory / LEASES / str(step)


def test_alone_one_gets_the_lease_at_once(store: StepStore) -> None:
    lease = _flight(store).enter(1, lambda: False)
    assert lease is not None
    assert _lease_file(store).exists()
    lease.release()
    lease.release()
    assert not _lease_file(store).exists()
    assert store.steps() == []


def test_what_is_there_needs_no_lease(store: StepStore) -> None:
    store.save(1, "x")
    assert _flight(store).enter(1, lambda: store.read_meta(1) is not None) is None
    assert not _lease_file(store).exists()


def test_a_second_job_waits_and_loads(store: StepStore, caplog: pytest.LogCaptureFixture) -> None:
    first = _flight(store).enter(1, lambda: False)
    assert first is not None

    def generate() -> None:
        with first:
            time.sleep(1.5)  # three times as long as an unrenewed lease lives
            store.save(1, "of the first")

    generator = threading.Thread(target=generate)
    generator.start()
    with caplog.at_level(logging.INFO):
        assert _flight(store).enter(1, lambda: store.read_meta(1) is not None) is None
    generator.join()
    assert store.load(1) == "of the first"
    assert "another job generates step 1; waiting for it" in caplog.text


def test_other_steps_and_parts_do_not_wait(store: StepStore) -> None:
    flight = _flight(store)
    leases = [flight.enter(1, lambda: False), flight.enter(2, lambda: False)]
    leases += [flight.enter(1, lambda: False, call) for call in ("a-0", "a-1")]
    assert None not in leases


def test_a_dead_generator_is_taken_over(store: StepStore, caplog: pytest.LogCaptureFixture) -> None:
    dead = Lease(_lease_file(store), ttl_s=3600)  # beats once an hour: as good as dead
    assert dead.acquire()
    began = time.monotonic()
    lease = _flight(store).enter(1, lambda: False)
    assert lease is not None
    assert 0.5 <= time.monotonic() - began < 100
    assert "no sign of life; taking over" in caplog.text
    dead.release()
    assert _lease_file(store).exists(), "a lease that was taken over is not the old owner's"
    lease.release()
    assert sorted(p.name for p in (store.directory / LEASES).iterdir()) == []


def test_of_several_that_take_over_one_does(store: StepStore) -> None:
    assert Lease(_lease_file(store), ttl_s=3600).acquire()
    generated: list[int] = []

    def job(number: int) -> None:
        lease = _flight(store).enter(1, lambda: store.read_meta(1) is not None)
        if lease is not None:
            with lease:
                generated.append(number)
                time.sleep(0.3)
                store.save(1, number)

    jobs = [threading.Thread(target=job, args=(number,)) for number in range(6)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert len(generated) == 1
    assert store.load(1) == generated[0]


def test_a_file_system_that_fails_at_times_ends_nothing(store: StepStore) -> None:
    """At any moment of taking a dead job's lease over."""
    for fault in each_fault(store.directory, (errno.ESTALE, errno.EIO)):
        shutil.rmtree(store.directory, ignore_errors=True)
        dead = Lease(_lease_file(store), ttl_s=3600)
        assert dead.acquire()
        with fault:
            lease = _flight(store, ttl_s=0.01, poll_s=0.005).enter(1, lambda: False)
        assert lease is not None, fault
        lease.release()
        dead.release()


def test_a_lease_is_written_and_given_back_or_not_taken(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    for fault in each_fault(store.directory):
        shutil.rmtree(store.directory, ignore_errors=True)
        caplog.clear()
        with fault:
            lease = _flight(store).enter(1, lambda: False)
        assert lease is not None, fault
        assert _lease_file(store).exists() != ("no lease for step 1" in caplog.text), fault
        lease.release()
    assert not _lease_file(store).exists()


def test_a_lease_that_was_taken_over_is_not_renewed(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    lease = Lease(_lease_file(store), ttl_s=0.2)
    assert lease.acquire()
    _lease_file(store).write_text("another job's")
    deadline = time.monotonic() + 20
    while "was taken over" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "was taken over: it was not renewed in time" in caplog.text
    lease.release()
    assert _lease_file(store).read_text() == "another job's"


def test_the_other_ranks_learn_that_one_cannot_look(store: StepStore) -> None:
    told: list[bool] = []

    class Ranks(RankGroup):
        def agree(self, hit: bool, what: str = "the step") -> bool:
            told.append(hit)
            return super().agree(hit, what)

    def look() -> bool:
        raise ValueError("made for other prompts")

    with pytest.raises(ValueError, match="other prompts"):
        SingleFlight(store.directory, Ranks()).enter(1, look)
    assert told == [False]


def test_while_nothing_is_known_of_a_lease_it_is_waited_for(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Lease(_lease_file(store), ttl_s=3600).acquire()

    def fail(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Folder, "read", fail)
    began = time.monotonic()
    assert _flight(store, ttl_s=0.1, wait_s=1).enter(1, lambda: False) is not None
    assert time.monotonic() - began > 1
    assert _lease_file(store).exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "loop", "FIFO", "device", "huge file", "directory"])
def test_what_is_not_a_lease_is_taken_over_like_a_dead_one(
    kind: str, store: StepStore, tmp_path: Path
) -> None:
    path, victim = _lease_file(store), tmp_path / "victim"
    path.parent.mkdir(parents=True)
    victim.write_text("mine")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge file":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to({"link": victim, "loop": path, "device": "/dev/zero"}[kind])
    lease = _flight(store, ttl_s=0.1).enter(1, lambda: False)
    assert lease is not None
    assert path.read_text().startswith('{"owner"'), "it is a lease now"
    lease.release()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_folder_of_leases_that_is_not_one_is_left_alone(
    kind: str, store: StepStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, outside = store.directory / LEASES, tmp_path / "outside"
    outside.mkdir()
    store.directory.mkdir()
    folder.symlink_to(outside) if kind == "link" else os.mkfifo(folder)
    lease = _flight(store).enter(1, lambda: False)
    assert lease is not None
    assert "no lease for step 1, another job may generate it too" in caplog.text
    lease.release()
    assert list(outside.iterdir()) == []


def test_without_a_thread_no_lease_is_left_behind(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    lease = _flight(store).enter(1, lambda: False)
    assert lease is not None
    assert "no lease for step 1" in caplog.text
    assert "can't start new thread" in caplog.text
    lease.release()
    assert not _lease_file(store).exists()


def test_a_lease_taken_over_by_mistake_is_given_back(store: StepStore) -> None:
    old = Lease(_lease_file(store), ttl_s=3600)
    assert old.acquire()
    watch = LeaseWatch(_lease_file(store), 0.0)
    watch.has_expired()
    old.release()
    new = Lease(_lease_file(store), ttl_s=3600)
    assert new.acquire()
    watch.take_away()
    assert _lease_file(store).exists()
    new.release()
    assert not _lease_file(store).exists()


def test_waiting_is_bounded(store: StepStore, caplog: pytest.LogCaptureFixture) -> None:
    alive = _flight(store).enter(1, lambda: False)
    assert alive is not None
    lease = _flight(store, wait_s=0.3).enter(1, lambda: False)
    assert lease is not None
    assert "timed out after 0 s of waiting for step 1; generating it" in caplog.text
    lease.release()
    assert _lease_file(store).exists(), "the first one keeps its own"
    alive.release()


def test_an_owner_that_is_alive_and_hangs_is_waited_for_until_wait_s(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    path, beats = _lease_file(store), itertools.count()
    assert Lease(path, ttl_s=3600).acquire()

    def renew() -> bool:
        path.write_text(f"the owner's beat {next(beats)}")
        return False

    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        lease = _flight(store, ttl_s=0.1, wait_s=1).enter(1, renew)
    assert lease is not None
    assert time.monotonic() - began > 1
    assert "another job generates step 1; waiting for it, 1 s at most" in caplog.text
    assert "of waiting for step 1; generating it" in caplog.text
    assert "no sign of life" not in caplog.text
    lease.release()
    assert path.exists(), "the owner keeps its own"


def test_an_error_while_looking_gives_the_lease_back(store: StepStore) -> None:
    def look() -> bool:
        raise ValueError("made for other prompts")

    with pytest.raises(ValueError, match="other prompts"):
        _flight(store).enter(1, look)
    assert not _lease_file(store).exists()


def test_a_job_that_finished_while_we_got_the_lease_is_loaded(store: StepStore) -> None:
    looks = []

    def look() -> bool:
        looks.append(_lease_file(store).exists())
        return True

    assert _flight(store).enter(1, look) is None
    assert looks == [True], "looked while holding the lease"
    assert not _lease_file(store).exists()


_JOB = """
    import json, os, sys, time
    from rlskip.jobs.lease import SingleFlight
    from rlskip.store import StepStore
    store = StepStore(sys.argv[1])
    flight = SingleFlight(store.directory, ttl_s=2.0, poll_s=0.02)
    killed = os.path.join(sys.argv[1], "killed")
    generated = []
    for step in range(6):
        lease = flight.enter(step, lambda: store.read_meta(step) is not None)
        if lease is not None:
            with lease:
                if step == 3:
                    try:
                        os.mkdir(killed)
                    except FileExistsError:
                        pass
                    else:
                        os.kill(os.getpid(), 9)
                time.sleep(0.1)
                store.save(step, {"step": step, "by": os.getpid()})
                generated.append(step)
        assert store.load(step)["step"] == step
    print(json.dumps(generated))
"""


def test_jobs_of_a_sweep_generate_each_step_once_and_survive_a_kill(
    python: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    jobs = [python.start("-c", textwrap.dedent(_JOB), run, stderr=None) for _ in range(3)]
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [-9, 0, 0]
    generated = [step for output in outputs if output for step in json.loads(output)]
    died = set(range(6)) - set(generated)  # what the killed one had saved before
    assert sorted({*generated, *died}) == list(range(6))
    assert len(generated) == len(set(generated)), "no step twice"
    assert 3 in generated, "taken over"
    assert os.listdir(run / LEASES) == []
