"""A file system that fails, one operation at a time: nothing wrong is read, nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.store import AbsentDumpError, DumpError, StepStore
from rlskip.store.writer import Writer
from rlskip.testing import FaultyFiles, each_fault
from rlskip.testing.faults import ERRNOS

pytestmark = pytest.mark.usefixtures("no_fsync")

LASTING = pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
FEW = (errno.EIO, errno.EROFS, errno.ENOTDIR)
ERRNOS_TOO = pytest.mark.parametrize(
    "errnos", [FEW, pytest.param(ERRNOS, marks=pytest.mark.long)], ids=["some", "all"]
)


def _fresh(path: Path, **options: Any) -> StepStore:
    """An empty store; what an earlier round left is removed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return StepStore(path, **options)


# -- reading -----------------------------------------------------------------------------

_READS: dict[str, tuple[Callable[[StepStore], Any], list[Any]]] = {
    "read_meta": (lambda s: getattr(s.read_meta(3), "step", None), [3, None]),
    "steps": (lambda s: s.steps(), [[3, 5], [3], [5], []]),
    "nearest": (lambda s: s.nearest(4), [3, 5, None]),
    "load": (lambda s: s.load(3), [{"a": [1, 2]}, AbsentDumpError]),
    "load_sidecar": (lambda s: s.load_sidecar(3), ["rng", AbsentDumpError]),
    "load fields": (lambda s: s.load(3, fields=["a"]), [{"a": [1, 2]}, AbsentDumpError]),
    "verify": (lambda s: s.verify(3).step, [3, AbsentDumpError]),
}


@LASTING
@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fault_while_reading_is_an_absent_dump(
    read: str, lasting: bool, ranks: int, tmp_path: Path
) -> None:
    for rank in range(ranks):
        store = StepStore(tmp_path / "run", rank=rank, world_size=ranks)
        for step in (3, 5):
            store.save(step, {"a": [1, 2]}, sidecar="rng", info={"generation": "7"})
    before = sorted(path for path in tmp_path.rglob("*") if ".work" not in path.parts)
    call, allowed = _READS[read]
    for fault in each_fault(tmp_path, lasting=lasting):
        named = True
        with fault:
            try:
                found = call(StepStore(tmp_path / "run", world_size=ranks))
            except DumpError as error:
                reason = str(error)
                found = AbsentDumpError if isinstance(error, AbsentDumpError) else error
                named = os.strerror(fault.code or 0) in reason or "there is no dump" in reason
        assert found in allowed, fault
        assert named, fault
        assert fault.happened or found == allowed[0], fault
    after = sorted(path for path in tmp_path.rglob("*") if ".work" not in path.parts)
    assert before == after, "a sound dump is never quarantined"


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
    for look in (store.load, store.verify, store.load_sidecar):
        with pytest.raises(AbsentDumpError) as caught:
            look(1)
        assert isinstance(caught.value, UnreadableDumpError)
    assert store.quarantine(1, "for a test") is None
    with pytest.raises(OSError):
        store.save(1, "y")


# -- saving ------------------------------------------------------------------------------


@contextlib.contextmanager
def _only_os_errors() -> Iterator[list[OSError]]:
    raised: list[OSError] = []
    try:
        yield raised
    except OSError as error:
        raised.append(error)


@LASTING
@pytest.mark.parametrize("options", [{}, {"keep_last": 1}, {"world_size": 2}], ids=str)
@pytest.mark.parametrize("part", [None, 2])
@ERRNOS_TOO
def test_a_save_is_complete_or_fails_and_leaves_nothing(
    lasting: bool,
    options: dict[str, int],
    part: int | None,
    errnos: tuple[int, ...],
    tmp_path: Path,
) -> None:
    for fault in each_fault(tmp_path, errnos, lasting=lasting):
        store = _fresh(tmp_path / "run", **options)
        StepStore(tmp_path / "run").save(1, "old")
        with fault, _only_os_errors() as raised:
            store.save(3, {"a": [1, 2]}, part=part)
        if "world_size" in options:
            StepStore(tmp_path / "run", rank=1, **options).save(3, "the other's", part=part)
        after = StepStore(tmp_path / "run", **options)
        if raised:
            assert after.read_meta(3, part) is None, fault
            if not lasting:
                assert not any((tmp_path / "run" / ".work").glob("*/*")), fault
            after.save(3, {"a": [1, 2]}, part=part)
        assert after.load(3, part=part) == {"a": [1, 2]}, fault
        if "keep_last" not in options:
            assert StepStore(tmp_path / "run").load(1) == "old", fault


@LASTING
@ERRNOS_TOO
def test_what_is_no_dump_is_kept_when_a_dump_takes_its_name(
    lasting: bool, errnos: tuple[int, ...], tmp_path: Path
) -> None:
    for fault in each_fault(tmp_path, errnos, lasting=lasting):
        store = _fresh(tmp_path / "run")
        (tmp_path / "run" / "1").mkdir()
        (tmp_path / "run" / "1" / "notes").write_text("mine")
        with fault, _only_os_errors() as raised:
            store.save(1, "new")
        (kept,) = (tmp_path / "run").glob("1*/notes")
        assert kept.read_text() == "mine", fault
        if raised:
            StepStore(tmp_path / "run").save(1, "new")
        assert StepStore(tmp_path / "run").load(1) == "new", fault


@LASTING
@ERRNOS_TOO
def test_a_dump_that_is_there_stays_when_another_is_saved(
    lasting: bool, errnos: tuple[int, ...], tmp_path: Path
) -> None:
    for fault in each_fault(tmp_path, errnos, lasting=lasting):
        store = _fresh(tmp_path / "run")
        store.save(1, "old")
        with fault, _only_os_errors():
            store.save(1, "new")
        assert StepStore(tmp_path / "run").load(1) == "old", fault
        assert not list((tmp_path / "run").glob("1.*")), fault


@LASTING
def test_a_background_save_never_raises(lasting: bool, tmp_path: Path) -> None:
    for fault in each_fault(tmp_path, FEW, lasting=lasting):
        store, told = _fresh(tmp_path / "run"), list[Any]()
        writer = Writer(store)
        with fault:
            writer.save(1, [1, 2], done=lambda _, error, told=told: told.append(error))
            writer.flush()
        (error,) = told
        assert error is None or isinstance(error, OSError), fault
        assert (store.read_meta(1) is None) == (error is not None), fault


@LASTING
def test_a_fault_while_quarantining_is_a_warning(
    lasting: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for fault in each_fault(tmp_path, lasting=lasting):
        store = _fresh(tmp_path / "run")
        store.save(1, "x")
        caplog.clear()
        with fault:
            kept = store.quarantine(1, "for a test")
        assert (kept is None) == (tmp_path / "run" / "1").exists(), fault
        assert "cannot be used: for a test" in caplog.text or kept is None, fault
