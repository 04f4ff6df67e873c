"""What a store knows of its steps: meta and calls, what is absent, which one `repeat` takes."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.format.dump_errors import VERSION
from rlskip.store import AbsentDumpError, Identity, StepStore, UnsupportedTypeError, layout
from tests.clock import eventually


def test_a_dump_says_what_it_is(store: Any) -> None:
    identity = Identity.of({"prompts": "ab", "n": 8, "sampling.temperature": 1.0})
    meta = store.save(
        torch.tensor(7), {"a": torch.zeros(10)}, identity=identity, info={"seconds": 1.5}
    )
    assert (store.read_meta(7), meta.version, meta.nbytes) == (meta, VERSION, 40)
    assert (meta.identity, meta.info) == (identity, {"seconds": 1.5})
    assert meta.created.endswith("+00:00")
    assert meta.stored == (store.directory / "7" / "gen_batch.dp").stat().st_size
    assert sorted(os.listdir(store.directory / "7")) == ["gen_batch.dp", "meta.json"]


_MUCH = {f"name{i}": "x" * 1000 for i in range(17_000)}
_UNKEPT: list[dict[str, Any]] = [
    *({"info": one} for one in ({"x": object()}, {"seconds": float("inf")}, {"place": -1}, _MUCH)),
    {"identity": Identity.of(_MUCH)},
]


@pytest.mark.parametrize("about", _UNKEPT, ids=lambda about: repr(about)[:30])
def test_a_meta_that_could_not_be_read_back_is_refused_before_a_byte_is_written(
    about: dict[str, Any], store: StepStore
) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        store.save(1, 1, **about)
    assert [caught.value.where] == [*about]
    assert not store.directory.exists()


def test_what_is_absent(store: StepStore) -> None:
    assert store.steps() == []
    assert store.nearest(1) is None
    assert store.read_meta(1) is None
    with pytest.raises(AbsentDumpError) as caught:
        store.load(1)
    assert caught.value.where == str(store.directory / "1")
    assert not store.directory.exists(), "looking creates nothing"


def test_a_dump_that_took_the_place_of_the_one_looked_at_is_not_loaded(store: StepStore) -> None:
    looked_at = store.save(1, {"a": [1]})
    store.quarantine(1, "for a test")
    now = store.save(1, {"a": [2]})
    with pytest.raises(AbsentDumpError, match="another job replaced it meanwhile"):
        store.load(1, meta=looked_at)
    assert store.load(1, meta=now) == {"a": [2]}


def test_calls_of_a_step(store: StepStore) -> None:
    calls = [f"{digit * 16}-{k}" for digit, k in (("b", 1), ("a", 10), ("a", 9))]
    for place, call in enumerate(calls, 1):
        store.save(4, {"call": call}, call=call, info={"place": place})
    assert (store.steps(), store.listed(), sorted(store.listed_by_step())) == ([], [], [4])
    assert store.read_meta(4) is None
    store.save(4, "first")
    StepStore(store.directory, world_size=2).save(4, "a shard")
    assert store.steps() == sorted(store.listed_by_step()) == [4]
    assert store.calls(4) == ["", calls[2], calls[1], calls[0]], "by name"
    assert store.in_order(4) == ["", *calls], "as they were made"
    assert store.load(4, call=calls[1]) == {"call": calls[1]}
    for call in ("", calls[0]):
        assert store.quarantine(4, "for a test", call) is not None
    assert store.quarantined(4) == ["", calls[0]]
    assert (store.steps(), store.in_order(4)) == ([], calls[1:])
    store.save(5, "another")
    assert sorted(store.listed_by_step()) == [4, 5], "nor is it listed once another is saved"
    assert store.calls(4) == [calls[2], calls[1]]


@pytest.mark.parametrize("call", ["stat", "open"])
def test_what_another_host_removes_meanwhile_is_absent(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    store.save(1, "x")
    real = getattr(os, call)

    def stale(path: Any, *flags: int, **options: Any) -> Any:
        if not isinstance(path, int) and "dir_fd" not in options:  # not of the open directory
            return real(path, *flags, **options)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, call, stale)
    assert store.read_meta(1) is None
    assert caplog.records == [], "it is gone, which is not a fault"
    with pytest.raises(AbsentDumpError):
        store.load(1)
    monkeypatch.undo()
    assert store.load(1) == "x"


def test_a_step_added_within_a_tick_of_the_clock_is_seen(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_TICK_S", 0.2)
    store.save(1, 1)
    other = StepStore(store.directory)
    os.utime(store.directory)
    assert other.steps() == [1]
    then = os.stat(store.directory).st_mtime_ns
    store.save(2, 2)
    os.utime(store.directory, ns=(then, then))
    assert eventually(lambda: other.steps() == [1, 2])
    os.utime(store.directory, (0, 0))
    assert other.steps() == [1, 2]
    store.save(3, 3)
    other.save(4, 4)
    assert eventually(lambda: other.steps() == [1, 2, 3, 4]), "its own shows the newest time"


def test_a_relative_directory_stays_where_it_was_when_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = StepStore("dumps")
    store.save(1, [1])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # Hydra's `job.chdir`, or the trainer
    store.save(2, [2])
    assert StepStore(tmp_path / "dumps").steps() == store.steps() == [1, 2]


def test_a_listing_that_failed_is_tried_again(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(where: Any) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store.save(1, 1)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        assert store.calls(1) == []
    assert "cannot be listed" in caplog.text
    assert store.calls(1) == [""]
