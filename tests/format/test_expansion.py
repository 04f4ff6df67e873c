"""Hostile dumps: no input runs code, leaves the directory, or takes memory or time at will."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlskip.format.chunks import CHUNK, Array, pack
from rlskip.format.container import FLOOR, MAX_RATIO, Reader, write
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.format.kinds import Packer, rebuild
from rlskip.store import (
    CorruptDumpError,
    StepStore,
    TooLargeDumpError,
    UnknownTypeError,
    UnsupportedTypeError,
)
from tests.format.values import INCOMPARABLE, forge, seal

_MAX_BYTES = 16 << 20


def _file(index: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    body = io.BytesIO()
    kinds = ["i" if array.dtype.kind == "i" else "x" for array in arrays]
    specs = [f"{kind}{array.itemsize}" for kind, array in zip(kinds, arrays, strict=True)]
    write(body, index, [Array.of(a, spec) for a, spec in zip(arrays, specs, strict=True)])
    return body.getvalue()


def _read(data: bytes, max_bytes: int = _MAX_BYTES) -> tuple[Any, float]:
    """The value of the tree `rollouts`; fails where reading takes more memory than it may."""
    handle = os.memfd_create("dump")
    with open(handle, "w+b", buffering=0) as file:
        file.write(data)
        tracemalloc.start()
        began = time.thread_time()
        try:
            reader = Reader(file, "dump", max_bytes=max_bytes)
            return rebuild(reader, "rollouts"), time.thread_time() - began
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            seconds = time.thread_time() - began
            # What is charged is what values take, about.
            assert peak <= 2 * max_bytes, f"{peak / 2**20:.0f} MiB of {len(data)} bytes"
            assert seconds < 20 + len(data) / 10_000, f"{seconds:.1f} s for {len(data)} bytes"


_N = 1 << 20
_ZEROS = np.zeros(_N, np.int64)
_TEXT = np.zeros(_N, np.uint8)


def _dense(number: int, *shape: int, dtype: str = "int64") -> list:
    return ["tensor", "dense", dtype, list(shape), number, None]


def _wide_text() -> np.ndarray:
    text = np.full(_N, ord("a"), np.uint8)
    text[:4] = np.frombuffer("\U0001f600".encode(), np.uint8)
    return text


_FORGED: dict[str, Callable[[], tuple[Any, list[np.ndarray]]]] = {
    "runs of no length": lambda: (["list", "runs", 0, ["list", "any", []]], [_ZEROS]),
    "empty strings": lambda: (["list", "str", 0, 1], [_ZEROS, _TEXT[:0]]),
    "one wide string": lambda: (
        ["list", "str", 0, 1], [np.array([_N]), _wide_text()],
    ),
    "wrapped integers": lambda: (
        ["tensordictstack", "data", 0, ["list", "int", 0]], [_ZEROS[: _N // 16]],
    ),
    "objects": lambda: (["ndarray", "O", [_N], ["list", "int", 0]], [_ZEROS]),
    "an image of single bits": lambda: (
        ["image", "1", [8 * 2048, _N // 2048], 0, None, ["dict", []]], [_TEXT],
    ),
    "an image of lines without pixels": lambda: (
        ["image", "L", [0, 2**31 - 1], 0, None, ["dict", []]], [_TEXT[:0]],
    ),
    "an image without its pixels": lambda: (
        ["image", "RGBA", [2**15, 2**15], 0, None, ["dict", []]], [_TEXT],
    ),
    "empty lists": lambda: (["list", "any", [["list", "any", []]] * 5_000], []),
    "one tensor in many TensorDicts": lambda: (
        ["list", "any",
         [["tensordict", [], None, None, [["x", _dense(0, 8)]]]] * 5_000], [_ZEROS[:8]],
    ),
    "jagged tensors over one": lambda: (
        ["list", "any", [["tensor", "jagged", _dense(0, 8), _dense(1, 8), None, 1]] * 1_250],
        [_ZEROS[:8], _ZEROS[:8]],
    ),
}  # fmt: skip


# What torch and Pillow allocate is not traced: that it is refused is all that can be observed.
_NOT_TRACED = {"an image of lines without pixels", "an image without its pixels"}


@pytest.mark.parametrize("name", _FORGED)
def test_a_forged_file_takes_no_more_memory_than_it_may(name: str) -> None:
    node, arrays = _FORGED[name]()
    data = _file({"rollouts": node}, arrays)
    if name in _NOT_TRACED:
        with pytest.raises(TooLargeDumpError, match="max_bytes"):
            _read(data)
    else:
        with contextlib.suppress(UnreadableDumpError, UnknownTypeError, TooLargeDumpError):
            _read(data)


_HARMFUL: dict[str, Any] = {
    "too many elements for no data": ["ndarray", "<i8", [2**62], None],
    "a long nothing, wrapped": ["tensordictstack", "data", 0, ["nontensor", 1, [2**40]]],
    "a tensor without its elements": ["tensor", "dense", "int64", [8], None, None],
    "a tensor larger than its elements": _dense(0, 2**40),
    "more places than objects": ["ndarray", "O", [10**12], ["list", "any", []]],
    "an address as an object": ["scalar", "|O8", "00" * 8],
    "runs that go back": ["list", "runs", 7, ["list", "int", 0]],
    "offsets that are floats": [
        "tensor", "jagged", _dense(0, 4), _dense(2, 4, dtype="float64"), None, 1,
    ],
    "no offsets": [
        "tensor", "jagged", _dense(0, 4), ["tensor", "dense", "int64", [0], None, None], None, 1,
    ],
    "offsets beyond the values": ["tensor", "jagged", _dense(6, 2), _dense(5, 3), None, 1],
    "offsets that go back": ["tensor", "jagged", _dense(0, 4), _dense(3, 3), None, 1],
    "lengths beyond the offsets": [
        "tensor", "jagged", _dense(0, 4), _dense(5, 3), _dense(6, 2), 1,
    ],
    "a dimension that is not there": ["tensor", "jagged", _dense(0, 4), _dense(5, 3), None, 7],
    "an image of a negative size": ["image", "L", [-1, -1], 1, None, ["dict", []]],
    "keys that cannot be keys": ["dict", [[["list", "any", []], 1]]],
    "a node without a tag": [],
}  # fmt: skip


@pytest.mark.parametrize("name", _HARMFUL)
def test_a_node_that_would_do_harm_is_refused(name: str) -> None:
    """Beyond that a sealed tree is believed: who forges one may write any value."""
    arrays = [np.arange(4), np.full(8, 0x11110011, np.int32), np.linspace(0, 3, 4)]
    arrays += [np.array([0, 2, 1]), np.full(4, 0x1100, np.int32), np.array([0, 2, 4])]
    arrays += [np.array([1, 3]), np.array([4, -4] * 9)]
    with pytest.raises(UnreadableDumpError, match="cannot load it now") as caught:
        _read(_file({"rollouts": _HARMFUL[name]}, arrays))
    assert caught.value.where == "dump"


@pytest.mark.parametrize("number", [99, "0", -1])
def test_an_array_that_is_not_there(number: Any) -> None:
    with pytest.raises(CorruptDumpError, match="it has no array"):
        _read(_file({"rollouts": ["bytes", number]}, []))


@pytest.mark.parametrize(
    ("node", "error", "why"),
    [
        (["nonsense"], UnknownTypeError, "'nonsense'"),  # a newer rlskip wrote it
        (["user:mine.Thing", None], UnknownTypeError, r"'mine\.Thing'"),
        (["dataproto", None, [], ["dict", []]], UnreadableDumpError, "verl"),
        (["image", "nonsense", [1, 1], 1, None, ["dict", []]], UnreadableDumpError, "cannot load"),
        (["fields", "os", "system", [["args", "x"]]], UnknownTypeError, r"os\.system"),
        (["tensor", "dense", "float3", [0], None, None], UnknownTypeError, "float3"),
    ],
)
def test_what_another_version_may_read_is_named(
    node: Any, error: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verl.protocol", None)
    with pytest.raises(error, match=why) as caught:
        _read(_file({"rollouts": node}, [np.zeros(4, np.uint8)] * 2))
    assert caught.value.where == "dump"


@pytest.mark.parametrize("levels", [400, 5000])
def test_a_file_with_endless_nesting_is_refused(levels: int) -> None:
    text = '["list","any",[' * levels + "]]" * levels
    index = json.dumps({"rollouts": "HERE"}).replace('"HERE"', text)
    try:
        data = _file(json.loads(index), [])
    except RecursionError:
        pytest.skip("this Python cannot write it")
    with pytest.raises(UnreadableDumpError):
        _read(data)


_SPECS = [("i8", "f2"), ("i8", "x8"), ("i8", "u8"), ("i2", "i4"), ("x8", "u4"), ("x8", "x4"),
          ("i8", None), ("i8", ["i4"]), (None, "i4"), ("x3", "x3"), ("i8", "i")]  # fmt: skip


@pytest.mark.parametrize(
    "arrays",
    [
        *([[80, spec, stored_as, [["SIZE"]]]] for spec, stored_as in _SPECS),
        None, [5], [[80, "i8", "i8"]], [[80, "i8", "i8", 5]], [[80, "i8", "i8", [[]]]],
        [[80, "i8", "i8", []]], [[-80, "i8", "i8", [["SIZE"]]]], [[80.0, "i8", "i8", [["SIZE"]]]],
        [[True, "x1", "x1", [["SIZE"]]]], [[81, "i8", "i8", [["SIZE"]]]],
        [[80, "i8", "i8", [["SIZE"], [0]]]], [[80, "i8", "i8", [[-1]]]],
        [[2**70, "i8", "i8", [["SIZE"]]]],
    ],
    ids=repr,
)  # fmt: skip
def test_the_listing_of_arrays_is_checked(arrays: Any) -> None:
    """An array is stored as its elements are, or as narrower integers, in as many chunks."""
    body = pack(np.arange(10), "i8")
    index = {"rollouts": ["list", "int", 0], "arrays": [[80, "i8", "i8", [[len(body)]]]]}
    assert _read(seal(index, body))[0] == list(range(10))
    index["arrays"] = json.loads(json.dumps(arrays).replace('"SIZE"', str(len(body))))
    with pytest.raises(CorruptDumpError, match="its index does not fit it"):
        _read(seal(index, body))


def test_an_index_is_a_mapping() -> None:
    for index in (None, 5, "x", [], [{"rollouts": 1}]):
        with pytest.raises(CorruptDumpError, match="not a mapping"):
            _read(seal(index, b""))


def test_zeros_that_are_written_can_be_read_and_no_more() -> None:
    """Their file is padded until it may declare them."""
    zeros = np.zeros(FLOOR + 8 * CHUNK, np.uint8)
    data = _file({"rollouts": ["bytes", 0]}, [zeros])
    assert len(data) >= zeros.nbytes / MAX_RATIO
    assert _read(data, 4 * FLOOR)[0] == zeros.tobytes()
    run = pack(zeros[:CHUNK], "x1")
    chunks = len(zeros) // CHUNK
    listed = [[len(run)] for _ in range(chunks)]
    index = {"rollouts": ["bytes", 0], "arrays": [[zeros.nbytes, "x1", "x1", listed]]}
    with pytest.raises(CorruptDumpError, match="more than a file of its size may"):
        _read(seal(index, run * chunks), 4 * FLOOR)


def test_walks_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlskip.format.codec.MAX_PARTS", 20_000)
    for name, why in (("endless", "deeper than"), ("shared", "more than 20000 parts")):
        with pytest.raises(UnsupportedTypeError, match=why):
            Packer().node(INCOMPARABLE[name]())


def test_wide_sharing_is_accepted() -> None:
    row = [{"role": "user", "content": ["x"] * 9}] * 50
    assert Packer().node([row] * 200)


# -- dumps that are hostile as a whole -----------------------------------------------------------


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
    at: int, value: int, why: str, store: StepStore
) -> None:
    store.save(1, torch.arange(1000))

    def lie(index: dict, body: bytearray) -> None:
        body[16 + at] = value

    forge(store.directory / "1" / "gen_batch.dp", lie)
    _refused(store, "does not match the index")
