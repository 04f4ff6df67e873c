"""What goes in comes out: type, dtype, shape, order and every bit."""

from __future__ import annotations

import fractions
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlskip.format import torch_maker
from rlskip.store import (
    CorruptDumpError,
    DumpError,
    StepStore,
    UnsupportedTypeError,
    fingerprint,
    register_codec,
)
from tests.faulty_files import flip
from tests.format.values import as_verl, forge, same


def test_a_tensor_under_two_names_is_shared_after_loading(store: StepStore) -> None:
    shared = torch.arange(100_000)
    meta = store.save(1, {"a": shared, "b": [shared], "c": shared.clone()})
    assert meta.nbytes == 2 * shared.nbytes
    loaded = store.load(1)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is not loaded["c"]


def test_jagged_tensors_share_offsets_after_loading(store: StepStore) -> None:
    offsets = torch.tensor([0, 2, 5])
    jagged = [torch.nested.nested_tensor_from_jagged(torch.randn(5, 3), offsets) for _ in range(2)]
    store.save(1, TensorDict({"a": jagged[0], "b": jagged[1]}, [2]))
    loaded = store.load(1)
    total = loaded["a"] + loaded["b"]  # torch refuses where the raggedness is not the same one
    assert torch.equal(total.values(), (jagged[0] + jagged[1]).values())


def test_loaded_arrays_are_writable_and_share_no_memory(store: StepStore) -> None:
    store.save(1, {"t": torch.zeros(5), "a": np.zeros(5)})
    first, second = store.load(1), store.load(1)
    first["t"] += 1
    first["a"] += 1
    assert second["t"].sum() == 0
    assert second["a"].sum() == 0


def test_images_keep_their_pixels(store: StepStore) -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "F", "CMYK", "I;16")
    for step, mode in enumerate(modes):
        source = image.fromarray(noise, "RGBA")
        picture = source.convert("L").convert(mode) if mode == "I;16" else source.convert(mode)
        picture.info |= {"transparency": 3, "dpi": object()}
        store.save(step, [picture])
        (loaded,) = store.load(step)
        assert (loaded.mode, loaded.size) == (mode, picture.size)
        assert loaded.info == {"transparency": 3}, "of its notes what draws it"
        assert loaded.tobytes() == picture.tobytes()
        assert loaded.getpalette() == picture.getpalette()


def test_integers_of_a_device_come_as_few_bytes_and_go_back_as_they_were(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device here: benchmarks.gpu does it with one."""
    ends = [0, -1, 127, -129, 255, 256, -(2**15), 2**15, 2**31, -(2**63)]
    values = [torch.tensor([low, high]).repeat(3) for low in ends for high in ends]
    values += [torch.arange(12, dtype=torch.int32).reshape(3, 4).T, torch.empty(0, dtype=int)]
    monkeypatch.setattr("rlskip.format.torch_maker._is_near", lambda value: False)
    assert torch_maker.narrowed(values[0]).dtype is torch.uint8
    store.save(1, values)
    for one, other in zip(store.load(1), values, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_a_cuda_tensor_loads_where_there_is_no_cuda(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, torch.arange(9))

    def elsewhere(index: dict, body: bytearray) -> None:
        assert index["rollouts"][-1] is None
        index["rollouts"][-1] = "cuda"

    forge(store.directory / "1" / "gen_batch.dp", elsewhere)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded = store.load(1)
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, torch.arange(9))


# -- tensors of every dtype that torch has, in every layout -----------------------------------


_DTYPES = sorted(
    {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    }
)
# How to cut a tensor of 4 rows and 6 columns.
_CUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.T,
    "every other": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 3],
    "one element of a column": lambda t: t[:1, -1],
    "one element, 0-D": lambda t: t[1, 2],
    "one element of a long stride": lambda t: t[::4, 1],
    "none": lambda t: t[:, 2:2],
    "expanded": lambda t: t[0].expand(3, 6),
    "expanded to none": lambda t: t[0].expand(0, 6),
}


def _raw(value: torch.Tensor) -> np.ndarray:
    """The elements' bytes, taken one by one from the memory."""
    itemsize = value.element_size()
    memory = np.frombuffer(bytes(value.untyped_storage()), np.uint8)
    offsets = np.full(value.shape, value.storage_offset(), np.int64)
    for axis, stride in enumerate(value.stride()):
        steps = np.arange(value.shape[axis]) * stride
        offsets += steps.reshape([-1 if a == axis else 1 for a in range(value.dim())])
    return np.array([memory[o * itemsize : (o + 1) * itemsize] for o in offsets.reshape(-1)])


@pytest.mark.parametrize("name", _DTYPES)
def test_a_tensor_of_any_dtype_and_layout_round_trips(name: str, store: StepStore) -> None:
    """Arrays, and views that torch conjugates or negates, are among the values that tests draw."""
    dtype = getattr(torch, name)
    bits = np.random.default_rng(0).integers(0, 2, (4, 6 * dtype.itemsize), dtype=np.uint8)
    whole = torch.from_numpy(bits).view(dtype)
    values = {cut: take(whole) for cut, take in _CUTS.items()}
    store.save(1, values)
    for cut, loaded in store.load(1).items():
        value = values[cut]
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape), cut
        assert loaded.is_contiguous(), cut
        np.testing.assert_array_equal(_raw(loaded), _raw(value), cut)
        assert fingerprint([value]) == fingerprint([loaded]), cut


# -- types of others ---------------------------------------------------------------------


def test_a_registered_codec_round_trips_its_type(store: StepStore) -> None:
    """What it encodes into is gone meanwhile, so another object may have its id."""
    register_codec(
        fractions.Fraction,
        "tests.Fraction",
        lambda f: torch.tensor([f.numerator, f.denominator]),
        lambda plain: fractions.Fraction(*plain.tolist()),
    )
    value = {"f": [fractions.Fraction(i, 31) for i in range(30)]}
    store.save(1, value)
    assert store.load(1) == value


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        ({"a": [1, object()]}, r"rollouts\['a'\]\[1\]", "builtins.object"),
        ({"x": {1: lambda: 0}}, r"rollouts\['x'\]\[1\]", "builtins.function"),
        (TensorDict({"n": {"s": torch.ones(2, 2).to_sparse()}}, []), r"\['n'\]\['s'\]", "Tensor"),
        (torch.nested.nested_tensor([torch.ones(1)]), "rollouts", "Tensor: nested in strided"),
        (np.ma.masked_array([1]), "rollouts", "MaskedArray"),
        (defaultdict(lambda: 0), "rollouts", "defaultdict"),
        # They would come back as plain tensors and arrays.
        ([torch.nn.Parameter(torch.ones(2))], r"rollouts\[0\]", "Parameter"),
    ],
)
def test_an_unsupported_value_is_named_before_a_byte_is_written(
    value: Any, place: str, kind: str, store: StepStore
) -> None:
    with pytest.raises(UnsupportedTypeError, match=f"{place}: .*{kind}") as caught:
        store.save(1, value)
    assert "register_codec" in caught.value.remedy
    assert isinstance(caught.value, TypeError)
    assert not store.directory.exists()


# -- verl --------------------------------------------------------------------------------


def test_a_dataproto_of_verl_round_trips(store: StepStore, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from verl.protocol import DataProto
    except ImportError:  # a stand-in of the same make
        DataProto = as_verl(monkeypatch)
    proto = DataProto(
        batch=TensorDict({"ids": torch.arange(6).reshape(2, 3), "x": torch.ones(2)}, [2]),
        non_tensor_batch={"uid": np.array(["a", "b"], object), "y": np.array([1.0, 2.0])},
        meta_info={"validate": False, "timing": {"gen": 1.5}, "metrics": [{"a": 1}]},
    )
    store.save(1, proto)
    loaded = store.load(1)
    assert type(loaded) is DataProto
    assert same(loaded.batch, proto.batch)
    assert same(loaded.non_tensor_batch, proto.non_tensor_batch)
    assert same(loaded.meta_info, proto.meta_info)
    part = store.load(1, fields=["ids", "uid"])
    assert list(part.batch.keys()) == ["ids"]
    assert list(part.non_tensor_batch) == ["uid"]
    assert same(part.meta_info, proto.meta_info)
    proto.batch = None
    store.save(2, proto)
    assert store.load(2).batch is None


# -- a few fields only -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, lambda d: TensorDict(d, [3])])
def test_fields_reads_only_the_named_fields(kind: Any, store: StepStore) -> None:
    batch = {"a": torch.arange(3), "b": torch.rand(3, 50_000), "c": {"a": torch.ones(3)}}
    store.save(1, kind(batch))
    damaged = store.directory / "1" / "gen_batch.dp"
    assert sorted(store.load(1, fields=["a", "c"]).keys()) == ["a", "c"]
    flip(damaged, 300)  # within b
    part = store.load(1, fields=["a", "c"])
    assert sorted(part["c"].keys()) == ["a"], "only the outermost mapping is chosen from"
    with pytest.raises(CorruptDumpError):
        store.load(1, fields=["b"])


def test_a_missing_field_is_named(store: StepStore) -> None:
    store.save(1, {"a": 1})
    store.save(2, [{"a": 1}, {"a": 2}])
    with pytest.raises(DumpError, match="no field 'zz'"):
        store.load(1, fields=["a", "zz"])
    with pytest.raises(DumpError, match="no field 'a'"):
        store.load(2, fields=["a"])
    assert store.steps() == [1, 2]


# -- what JSON and tensordict would lose --------------------------------------------------


def test_an_error_while_packing_names_the_value(store: StepStore) -> None:
    class Thing:
        pass

    def fail(thing: Any) -> Any:
        raise ZeroDivisionError("within the codec")

    register_codec(Thing, "tests.Thing", fail, fail)
    closed = pytest.importorskip("PIL.Image").new("L", (2, 2))
    closed.close()
    for value, why in ((Thing(), "within the codec"), (closed, "closed image")):
        with pytest.raises(UnsupportedTypeError, match=why) as caught:
            store.save(1, {"a": [value]})
        assert caught.value.where == "rollouts['a'][0]"
    assert not store.directory.exists()
