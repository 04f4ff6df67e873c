"""Faults of a real system: a full disk, no descriptors or threads, a directory that is gone."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.store import AbsentDumpError, StepStore

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
    with SingleFlight(store.directory).enter(4, lambda: False):
        pass
    equal = [all(torch.equal(store.load(s)[k], v) for k, v in rollouts.items()) for s in (1, 2, 3)]
    left = [path.name for path in store.directory.glob(".work/lease-*")]
    print(json.dumps([store.steps(), equal, left]))
"""


def test_no_thread_left(python: Any, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        seen, log = python.json(_THREADS, Path(folder) / "run")
    if seen == "there are threads":
        pytest.skip("the number of threads cannot be limited here")
    assert seen == [[1, 2, 3], [True] * 3, []]
    assert "dumps are written without a separate thread: can't start new thread" in log


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
    for look in (store.load, functools.partial(store.load, part="aside")):
        with pytest.raises(AbsentDumpError) as caught:
            look(1)
        assert isinstance(caught.value, UnreadableDumpError)
    assert store.quarantine(1, "for a test") is None
    with pytest.raises(OSError):
        store.save(1, "y")
