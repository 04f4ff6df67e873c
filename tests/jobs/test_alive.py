"""Who is at work in a directory: what the living hold stays, what the dead left goes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs import alive
from rlskip.jobs.alive import WORK, held, holding, own, sweep
from rlskip.jobs.lease import take
from tests.clock import eventually, in_a_fork


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / WORK).mkdir()
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A heart that beats often, for times of a second instead of a minute."""
    monkeypatch.setattr(alive, "BEAT_S", 0.1)
    monkeypatch.setattr(alive, "DEAD_S", 0.8)
    heart = alive._Heart()
    monkeypatch.setattr(alive, "_HEART", heart)
    yield
    heart.close()


def names(root: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in (root / WORK).glob(pattern))


def another_job(root: Path, label: str = "3", age: float = 0.0, **process: Any) -> list[Path]:
    """What a job that is not this process holds; its file was touched `age` seconds ago."""
    job = root / WORK / "job-0123456789abcdef"
    staging = root / WORK / f"{label}~0123456789abcdef-7"
    job.write_text(json.dumps({"host": "elsewhere", "pid": 7, "sees": "another", **process}))
    staging.mkdir()
    (staging / "gen_batch.dp").write_bytes(b"half")
    os.utime(job, (time.time() - age,) * 2)
    return [job, staging]


HOLDER = """
    import sys
    from pathlib import Path
    from rlskip.jobs.alive import holding
    with holding(Path(sys.argv[1]), "reading-4"):
        print("holds", flush=True)
        sys.stdin.readline()
"""


def test_a_killed_job_of_this_host_is_known_at_once(root: Path) -> None:
    pipe, code = subprocess.PIPE, textwrap.dedent(HOLDER)
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        sweep(root)
        ((label, who),) = held(root)
        assert label == "reading-4"
        assert who.startswith(f"process {holder.pid} on ")
        holder.kill()
        assert eventually(lambda: held(root) == []), "ended, though its parent has not asked yet"
    sweep(root)
    assert names(root) == []


@pytest.mark.parametrize(("age", "lives"), [(50, True), (70, False)])
def test_a_job_of_another_host_lives_as_long_as_its_file_is_touched(
    age: float, lives: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = another_job(root, age=age)
    os.utime(files[1], (0, 0))  # what it holds need not be touched
    monkeypatch.setattr("time.time", lambda: 1e11)  # this host's clock is wrong
    assert ("3" in dict(held(root))) == lives
    sweep(root)
    assert [file.exists() for file in files] == [lives, lives]


@pytest.mark.parametrize(
    ("change", "ended"),
    [
        ({}, False),
        ({"began": "1"}, True),  # the number belongs to another process by now
        ({"pid": "1"}, False),
        ({"pid": 2**22 + 1}, True),  # more than Linux gives
        ({"pid": 2**22 + 1, "sees": "another host"}, False),
        ({"pid": 2**22 + 1, "began": None}, False),
        ({"pid": 2**22 + 1, "sees": None}, False),  # nor does this host know what it sees
    ],
    ids=str,
)
def test_only_a_process_that_could_be_seen_has_ended(
    change: dict[str, Any], ended: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(root)
    (mine,) = (root / WORK).glob("job-*")
    process = {**json.loads(mine.read_text()), **change}
    another_job(root, **process)
    sees = process["sees"] and alive._sees()
    monkeypatch.setattr(alive, "_sees", lambda: sees)
    assert ("3" not in dict(held(root))) == ended


@pytest.mark.parametrize("text", [None, "[]", "\0" * 5000])
def test_what_no_file_says_anything_of_is_judged_by_its_age(text: str | None, root: Path) -> None:
    job, staging = another_job(root)
    job.unlink() if text is None else job.write_text(text)
    sweep(root)
    assert staging.exists()
    for path in (staging, *(root / WORK).glob("job-0*")):
        os.utime(path, (time.time() - 70,) * 2)
    sweep(root)
    assert not job.exists()
    assert not staging.exists()


@pytest.mark.usefixtures("quick")
def test_who_works_long_is_not_taken_for_dead(root: Path) -> None:
    before = {*threading.enumerate()}
    with holding(root, "reading-1"), holding(root, "reading-2"):
        assert len({*threading.enumerate()} - before) == 1, "one thread and one file"
        (mine,) = (root / WORK).glob("job-*")
        os.utime(mine, (0, 0))
        assert eventually(lambda: mine.stat().st_mtime > 0)
        mine.unlink()  # by another job, which was wrong
        assert eventually(mine.exists)
    assert names(root) == [mine.name]
    shutil.rmtree(root)  # nothing is made again there
    assert not eventually(root.exists, 0.3)
    (root / WORK).mkdir(parents=True)
    with holding(root, "reading-1"):
        assert eventually(mine.exists)


@pytest.mark.usefixtures("quick")
def test_what_a_fault_keeps_here_is_let_go_at_the_next_beat(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else other jobs would wait for one that has ended its step, as long as it lives."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as faults, ExitStack() as lease, holding(root, "x-4"):
        assert take(lease, root, "lease-1")
        faults.setattr(os, "unlink", fail)
    assert eventually(lambda: len(names(root)) == 1), "the process's own file"


@pytest.mark.usefixtures("quick")
def test_a_forked_child_says_for_itself_that_it_lives(root: Path) -> None:
    def is_renewed() -> None:
        before = {*(root / WORK).glob("job-*")}
        own(root)
        (mine,) = {*(root / WORK).glob("job-*")} - before
        os.utime(mine, (0, 0))
        assert eventually(lambda: mine.stat().st_mtime > 0)

    own(root)  # the parent's thread is at work
    in_a_fork(is_renewed)


def test_where_nothing_can_be_written_nothing_is_held(root: Path) -> None:
    shutil.rmtree(root / WORK)
    (root / WORK).symlink_to("/proc")
    with holding(root, "reading-1"), pytest.raises(OSError, match="links are not followed"):
        held(root)


def test_what_a_job_made_just_before_it_died_goes_with_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made after another job has listed what there is."""
    own(root)
    (mine,) = (root / WORK).glob("job-*")
    process = json.loads(mine.read_text())
    real, last = os.listdir, root / WORK / "lease-3"

    def listdir(path: Any) -> list[str]:
        names = real(path)
        if not last.is_symlink() and "job-0123456789abcdef" in names:
            last.symlink_to("0123456789abcdef-8")
        return names

    another_job(root, **{**process, "pid": 2**22 + 1})
    monkeypatch.setattr(os, "listdir", listdir)
    sweep(root)
    assert names(root, "lease-*") == names(root, "*~*") == []
