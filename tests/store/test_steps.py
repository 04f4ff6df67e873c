"""What a store knows of a step: its meta, its calls, and what is absent."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from rlskip.format.dump_errors import VERSION
from rlskip.store import AbsentDumpError, Identity, StepStore, UnsupportedTypeError

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_a_dump_says_what_it_is(store: StepStore) -> None:
    identity = Identity.of({"prompts": "ab", "n": 8, "sampling.temperature": 1.0})
    meta = store.save(7, {"a": torch.zeros(10)}, identity=identity, info={"seconds": 1.5})
    assert store.read_meta(7) == meta
    assert (meta.step, meta.version, meta.nbytes) == (7, VERSION, 40)
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
    [{"x": object()}, {"seconds": float("inf")}, {"generation": 5}, {"place": -1}],
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


@pytest.mark.parametrize("call", ["stat", "open"])
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
    with pytest.raises(AbsentDumpError):
        store.load(1)
    monkeypatch.undo()
    assert store.load(1) == "x"
