"""What a store knows of a step: its meta, its parts, and what is absent."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from rlskip.store import AbsentDumpError, Identity, StepStore, UnsupportedTypeError


def test_a_dump_says_what_it_is(store: StepStore) -> None:
    identity = Identity.of({"prompts": "ab", "n": 8, "sampling.temperature": 1.0})
    meta = store.save(7, {"a": torch.zeros(10)}, identity=identity, info={"seconds": 1.5})
    assert store.read_meta(7) == meta
    assert (meta.step, meta.version, meta.nbytes) == (7, 2, 40)
    assert meta.identity == identity
    assert meta.info == {"seconds": 1.5}
    assert meta.created.endswith("+00:00")
    assert meta.stored == (store.directory / "7" / "gen_batch.dp").stat().st_size
    assert sorted(p.name for p in (store.directory / "7").iterdir()) == [
        "gen_batch.dp",
        "meta.json",
    ]


@pytest.mark.parametrize(
    "info",
    [{"x": object()}, {"seconds": "1"}, {"seconds": float("inf")}, {"generation": 5}],
)
def test_info_that_cannot_be_kept_is_refused_before_a_byte_is_written(
    info: dict[str, Any], store: StepStore
) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        store.save(1, 1, info=info)
    assert caught.value.where == "info"
    assert not store.directory.exists()


def test_what_is_absent(store: StepStore) -> None:
    assert store.steps() == []
    assert store.nearest(1) is None
    assert store.read_meta(1) is None
    with pytest.raises(AbsentDumpError) as caught:
        store.load(1)
    assert caught.value.where == str(store.directory / "1")
    assert not store.directory.exists(), "looking creates nothing"


def test_a_first_call_without_its_meta_is_kept_and_the_later_calls_stay(store: StepStore) -> None:
    for part, value in [(None, "old"), (1, "second")]:
        store.save(3, value, part=part)
    (store.directory / "3" / "meta.json").unlink()
    store.save(3, "new")
    assert (store.load(3), store.load(3, part=1)) == ("new", "second")
    (kept,) = store.directory.glob("3.bad-*")
    kept.rename(store.directory / "4")
    assert [path.name for path in (store.directory / "4").iterdir()] == ["gen_batch.dp"]


def test_each_rank_compares_its_shard_with_the_next_ranks(store: StepStore) -> None:
    ranks = [StepStore(store.directory, rank=rank, world_size=3) for rank in range(3)]
    for rank, call in zip(ranks, ("a", "b", "a"), strict=True):
        rank.save(1, "x", info={"generation": call})
    assert [rank.read_meta(1) is None for rank in ranks] == [True, True, False]


@pytest.mark.parametrize("call", ["listdir", "stat", "open"])
def test_what_another_host_removes_meanwhile_is_absent(
    store: StepStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
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
    if call != "listdir":  # to load lists nothing
        with pytest.raises(AbsentDumpError):
            store.load(1)
    monkeypatch.undo()
    assert store.load(1) == "x"


def test_a_later_call_that_arrives_during_a_quarantine_stays(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, "first")
    looked = store.calls

    def late(step: int) -> list[int]:
        found = looked(step)
        monkeypatch.undo()
        StepStore(store.directory).save(1, "second", part=1)
        return found

    monkeypatch.setattr(store, "calls", late)
    assert store.quarantine(1, "a test") is not None
    assert store.calls(1) == [1]
    assert store.load(1, part=1) == "second"
