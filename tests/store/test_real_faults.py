"""Faults of a real system: a full disk, no descriptors or threads, a directory that is gone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.records import Recorder
from rlskip.store import AbsentDumpError, CorruptDumpError, StepStore
from rlskip.store.writer import Writer
from tests.faulty_files import FaultyFiles


def _mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path, job: None) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", disk)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StepStore(disk / "run")
    store.save(1, "first")
    with pytest.raises(OSError) as caught:
        store.save(2, torch.rand(1_000_000))
    assert caught.value.errno == errno.ENOSPC
    assert store.steps() == [1]
    assert list((disk / "run" / ".work").iterdir()) == []
    store.save(2, "small")
    errors: list[BaseException | None] = []
    writer = Writer(store)
    writer.save(3, torch.rand(1_000_000), done=lambda meta, error: errors.append(error))
    writer.flush()
    assert "No space left" in str(errors)

    with open(disk / "filler", "wb", buffering=0) as file:  # now not a byte is left
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    assert store.load(1) == "first"
    assert (store.read_meta(1) is not None, store.steps(), store.nearest(9)) == (True, [1, 2], 2)
    lease = SingleFlight(store.directory).enter(4, lambda: False)
    assert lease is not None
    lease.release()
    recorder = Recorder(disk, "rollout")
    recorder.write("hit", step=1)
    assert recorder.unwritten.hits == 1
    assert "no lease for step 4" in caplog.text
    assert "no records can be written" in caplog.text


def test_a_read_only_mount(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StepStore(disk / "run", keep_last=1)
    store.save(2, "sound")
    StepStore(disk / "run").save(3, torch.rand(1000))
    dump = disk / "run" / "3" / "gen_batch.dp"
    data = bytearray(dump.read_bytes())
    data[500] ^= 1
    dump.write_bytes(data)
    _mount("-o", "remount,ro", disk)
    assert store.load(2) == "sound"
    for _ in range(2):
        with pytest.raises(CorruptDumpError, match="altered"):
            store.load(3)
    assert "It stays there, because it cannot be renamed: " in caplog.text
    assert store.read_meta(5) is None
    assert store.quarantine(2, "for a test") is None
    with pytest.raises(OSError) as caught:
        store.save(4, "x")
    assert caught.value.errno == errno.EROFS
    lease = SingleFlight(store.directory).enter(4, lambda: False)
    assert lease is not None
    lease.release()
    recorder = Recorder(disk, "rollout")
    recorder.write("miss", step=1)
    assert recorder.unwritten.misses == 1


_DESCRIPTORS = """
    import json, logging, os, resource, sys
    import torch
    from rlskip.jobs.records import Recorder
    from rlskip.jobs.lease import SingleFlight
    from rlskip.store import AbsentDumpError, StepStore
    from rlskip.store.writer import Writer
    logging.basicConfig()
    store = StepStore(sys.argv[1])
    rollouts = torch.arange(3_000_000)
    store.save(1, rollouts)
    store.load(1)
    flight, recorder = SingleFlight(store.directory), Recorder(sys.argv[1], "r")
    writer = Writer(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    seen = {}
    for free in range(7):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
        said = [store.read_meta(1) is not None, store.steps(), store.nearest(1)]
        for call in (lambda: store.load(1), lambda: store.save(10 + free, "x")):
            try:
                said.append(type(call()).__name__)
            except (AbsentDumpError, OSError) as error:
                said.append(type(error).__name__)
        flight.enter(3, lambda: False).release()
        recorder.write("hit", step=1)
        writer.save(4, rollouts)
        writer.flush()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        seen[free] = said
    assert torch.equal(store.load(1), rollouts)
    print(json.dumps(seen))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's /proc")
def test_no_descriptor_left(python: Any, tmp_path: Path) -> None:
    seen, log = python.json(_DESCRIPTORS, tmp_path / "run")
    assert seen["0"] == [False, [], None, "UnreadableDumpError", "OSError"]
    assert "cannot be read at the moment: [Errno 24] Too many open files" in log
    assert seen["6"][0] is True
    assert seen["6"][3:] == ["Tensor", "DumpMeta"]


_THREADS = """
    import json, logging, os, resource, sys, threading
    import torch
    from rlskip.jobs.lease import SingleFlight
    from rlskip.store import StepStore
    from rlskip.store.writer import Writer
    logging.basicConfig()
    torch.set_num_threads(1)
    if os.getuid() == 0:
        os.setuid(54321)  # root may have as many as it likes
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        threading.Thread(target=int).start()
        print(json.dumps("there are threads"))
        sys.exit()
    except RuntimeError:
        pass
    store = StepStore(sys.argv[1])
    rollouts = {str(i): torch.arange(3_000_000) + i for i in range(4)}
    store.save(1, rollouts)
    writer = Writer(store, timeout_s=5)
    for step in (2, 3):
        writer.save(step, rollouts)
    writer.flush()
    flight = SingleFlight(store.directory)
    with flight.enter(4, lambda: False):
        pass
    equal = [all(torch.equal(store.load(s)[k], v) for k, v in rollouts.items()) for s in (1, 2, 3)]
    print(json.dumps([store.steps(), equal, os.listdir(store.directory / ".leases")]))
"""


def test_no_thread_left(python: Any, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        seen, log = python.json(_THREADS, Path(folder) / "run")
    if seen == "there are threads":
        pytest.skip("the number of threads cannot be limited here")
    assert seen == [[1, 2, 3], [True] * 3, []]
    assert "dumps are written without a separate thread: can't start new thread" in log
    assert "no lease for step 4, another job may generate it too: can't start new thread" in log


@pytest.mark.parametrize(
    "look", [StepStore.steps, lambda s: s.nearest(9), lambda s: s.read_meta(1)]
)
def test_what_cannot_be_read_is_logged_once(
    look: Callable[[StepStore], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = StepStore(tmp_path)
    for step in range(5):
        store.save(step, step)
    with FaultyFiles(tmp_path, errno.EIO, lasting=True) as fault:
        fault.at = 3  # the directory can be listed
        look(store)
    (record,) = caplog.records
    assert "cannot be read at the moment: [Errno 5]" in record.getMessage()
    assert record.getMessage().endswith("it counts as absent")


@pytest.mark.parametrize("instead", ["a file", "a link to itself", "no permission"])
def test_a_dump_dir_that_is_gone_ends_nothing(
    instead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    store = StepStore(run)
    store.save(1, "x")
    os.rename(run, tmp_path / "away")
    if instead == "a file":
        run.touch()
    elif instead == "a link to itself":
        run.symlink_to(run)
    elif os.getuid() == 0:
        pytest.skip("root may read everything")
    else:
        run.mkdir(0o000)
    assert (store.read_meta(1), store.steps(), store.nearest(1)) == (None, [], None)
    assert len(caplog.records) == 3
    for look in (store.load, store.load_sidecar):
        with pytest.raises(AbsentDumpError) as caught:
            look(1)
        assert isinstance(caught.value, UnreadableDumpError)
    assert store.quarantine(1, "for a test") is None
    with pytest.raises(OSError):
        store.save(1, "y")
