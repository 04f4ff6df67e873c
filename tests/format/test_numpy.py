"""Dumps that are looked at without torch: the same values, as arrays of numpy."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.columns import columns_of, is_tensordict, rows_of
from rlskip.batch.tables import DataProtoParts, Ragged, Table, Whole
from rlskip.format.chunks import CHUNK
from rlskip.format.container import Reader, write
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.format.kinds import Packer, array_of, rebuild
from rlskip.store import fingerprint, register_codec
from tests.format.values import VALUES, Turn, same


def _written(value: Any) -> Reader:
    """The file of a value, opened."""
    packer, body = Packer(), io.BytesIO()
    write(body, {"value": packer.node(value)}, packer.arrays)
    return Reader(body.getvalue(), "dump")


def _as_numpy(value: Any) -> Any:
    return rebuild(_written(value), "value", into="numpy")


def _plain(value: Any) -> Any:
    """`value` of either form in the same words; floats as text, so that NaN equals itself."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [_plain(row) for row in value.unbind()]
        wide = value.to(torch.complex64 if value.is_complex() else torch.float32)
        lacks = value.dtype not in _IN_NUMPY
        return _plain((wide if lacks else value).resolve_conj().resolve_neg().numpy())
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, NonTensorData | Whole):
        return _plain(value.data)
    if isinstance(value, NonTensorStack):
        return [_plain(part) for part in value.tensordicts]
    if is_tensordict(value):
        return {key: _plain(column) for key, column in sorted(columns_of(value).items())}
    if isinstance(value, DataProtoParts):
        return [_plain(part) for part in (value.batch, value.non_tensor_batch, value.meta_info)]
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        keys = sorted(value) if isinstance(value, Table) else list(value)
        return {key: _plain(value[key]) for key in keys}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float | complex) else value


_IN_NUMPY = {
    torch.from_numpy(np.zeros(0, name)).dtype
    for name in ("bool", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16")
} | {torch.uint16, torch.uint32, torch.uint64}


@settings(max_examples=80)
@given(VALUES)
def test_every_value_comes_back_exactly_and_is_the_same_without_torch(value: Any) -> None:
    found = rebuild(_written(value), "value")
    assert same(found, value)
    assert fingerprint(found) == fingerprint(value)
    assert repr(_plain(_as_numpy(value))) == repr(_plain(value))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_has_the_numbers_that_torch_has(name: str) -> None:
    value = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    found = _as_numpy({"x": value})["x"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, value.to(torch.float32).numpy())
    assert np.signbit(found)[[0, 128]].tolist() == [False, True]


def test_batches_become_tables_of_columns() -> None:
    offsets = torch.tensor([0, 2, 5])
    batch = TensorDict({"half": torch.tensor([1.5, -2.0]).bfloat16(), "x": torch.arange(2)}, [2])
    batch["jagged"] = torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets)
    batch["text"] = NonTensorStack("a", "b")
    batch["whole"] = NonTensorData([1, 2], batch_size=[2])
    batch["within"] = TensorDict({"y": torch.ones(2)}, [2])
    found = _as_numpy(batch)
    assert isinstance(found, Table)
    assert found.batch_size == (2,)
    assert found["half"].dtype == np.float32
    assert found["half"].dtype.metadata["torch"] == "bfloat16"
    assert found["x"].dtype.metadata["torch"] == "int64"
    assert isinstance(found["jagged"], Ragged)
    assert repr([_plain(row) for row in rows_of(found)]) == repr(
        [
            {"half": "1.5", "x": 0, "jagged": [0, 1], "text": "a",
             "whole": [1, 2], "within": {"y": "1.0"}},
            {"half": "-2.0", "x": 1, "jagged": [2, 3, 4], "text": "b",
             "whole": [1, 2], "within": {"y": "1.0"}},
        ]
    )  # fmt: skip
    proto = _as_numpy(DataProtoParts(batch, {"uid": np.array(["a", "b"])}, {"n": 1}))
    assert isinstance(proto.batch, Table)
    parts = [TensorDict({"x": torch.ones(n), "z": torch.ones(2)}, []) for n in (1, 2)]
    lazy = _as_numpy(LazyStackedTensorDict(*parts))
    assert (lazy.batch_size, type(lazy["x"]), lazy["z"].shape) == ((2,), Ragged, (2, 2))
    assert lazy["z"].dtype.metadata["torch"] == "float32"
    keyed = {(Turn("user", 3),): {Turn("user", 3), 1}}
    assert _as_numpy(keyed) == {(("user", 3),): {("user", 3), 1}}


def test_lengths_cut_the_rows_of_a_jagged_tensor() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(
        torch.arange(12).reshape(2, 6), torch.tensor([0, 3, 6]), torch.tensor([1, 2]), 2
    )
    rows = _as_numpy(jagged)
    assert [row.tolist() for row in rows] == [[[0], [6]], [[3, 4], [9, 10]]]


def test_a_registered_codec_gets_tensors() -> None:
    class Thing:
        tensor = torch.arange(3)

    register_codec(Thing, "tests.NumpyThing", lambda thing: thing.tensor, type)
    assert _as_numpy([Thing(), torch.arange(2)])[0] is torch.Tensor


@pytest.mark.parametrize(
    ("of_chunks", "stored"),
    [
        ([(0, 255), (0, 1)], "u1"),
        ([(0, 255), (-1, 0)], "i2"),
        ([(-128, 127), (0, 127)], "i1"),
        ([(0, 1), (0, 2**32 - 1)], "u4"),
        ([(-(2**31), 0), (0, 2**32 - 1)], "i8"),
    ],
)
def test_a_narrow_array_has_the_values_of_all_its_chunks(
    of_chunks: list[tuple[int, int]], stored: str
) -> None:
    values = torch.cat([torch.tensor(ends).repeat(CHUNK // 16) for ends in of_chunks])[:-5]
    reader = _written(values)
    reader.narrow = {array_of(reader.index["value"])}
    found = rebuild(reader, "value", into="numpy")
    assert found.dtype == stored
    assert found.dtype.metadata["torch"] == "int64"
    assert np.array_equal(found, values)
    assert np.array_equal(rebuild(_written(values), "value"), values)


def test_a_narrow_array_must_have_the_size_of_its_tensor() -> None:
    for narrow in ({0}, ()):
        reader = _written(torch.arange(16))
        reader.index["value"][3] = [2]  # as many as fit into its bytes, once they are narrow
        reader.narrow = narrow
        with pytest.raises(UnreadableDumpError):
            rebuild(reader, "value", into="numpy")
