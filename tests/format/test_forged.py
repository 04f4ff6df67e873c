"""Hostile dumps: no input runs code, leaves the directory, or takes memory at will."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlskip.store import CorruptDumpError, StepStore

Forge = Callable[..., None]


def _refused(store: StepStore, match: str) -> None:
    with pytest.raises(CorruptDumpError, match=match):
        store.load(1)
    assert store.steps() == []
    (kept,) = store.directory.glob("1.bad-*")
    assert (kept / "gen_batch.dp").exists()


def test_a_pickle_is_never_opened(store: StepStore) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(store.directory / "run-by-pickle"),)

    meta = store.save(1, {"a": 1})
    dump = store.directory / "1" / "gen_batch.dp"
    dump.write_bytes(pickle.dumps(Evil()).ljust(meta.stored, b"."))
    _refused(store, "not a dump of rlskip")
    assert not (store.directory / "run-by-pickle").exists()


def test_an_index_that_claims_to_be_huge(store: StepStore) -> None:
    store.save(1, torch.arange(1000))
    dump = store.directory / "1" / "gen_batch.dp"
    data = bytearray(dump.read_bytes())
    struct.pack_into("<Q", data, len(data) - 32, 2**50)
    dump.write_bytes(data)
    _refused(store, "its end is missing or altered")


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (2, 6 << 5, "a codec of another's, loaded as a plug-in"),
        (4, 0xFF, "more bytes than there is room for"),
        (17, 35, "a filter of another's"),
        (22, 40, "a codec of another's"),
        (31, 0x40, "memory left as it was"),
        (31, 0x08, "a lazy run, read from another file"),
    ],
)
def test_a_compressed_run_is_checked_before_the_decompressor_sees_it(
    at: int, value: int, why: str, store: StepStore, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, torch.arange(1000))

    def lie(index: dict, body: bytearray) -> None:
        body[16 + at] = value

    forge(store.directory / "1" / "gen_batch.dp", lie)
    _refused(store, "does not match the index")
