"""No node of a sealed file takes more memory than it may, or the time of a hang."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlskip.format.chunks import CHUNK, Array, squeeze
from rlskip.format.container import FLOOR, MAX_RATIO, Reader, write
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.format.kinds import Packer, rebuild
from rlskip.store import (
    CorruptDumpError,
    TooLargeDumpError,
    UnknownTypeError,
    UnsupportedTypeError,
)

_MAX_BYTES = 16 << 20


def _file(index: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    body = io.BytesIO()
    kinds = ["i" if array.dtype.kind == "i" else "x" for array in arrays]
    write(body, index, [Array.of(a, kind) for a, kind in zip(arrays, kinds, strict=True)])
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
            reader.expand_all()
            return rebuild(reader, "rollouts"), time.thread_time() - began
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            seconds = time.thread_time() - began
            # What is charged is what values take, about.
            assert peak <= 1.5 * max_bytes, f"{peak / 2**20:.0f} MiB of {len(data)} bytes"
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
    "runs of strings": lambda: (
        ["list", "runs", 0, ["list", "str", 1, 2]], [_ZEROS, _ZEROS, _TEXT[:0]],
    ),
    "empty strings": lambda: (["list", "str", 0, 1], [_ZEROS, _TEXT[:0]]),
    "one wide string": lambda: (
        ["list", "str", 0, 1], [np.array([_N]), _wide_text()],
    ),
    "large integers": lambda: (["list", "int", 0], [_ZEROS + 10**6]),
    "small integers": lambda: (["tuple", "int", 0], [_ZEROS]),
    "floats": lambda: (["list", "float", 0], [_ZEROS.view(np.float64)]),
    "wrapped integers": lambda: (
        ["tensordictstack", "data", 0, ["list", "int", 0]], [_ZEROS[: _N // 16]],
    ),
    "wrapped strings": lambda: (
        ["tensordictstack", "data", 0, ["list", "str", 0, 1]], [_ZEROS[: _N // 16], _TEXT[:0]],
    ),
    "a list that a TensorDict would wrap": lambda: (
        ["tensordict", [_N // 16], None, None, [["x", ["list", "str", 0, 1]]]],
        [_ZEROS[: _N // 16], _TEXT[:0]],
    ),
    "a list that a TensorDict would copy": lambda: (
        ["tensordict", [], None, None, [["x", ["list", "int", 0]]]], [_ZEROS[: _N // 16]],
    ),
    "objects": lambda: (["ndarray", "O", [_N], ["list", "int", 0]], [_ZEROS]),
    "bytes": lambda: (["list", "any", [["bytes", i] for i in range(9)]], [_TEXT] * 9),
    "an image of single bits": lambda: (
        ["image", "1", [8 * 2048, _N // 2048], 0, None, ["dict", []]], [_TEXT],
    ),
    "an image of lines without pixels": lambda: (
        ["image", "L", [0, 2**31 - 1], 0, None, ["dict", []]], [_TEXT[:0]],
    ),
    "an image without its pixels": lambda: (
        ["image", "RGBA", [2**15, 2**15], 0, None, ["dict", []]], [_TEXT],
    ),
    "one tensor nested many times": lambda: (
        ["tensor", "nested", ["list", "any", [_dense(0, _N // 16)] * 2000]], [_ZEROS[: _N // 16]],
    ),
    "text of no length, many times": lambda: (["ndarray", "<U0", [2**50], None], []),
    "bytes of no length, many times": lambda: (["ndarray", "|S0", [2**40, 2**20], None], []),
    "a set": lambda: (["set", "int", 0], [np.arange(_N // 8)]),
    "empty lists": lambda: (["list", "any", [["list", "any", []]] * 5_000], []),
    "empty sets": lambda: (["list", "any", [["set", "any", []]] * 5_000], []),
    "empty mappings": lambda: (["list", "any", [["dict", []]] * 5_000], []),
    "empty arrays": lambda: (["list", "any", [["ndarray", "|u1", [0], None]] * 25_000], []),
    "empty tensors": lambda: (
        ["list", "any", [["tensor", "dense", "int8", [0], None, None]] * 5_000], [],
    ),
    "empty TensorDicts": lambda: (
        ["list", "any", [["tensordict", [], None, None, []]] * 5_000], [],
    ),
    "wrapped nothings": lambda: (["list", "any", [["nontensor", None, []]] * 5_000], []),
    "one tensor in many TensorDicts": lambda: (
        ["list", "any",
         [["tensordict", [], None, None, [["x", _dense(0, 8)]]]] * 5_000], [_ZEROS[:8]],
    ),
    "jagged tensors over one": lambda: (
        ["list", "any", [["tensor", "jagged", _dense(0, 8), _dense(1, 8), None, 1]] * 1_250],
        [_ZEROS[:8], _ZEROS[:8]],
    ),
    "named tuples of many classes": lambda: (
        ["list", "any",
         [["namedtuple", "m", f"C{i}", ["a"], [0]] for i in range(10_000)]], [],
    ),
    "a named tuple of many fields": lambda: (
        ["namedtuple", "m", "C", [f"f{i}" for i in range(10_000)], [0] * 10_000], [],
    ),
    "images": lambda: (
        ["list", "any", [["image", "L", [0, 0], 0, None, ["dict", []]]] * 5_000], [_TEXT[:0]],
    ),
    "scalars": lambda: (["list", "any", [["scalar", "|u1", "00"]] * 5_000], []),
    "stacks": lambda: (
        ["list", "any",
         [["tensordictstack", "lazy", 0, [["tensordict", [], None, None, []]]]] * 5_000], [],
    ),
}  # fmt: skip


# What torch and Pillow allocate is not traced: that it is refused is all that can be observed.
_NOT_TRACED = {
    "one tensor nested many times": TooLargeDumpError,
    "an image of lines without pixels": CorruptDumpError,
    "an image without its pixels": CorruptDumpError,
}


@pytest.mark.parametrize("name", _FORGED)
def test_a_forged_file_takes_no_more_memory_than_it_may(name: str) -> None:
    node, arrays = _FORGED[name]()
    data = _file({"rollouts": node}, arrays)
    if name in _NOT_TRACED:
        with pytest.raises(_NOT_TRACED[name], match=r"max_bytes|without its pixels"):
            _read(data)
    else:
        with contextlib.suppress(CorruptDumpError, UnknownTypeError, TooLargeDumpError):
            _read(data)


_SEALED_BUT_WRONG: dict[str, Any] = {
    "too many elements for no data": ["ndarray", "<i8", [2**62], None],
    "dimensions that overflow": ["ndarray", "<i8", [2**62, 2**62, 0], None],
    "sizes that overflow a tensor": ["tensor", "dense", "int64", [2**62, 2**62, 0], None, None],
    "a negative size": ["tensor", "dense", "int64", [-1, 0], None, None],
    "a size past 64 bits": ["tensor", "dense", "int64", [2**70, 0], None, None],
    "a size that is infinite": ["tensor", "dense", "int64", [float("inf"), 0], None, None],
    "a long nothing, wrapped": ["tensordictstack", "data", 0, ["nontensor", 1, [2**40]]],
    "a long nothing as objects": ["ndarray", "O", [1], ["nontensor", 1, [2**40]]],
    "a long nothing to copy": [
        "tensor", "nested", ["tensor", "dense", "int8", [2**40, 0], None, None],
    ],
    "a long nothing in runs": ["list", "runs", 0, ["nontensor", 1, [2**40]]],
    "a long nothing as offsets": [
        "tensor", "jagged", _dense(0, 4), ["nontensor", 1, [2**40]], None, 1,
    ],
    "a long nothing as values": [
        "tensor", "jagged", ["tensordict", [2**40], None, None, []], _dense(5, 3), None, 1,
    ],
    "a long nothing as a palette": [
        "image", "P", [8, 4], 1, ["nontensor", 1, [2**40]], ["dict", []],
    ],
    "a long nothing as notes": ["image", "L", [0, 0], 3, None, ["tensordict", [], None, None, []]],
    "an array without its elements": ["ndarray", "<i8", [8], None],
    "a tensor without its elements": ["tensor", "dense", "int64", [8], None, None],
    "impossible characters in that byte order": ["ndarray", ">U1", [4], 4],
    "lengths beyond the offsets": [
        "tensor", "jagged", _dense(0, 4), _dense(5, 3), _dense(6, 2), 1,
    ],
    "impossible characters": ["ndarray", "<U1", [8], 1],
    "impossible characters, swapped": ["ndarray", ">U1", [8], 1],
    "one array in two forms": ["list", "any", [_dense(0, 4), _dense(0, 2, 2)]],
    "one array as text and tensor": ["list", "any", [_dense(0, 4), ["ndarray", "<i8", [4], 0]]],
    "offsets that are floats": [
        "tensor", "jagged", _dense(0, 4), _dense(2, 4, dtype="float64"), None, 1,
    ],
    "offsets that are flags": [
        "tensor", "jagged", _dense(0, 4), _dense(3, 4, dtype="bool"), None, 1,
    ],
    "offsets that are a list": ["tensor", "jagged", _dense(0, 4), ["list", "any", [0]], None, 1],
    "offsets that are none": ["tensor", "jagged", _dense(0, 4), None, None, 1],
    "no offsets": [
        "tensor", "jagged", _dense(0, 4), ["tensor", "dense", "int64", [0], None, None], None, 1,
    ],
    "a tensor larger than its elements": _dense(0, 2**40),
    "one array as two lists": ["list", "any", [["list", "int", 0], ["list", "int", 0]]],
    "runs that do not add up": ["list", "runs", 5, ["list", "int", 0]],
    "more places than objects": ["ndarray", "O", [10**12], ["list", "any", []]],
    "an address as an object": ["scalar", "|O8", "00" * 8],
    "offsets beyond the values": ["tensor", "jagged", _dense(6, 2), _dense(5, 3), None, 1],
    "offsets that go back": ["tensor", "jagged", _dense(0, 4), _dense(7, 3), None, 1],
    "more lengths than offsets": [
        "tensor", "jagged", _dense(0, 4), _dense(5, 3), _dense(0, 4), 1,
    ],
    "a dimension that is not there": ["tensor", "jagged", _dense(0, 4), _dense(5, 3), None, 7],
    "a nested tensor of text": ["tensor", "nested", ["list", "any", ["a"]]],
    "an entry of another length": ["tensordict", [3], None, None, [["x", _dense(0, 4)]]],
    "a mapping for a node": {"a": ["list", "any", []]},
    "a node without a tag": [],
    "a tag that is a list": [["list"]],
    "a tag that is a number": [7],
    "a list without a form": ["list"],
    "a list of an unknown form": ["list", "nonsense", []],
    "a tensor of an unknown form": ["tensor", "nonsense", []],
    "a stack of an unknown form": ["tensordictstack", "nonsense", 0, []],
    "a stack of numbers": ["tensordictstack", "nontensor", 0, [1, 2]],
    "a TensorDict of numbers": ["tensordict", [], None, None, [["x", 1]]],
    "text that is a list": ["scalar", "U", [1]],
    "surrogates that are no text": ["str", "ff"],
    "an image of a negative size": ["image", "L", [-1, -1], 1, None, ["dict", []]],
    "an image of a size that is no number": ["image", "L", ["1", 1], 1, None, ["dict", []]],
    "keys that cannot be keys": ["dict", [[["list", "any", []], 1]]],
    "an unhashable item": ["set", "any", [["dict", []]]],
    "a default factory that is none": ["defaultdict", "eval", []],
    "an integer of no digits": ["int", "nonsense"],
    "a scalar of two": ["scalar", "<i8", "00" * 16],
    "an array that is not there": ["bytes", 99],
    "an array that is no number": ["bytes", "0"],
    "the array before the first": ["bytes", -1],
}  # fmt: skip


@pytest.mark.parametrize("name", _SEALED_BUT_WRONG)
def test_a_forged_node_is_refused(name: str) -> None:
    flags = np.zeros(8, np.int64)
    arrays = [np.arange(4), np.full(8, 0x11110011, np.int32), np.linspace(0, 3, 4), flags[:0]]
    arrays += [np.full(4, 0x1100, np.int32), np.array([0, 2, 4]), np.array([1, 3])]
    arrays += [np.array([0, 2, 1])]
    with pytest.raises(CorruptDumpError, match=r"not fit together|it has no array") as caught:
        _read(_file({"rollouts": _SEALED_BUT_WRONG[name]}, arrays))
    assert caught.value.where == "dump"


@pytest.mark.parametrize(
    ("node", "error", "why"),
    [
        (["nonsense"], UnknownTypeError, "'nonsense'"),  # a newer rlskip wrote it
        (["user:mine.Thing", None], UnknownTypeError, r"'mine\.Thing'"),
        (["dataproto", None, [], ["dict", []]], UnknownTypeError, "install verl"),
        (["image", "nonsense", [1, 1], 1, None, ["dict", []]], UnreadableDumpError, "cannot load"),
        (["image", "L", [4, 2], 1, None, ["dict", []]], UnreadableDumpError, "cannot load"),
        (["dtype", "float3"], UnknownTypeError, "float3"),
        (["tensor", "dense", "float3", [0], None, None], UnknownTypeError, "float3"),
    ],
)
def test_what_only_another_library_refuses_is_not_called_damage(
    node: Any, error: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one may read it."""
    monkeypatch.setitem(sys.modules, "verl.protocol", None)
    with pytest.raises(error, match=why) as caught:
        _read(_file({"rollouts": node}, [np.zeros(4, np.uint8)] * 2))
    assert caught.value.where == "dump"


def test_a_file_without_a_tree_is_refused() -> None:
    with pytest.raises(CorruptDumpError, match="does not fit together"):
        _read(_file({}, []))


@pytest.mark.parametrize("levels", [101, 400, 5000])
def test_a_file_with_endless_nesting_is_refused(levels: int) -> None:
    text = '["list","any",[' * levels + "]]" * levels
    index = json.dumps({"rollouts": "HERE"}).replace('"HERE"', text)
    try:
        forged = json.loads(index)
    except RecursionError:
        pytest.skip("this Python cannot write it")
    try:
        data = _file(forged, [])
    except RecursionError:
        pytest.skip("this Python cannot write it")
    with pytest.raises(CorruptDumpError):
        _read(data)


@pytest.mark.parametrize(
    ("spec", "stored"),
    [("i8", "f2"), ("i8", ""), ("i8", "x8"), ("i8", "i16"), ("i8", "u8"), ("i2", "i4"),
     ("u8", "i4"), ("x8", "u4"), ("x8", "x4"), ("i8", None), ("i8", ["i4"]), ("i8", "2"),
     ("", "i4"), (None, "i4"), ("f8", "f8"), ("x3", "x3"), ("i", "i"), ("i8", "i"), (["i8"], "i8")],
)  # fmt: skip
def test_the_spec_of_an_array_is_checked(
    spec: Any, stored: Any, seal: Callable[[Any, bytes], bytes]
) -> None:
    """It is stored as its elements are, or as narrower integers."""
    body = squeeze(np.arange(10), "i8")
    index = {"rollouts": ["list", "int", 0], "arrays": [[80, "i8", "i8", [[len(body)]]]]}
    assert _read(seal(index, body))[0] == list(range(10))
    index["arrays"] = [[80, spec, stored, [[len(body)]]]]
    with pytest.raises(CorruptDumpError, match="its index does not fit it"):
        _read(seal(index, body))


@pytest.mark.parametrize(
    "arrays",
    [None, 5, "x", {}, [5], [[]], [[80, "i8", "i8"]], [[80, "i8", "i8", 5]],
     [[80, "i8", "i8", [5]]], [[80, "i8", "i8", [[]]]], [[80, "i8", "i8", []]],
     [[-80, "i8", "i8", [["SIZE"]]]], [[80.0, "i8", "i8", [["SIZE"]]]],
     [[True, "x1", "x1", [["SIZE"]]]], [["80", "i8", "i8", [["SIZE"]]]],
     [[81, "i8", "i8", [["SIZE"]]]], [[80, "i8", "i8", [["SIZE"], [0]]]],
     [[80, "i8", "i8", [[2**70]]]], [[80, "i8", "i8", [[-1]]]], [[80, "i8", "i8", [[1.5]]]],
     [[2**70, "i8", "i8", [["SIZE"]]]]],
    ids=repr,
)  # fmt: skip
def test_the_listing_of_arrays_is_checked(arrays: Any, seal: Callable[[Any, bytes], bytes]) -> None:
    body = squeeze(np.arange(10), "i8")
    forged = json.loads(json.dumps(arrays).replace('"SIZE"', str(len(body))))
    with pytest.raises(CorruptDumpError, match="its index does not fit it"):
        _read(seal({"rollouts": None, "arrays": forged}, body))


def test_an_index_is_a_mapping(seal: Callable[[Any, bytes], bytes]) -> None:
    for index in (None, 5, "x", [], [{"rollouts": 1}]):
        with pytest.raises(CorruptDumpError, match="not a mapping"):
            _read(seal(index, b""))


def test_zeros_that_are_written_can_be_read_and_no_more(
    seal: Callable[[Any, bytes], bytes],
) -> None:
    """Their file is padded until it may declare them."""
    zeros = np.zeros(FLOOR + 8 * CHUNK, np.uint8)
    data = _file({"rollouts": ["bytes", 0]}, [zeros])
    assert len(data) >= zeros.nbytes / MAX_RATIO
    assert _read(data, 4 * FLOOR)[0] == zeros.tobytes()
    run = squeeze(zeros[:CHUNK], "x1")
    chunks = len(zeros) // CHUNK
    listed = [[len(run)] for _ in range(chunks)]
    index = {"rollouts": ["bytes", 0], "arrays": [[zeros.nbytes, "x1", "x1", listed]]}
    with pytest.raises(CorruptDumpError, match="more than a file of its size may"):
        _read(seal(index, run * chunks), 4 * FLOOR)


def test_walks_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlskip.format.codec.MAX_PARTS", 20_000)
    endless: list[Any] = []
    endless.append(endless)
    shared: list[Any] = [1]
    for _ in range(90):
        shared = [shared, shared]
    for value, why in ((endless, "deeper than"), (shared, "more than 20000 parts")):
        with pytest.raises(UnsupportedTypeError, match=why):
            Packer().node(value)


def test_wide_sharing_is_accepted() -> None:
    row = [{"role": "user", "content": ["x"] * 9}] * 50
    assert Packer().node([row] * 200)
