"""What the store's tests share: values of every kind, exact equality, forged dumps."""

from __future__ import annotations

import json
import math
import struct
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import blosc2
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.format.chunks import pack
from rlskip.format.dump_errors import VERSION
from rlskip.store import DumpMeta

Turn = namedtuple("Turn", ["role", "tokens"])

_TORCH = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.float64, torch.float32, torch.float16,
    torch.bfloat16, torch.complex64, torch.complex128,
]  # fmt: skip
_NUMPY = [
    "int64", "int32", "int8", "uint8", "uint64", "bool", "float64", "float32", "float16",
    "complex64", ">i4", ">f4", "<U5", ">U2", "S3", "M8[ns]", ">m8[s]",
]  # fmt: skip

_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def _bits(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(_TORCH)), draw(_shapes)
    raw = _bits(shape, dtype.itemsize, draw(st.integers(0, 2**32)))
    if dtype is torch.bool:
        raw &= 1
    elif draw(st.booleans()):
        raw[..., 1:] = 0  # small numbers, which are narrowed
    tensor = torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape)
    views = [tensor, tensor.conj(), tensor.conj().imag] if dtype.is_complex else [tensor]
    return draw(st.sampled_from(views))


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = np.dtype(draw(st.sampled_from(_NUMPY))), draw(_shapes)
    size = math.prod(shape)
    if dtype.kind in "US":
        texts = draw(st.lists(st.text("aé☃", max_size=5), min_size=size, max_size=size))
        texts = [t.encode()[:3] for t in texts] if dtype.kind == "S" else texts
        array = np.array(texts, dtype).reshape(shape)
    else:
        raw = _bits(shape, dtype.itemsize, draw(st.integers(0, 2**32)))
        if dtype.kind == "b":
            raw &= 1
        array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    return array[::-1].T if shape and draw(st.booleans()) else array


# Lone surrogates, and two that are no character together.
_texts = st.text(st.characters()) | st.sampled_from(["\ud83d\ude00", "a\ud800\udc00b\udbff\udfff"])
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    _texts,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32).map(np.float32),
    (st.text("abcé", max_size=4) | _texts).map(np.str_),
    st.sampled_from([torch.Size([2, 3]), np.bool_(True), np.datetime64("2020")]),
)
_keys = st.one_of(
    st.text(max_size=6), _texts, st.integers(), st.booleans(), st.none(), st.tuples(st.text())
)


def _objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def _containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    lists = st.lists(inner, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(_objects),
        st.dictionaries(_keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.builds(Turn, inner, inner),
        st.sets(st.integers() | _texts, max_size=9),
        st.frozensets(st.integers(), max_size=9),
        # Long enough for the packed forms.
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=8, max_size=20),
        st.lists(st.floats(), min_size=8, max_size=20),
        st.lists(_texts, min_size=8, max_size=20),
        st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=3, max_size=9),
    )


@st.composite
def _tensordicts(draw: st.DrawFn, inner: st.SearchStrategy) -> TensorDict:
    rows = draw(st.integers(1, 4))
    batch = TensorDict({"ids": torch.arange(rows * 3).reshape(rows, 3)}, [rows])
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        batch["jagged"] = torch.nested.nested_tensor_from_jagged(
            torch.randn(int(offsets[-1]), 2), offsets
        )
    if draw(st.booleans()):
        batch.set("one", NonTensorData(data=draw(inner), batch_size=[rows]))
    if draw(st.booleans()):
        batch.set("each", NonTensorStack(*(NonTensorData(data=draw(inner)) for _ in range(rows))))
    if draw(st.booleans()):
        batch["nested"] = TensorDict({"x": torch.randn(rows)}, [rows])
    if draw(st.booleans()):
        return LazyStackedTensorDict(batch, batch.clone(), stack_dim=draw(st.integers(0, 1)))
    if not {"jagged", "each"} & {*batch.keys()} and draw(st.booleans()):
        return batch[torch.zeros(rows, dtype=torch.bool)]  # no row
    return batch


_leaves = st.one_of(_scalars, _tensors(), _arrays())
_plain = st.recursive(_leaves, _containers, max_leaves=8)
VALUES = st.one_of(_plain, _tensordicts(_plain), st.lists(_tensordicts(_scalars), max_size=2))
"""Anything the codec keeps."""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # torch calls an empty tensor contiguous whatever its stride, and then refuses to view it.
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit: types, dtypes, shapes, order, NaN payloads, signs of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.is_nested:
            return a.layout == b.layout and same(list(a.unbind()), list(b.unbind()))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_as_bytes(a), _as_bytes(b))
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and same(list(a.reshape(-1)), list(b.reshape(-1)))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, NonTensorData):
        return a.batch_size == b.batch_size and same(a.data, b.data)
    if hasattr(a, "tensordicts"):
        fits = (a.stack_dim, a.batch_size) == (b.stack_dim, b.batch_size)
        return fits and same(list(a.tensordicts), list(b.tensordicts))
    if isinstance(a, TensorDict):
        return (
            a.batch_size == b.batch_size
            and list(a.keys()) == list(b.keys())
            and all(same(a._get_str(k, None), b._get_str(k, None)) for k in list(a.keys()))
        )
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items())) and (
            not isinstance(a, defaultdict) or a.default_factory is b.default_factory
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    return bool(a == b)


def seal(index: Any, body: bytes) -> bytes:
    """A dump's file of any index and any chunks, with every checksum that it needs.

    The entries of ``index["arrays"]`` may lack their chunks' checksums.
    """
    at = 0
    arrays = index.get("arrays") if isinstance(index, dict) else None
    for entry in arrays if isinstance(arrays, list) else []:
        listed = entry[3] if isinstance(entry, list) and len(entry) > 3 else None
        for chunk in listed if isinstance(listed, list) else []:
            if isinstance(chunk, list) and chunk and type(chunk[0]) is int and chunk[0] >= 0:
                chunk[1:] = [xxhash.xxh3_128_hexdigest(body[at : at + chunk[0]])]
                at += chunk[0]
    text = json.dumps(index).encode()
    packed = pack(np.frombuffer(text, np.uint8), "x1")
    digest = xxhash.xxh3_128_digest(packed)
    tail = struct.pack("<QQ16s8s", len(packed), len(text), digest, b"\r\nend\r\n\0")
    return struct.pack("<8sII", b"rlskip\r\n", VERSION, 0) + body + packed + tail


def forge(dump: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Let `change` alter a dump's index and chunks, and make every checksum fit again."""
    data = dump.read_bytes()
    stored, plain, _, _ = struct.unpack("<QQ16s8s", data[-40:])
    cut = len(data) - 40 - stored
    text = bytearray(plain)
    packed = data[cut:-40]
    size = struct.unpack_from("<i", packed, 12)[0]
    blosc2.decompress2(packed[:size], text)
    index, body = json.loads(text), bytearray(data[:cut])
    change(index, body)
    data = seal(index, bytes(body[16:]))
    dump.write_bytes(bytes(body[:16]) + data[16:])
    meta = dump.with_name("meta.json")
    recorded = DumpMeta.from_bytes(meta.read_bytes(), str(meta))
    checksum = data[-24:-8].hex()
    meta.write_bytes(attrs.evolve(recorded, checksum=checksum, stored=len(data)).to_bytes())


class DataProto:
    """verl's, as far as dumps go."""

    def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"


def as_verl(patch: pytest.MonkeyPatch) -> type[DataProto]:
    """Make the stand-in what ``verl.protocol`` has."""
    module = types.ModuleType("verl.protocol")
    module.DataProto = DataProto  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "verl.protocol", module)
    return DataProto


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


def _shared() -> list[Any]:
    value: list[Any] = []
    for _ in range(90):
        value = [value, value]
    return value


class _Broken(Mapping):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("broken")

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


INCOMPARABLE: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "endless": _endless,
    "shared": _shared,
    "object": object,
    "array of objects": lambda: np.array([object()], object),
    "structured": lambda: np.zeros(2, "i4,O"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "broken mapping": _Broken,
    "a key": lambda: {object(): 1},
    "nonsense under a TensorDict": lambda: TensorDict({"x": torch.eye(2).to_sparse()}, []),
    "a config": lambda: OmegaConf.create({"a": "${nowhere}"}),
    "subclass": lambda: np.zeros(2).view(type("Quantity", (np.ndarray,), {})),
}
"""Values of which no fingerprint can be taken."""
