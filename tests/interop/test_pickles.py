"""The reader of verl's pickles: files that verl wrote, and files that attack the reader."""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import os
import pickle
import resource
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict._reductions import _make_td as make_batch

from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.pickles import read_data_proto
from rlskip.store import StepStore
from tests.interop.crafting import Applied, Made, New, Stated, crafted, dtype, proto, saved

RUN = "exp_proj/GBS2_N2_in6_out5"
SERIALISATIONS = ["verl-0.9.1-torch", "verl-0.9.1-numpy", "verl-0.8.0-torch", "verl-0.8.0-numpy"]


def parts(file: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    found = read_data_proto(file)
    return found.batch, found.non_tensor_batch, found.meta_info


@pytest.mark.parametrize("name", SERIALISATIONS)
def test_every_serialisation_gives_the_same_rollouts(verl_files: Path, name: str) -> None:
    batch, others, meta_info = parts(verl_files / f"{name}.dp")
    assert isinstance(batch, TensorDict)
    assert batch["responses"].shape == (4, 5)
    assert batch["responses"][1, 3:].tolist() == [0, 0]
    assert batch["rm_scores"].sum() == 4
    reference, _, _ = parts(verl_files / "verl-0.9.1-torch.dp")
    assert all(torch.equal(batch[k], reference[k]) for k in list(reference.keys()))
    assert others["uid"].tolist() == ["a", "a", "b", "b"]
    assert others["multi_modal_inputs"][1]["pixel_values"].tolist() == [0, 1, 2]
    assert others["raw_prompt"][3] == [{"role": "user", "content": "3 + 2?"}]
    assert others["score"].dtype == np.float64
    assert meta_info["timing"]["gen"] == 1.5


class Evil:
    """Runs a command when it is unpickled by anybody careless."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def test_the_attacks_below_would_work(tmp_path: Path) -> None:
    """Else the tests that nothing happened would prove nothing."""
    for i, data in enumerate([pickle.dumps(Evil(tmp_path / "0")), saved(Evil(tmp_path / "1"))]):
        if i:
            torch.load(io.BytesIO(data), weights_only=False)
        else:
            pickle.loads(data)
        assert (tmp_path / str(i)).exists()


def attacks(proof: Path) -> dict[str, bytes]:
    evil = Evil(proof)
    batch = {"x": torch.zeros(1)}
    storage = torch.storage._load_from_bytes
    legacy = saved(evil, _use_new_zipfile_serialization=False)

    class InStorage:
        def __reduce__(self) -> tuple[Any, ...]:
            return storage, (saved(evil),)

    class InLegacyStorage:
        def __reduce__(self) -> tuple[Any, ...]:
            return storage, (legacy,)

    class Getattr:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (TensorDict, "load_memmap")

    polyglot = io.BytesIO(legacy)
    with zipfile.ZipFile(polyglot, "a") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(batch))
    return {
        "a bare pickle": pickle.dumps(evil),
        "in a column": proto((saved(batch), {"x": np.array([evil], object)}, {})),
        "within the zip of the tensors": proto((saved({"x": evil}), {}, {})),
        "legacy bytes of torch": proto((legacy, {}, {})),
        "a zip behind legacy bytes": proto((polyglot.getvalue(), {}, {})),
        "within a storage's bytes": proto((saved(batch), {}, {"x": InStorage()})),
        "within a storage's legacy bytes": proto((saved(batch), {}, {"x": InLegacyStorage()})),
        "getattr": proto((saved({"x": Getattr()}), {}, {})),
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    }


@pytest.mark.parametrize("which", list(attacks(Path("x"))))
def test_a_dump_that_would_run_a_command_is_refused(
    rlskip: Any, tmp_path: Path, which: str
) -> None:
    proof = tmp_path / "proof"
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(attacks(proof)[which])
    out = tmp_path / "ours"
    arguments = ("import", file, "-d", out, "--trust-pickle", "--step", 1, "--run", RUN)
    said = rlskip(*arguments)
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert not proof.exists()
    assert not out.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_kind_of_array_is_read_as_pickle_would(tmp_path: Path, protocol: int) -> None:
    arrays = {
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "bcd"]),
        "bytes": np.array([b"a", b"xx"]),
        "times": np.array(["2026-01-01"], "M8[s]"),
        "every other day": np.array(["2026-01-01"], "M8[2D]"),
        "spans": np.array([3], "m8[D]"),
        "a span of nothing": np.array([3], "m8"),
        "no objects": np.zeros((0, 2), object),
        "empty": np.zeros((0, 3)),
        "one": np.array(1.5),
        "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "axes in another order": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        "complex": np.ones(2, "c16"),
        "scalar": np.float32(3),
        "flag": np.bool_(True),
    }
    others = {
        "objects": np.array([[None, {"a": np.arange(2)}], ["x", 1.5]], object),
        "half": torch.rand(2).bfloat16(),
        "kinds": [{1, "a"}, frozenset([2]), collections.defaultdict(list, a=[1]), bytearray(b"x")],
        "more": (collections.OrderedDict(a=1), 1j, 2**70, torch.int8, torch.Size([2])),
    }
    file = tmp_path / "gen_batch.dp"
    inner = pickle.dumps((None, {**arrays, **others}, {}), protocol=protocol)
    head = b"\x80" + bytes([protocol]) + b"cverl.protocol\nDataProto\n)\x81"
    file.write_bytes(head + inner[2:-1] + b"b.")
    found = read_data_proto(file).non_tensor_batch
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, name, strict=True)
    assert repr({name: found[name] for name in others}) == repr(others)
    assert found["columns first"].flags.f_contiguous
    found["big"][0] = 7  # memory of its own, even where two arrays of a file have one
    rebuild, memory = np.arange(2).__reduce_ex__(5)[0], bytearray(8)
    file.write_bytes(crafted([Made(rebuild, memory, np.dtype("u1"), (8,), "C") for _ in range(2)]))
    one, other = read_data_proto(file).non_tensor_batch["x"]
    one[0] = 7
    assert other[0] == 0


def test_a_size_that_torch_would_infer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gen_batch.dp"
    for rows, shape in ((2, (2, 2)), (2, (-1, 2))):
        file.write_bytes(proto((([rows], None, {"x": ("float32", shape, bytes(16))}), {}, {})))
        with pytest.raises(ForeignDumpError) if -1 in shape else contextlib.nullcontext():
            assert read_data_proto(file).batch["x"].shape == shape


def legacy_tensor(storage: bytes) -> Made:
    """A tensor over a storage in torch.save's older form, as a plain pickle holds it."""
    return tensor((1000,), (1,), storage=Made(torch.storage._load_from_bytes, storage))


def test_a_storage_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    file, flag = tmp_path / "gen_batch.dp", FLOATS.index(b"\x88", FLOATS.index(b"little_endian"))
    file.write_bytes(crafted([legacy_tensor(FLOATS)] * 99))
    assert read_data_proto(file).non_tensor_batch["x"][98].sum() == 0
    file.write_bytes(crafted(legacy_tensor(FLOATS[:flag] + b"\x89" + FLOATS[flag + 1 :])))
    with pytest.raises(ForeignDumpError, match="in a form that torch does not pickle"):
        read_data_proto(file)


def test_images_and_batches_of_every_kind_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(12, dtype="u1").reshape(2, 2, 3))
    lists = [torch.ones(2), torch.ones(3)]
    batch = TensorDict(
        {
            "ragged": torch.nested.nested_tensor(lists, layout=torch.jagged),
            "strided": torch.nested.nested_tensor(lists, layout=torch.strided),
            "texts": NonTensorStack("a", "b"),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "whole": NonTensorData("x", batch_size=[2]),
            "within": TensorDict({"x": torch.ones(2, dtype=torch.uint8)}, [2]),
        },
        [2],
    )
    lazy = LazyStackedTensorDict(*(TensorDict({"x": x}, []) for x in lists))
    none = TensorDict({"texts": NonTensorStack("a", "b")}, [2])[torch.zeros(2, dtype=torch.bool)]
    images = np.empty(1, object)
    images[0] = {"image": [image]}
    file = tmp_path / "gen_batch.dp"
    for packed in (batch, saved(batch)):
        file.write_bytes(proto((packed, {"images": images}, {"lazy": lazy, "none": none})))
        found, others, meta_info = parts(file)
        assert [len(x) for x in found["ragged"].unbind()] == [2, 3]
        assert [len(x) for x in found["strided"].unbind()] == [2, 3]
        assert found["texts"] == ["a", "b"]
        assert found["within", "x"].tolist() == [1, 1]
        assert found["whole"] == "x"
        assert type(found["parameter"]) is torch.Tensor
        assert others["images"][0]["image"][0].tobytes() == bytes(range(12))
        assert meta_info["lazy"][1]["x"].tolist() == [1, 1, 1]
        assert meta_info["none"]["texts"] == []


# -- small files that would make large values ----------------------------------------------------

EQUAL = (1 << 61) - 1  # multiples of it have equal hashes
HUGE = 10**12
FLOATS = saved(torch.zeros(1000).untyped_storage(), _use_new_zipfile_serialization=False)


def tensor(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, storage: Any = None
) -> Made:
    """A tensor of that size, by default in a storage of four elements."""
    storage = storage or torch.zeros(4).storage()
    hooks: Any = collections.OrderedDict()
    return Made(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, hooks)


def array(shape: tuple[int, ...], code: Any, data: bytes) -> Stated:
    empty = Made(np.array(0).__reduce__()[0], np.ndarray, (0,), b"b")
    return Stated(empty, (1, shape, code, False, data))


def laughs(depth: int) -> list[Any]:
    """A list of ten times the same list of ten times ..."""
    value: list[Any] = [0] * 10
    for _ in range(depth):
        value = [value] * 10
    return value


def copies(make: Any, argument: Any, times: int) -> list[Made]:
    """Calls with one argument, which the file holds once."""
    return [Made(make, argument) for _ in range(times)]


def stacks() -> list[Stated]:
    """Stacks that have one state."""
    state = {"tensordicts": [batch()] * 1000, "stack_dim": 0}
    return [Stated(New(LazyStackedTensorDict), state) for _ in range(3000)]


def batch(**state: Any) -> Made:
    good = TensorDict({}, [1]).__getstate__()
    return Made(make_batch, TensorDict, {**good, **state})


def image(size: tuple[int, int]) -> Stated:
    module = pytest.importorskip("PIL.Image")
    state = module.new("1", (8, 8)).__getstate__()
    return Stated(New(module.Image), [*state[:2], size, *state[3:]])


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def memory_attacks() -> dict[str, Any]:
    """What would make Python read or write at an address of the file's choice, or beyond an end."""
    scalar = np.float64(0).__reduce__()[0]
    buffered = np.arange(2).__reduce_ex__(5)[0]
    retyped, parameter = torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_parameter
    a, objects, flags = b"A" * 8, np.dtype("O"), np.dtype("O").flags
    hidden = dtype("O8", 3, "|", None, None, None, -1, -1, 0)
    field = dtype("S8", 3, "|", None, ("x",), {"x": (objects, 0)}, 8, 1, flags)
    part = dtype("S8", 3, "|", (objects, (1,)), None, None, 8, 1, flags)

    def column(kind: Any, data: Any, n: int = 1) -> Stated:
        return array((n,), kind, data)

    return {
        "an array of addresses": Made(np.ndarray, (1,), objects, a),
        "by way of a tensor": Made(retyped, np.ndarray, np.ndarray, ((1,), objects, a), None),
        "a state of addresses": column(objects, a),
        "a state of too few objects": column(objects, [], 100_000),
        "filled twice": Stated(
            array((8,), np.dtype("u1"), bytes(8)), (1, (4000,), np.dtype("u1"), False, bytes(4000))
        ),
        "objects that a state hides": column(hidden, a),
        "objects that a buffer hides": Made(buffered, a, hidden, (1,), "C"),
        "a field of objects": column(field, a),
        "a part of objects": Made(scalar, part, a),
        "a structure": Made(np.dtype, "O,i8", False, True),
        "another codec": Made(codecs.encode, "x", "zip"),
        "two numbers for one": Made(scalar, np.dtype("i4"), a),
        "a buffer that may move": Made(buffered, np.zeros(100), np.dtype("i8"), (100,), "C"),
        "a tensor at an address": Made(torch.Tensor, cdata=0x41414141),
        "a function's defaults": Stated(parameter, (None, {"x": 1})),
    }


ATTACKS: dict[str, Any] = {
    **{name: lambda value=value: value for name, value in memory_attacks().items()},
    "a tensor beyond its storage": lambda: tensor((10**9,), (1,)),
    "a few elements beyond": lambda: tensor((4,), (1,), 2),
    "a tensor before its storage": lambda: tensor((2,), (1,), -1),
    "one element, expanded": lambda: tensor((10**9,), (0,)),
    "rows without elements": lambda: tensor((HUGE, 0), (1, 1)),
    "a set of a range": lambda: Made(set, range(HUGE)),
    "a frozenset of a range": lambda: Made(frozenset, range(HUGE)),
    "a dict of a range": lambda: Made(collections.OrderedDict, range(HUGE)),
    "a size of a range": lambda: Made(torch.Size, range(HUGE)),
    "bytes of a number": lambda: Made(bytes, 4 * 10**9),
    "a bytearray of a number": lambda: Made(bytearray, 4 * 10**9),
    "one text, copied": lambda: copies(bytearray, bytes(50_000), 5000),
    "one list, as sets": lambda: copies(set, list(range(5000)), 5000),
    "stacks of one state": stacks,
    "keys of equal hashes": lambda: {i * EQUAL: i for i in range(3000)},
    "a key whose hash may be another's": lambda: {EQUAL: 0},
    "frozen members of equal hashes": lambda: frozenset(i * EQUAL for i in range(3000)),
    "members of equal hashes": lambda: {i * EQUAL for i in range(3000)},
    "text without characters": lambda: array((2**50,), Made(np.dtype, "U0", False, True), b""),
    "an array of empty rows": lambda: array((2**40, 0), np.dtype("f4"), b""),
    "an array larger than its memory": lambda: array((1000,), np.dtype("f4"), b"four"),
    "a scalar of zeros": lambda: Made(
        np.float64(0).__reduce__()[0], Made(np.dtype, "S999999999", False, True)
    ),
    "a huge image": lambda: image((50_000, 50_000)),
    "a list that contains itself": itself,
    "objects that contain themselves": lambda: array((1,), np.dtype("O"), [itself()]),
    "rows of a nested tensor, expanded": lambda: Made(
        torch._utils._rebuild_nested_tensor,
        torch.zeros(1),
        torch.tensor([[10**9]]),
        torch.tensor([[0]]),
        torch.tensor([0]),
    ),
    "empty rows of a nested tensor": lambda: Made(
        torch._utils._rebuild_nested_tensor,
        torch.zeros(1),
        *(tensor((3_000_000, 1), (0, 0), storage=torch.zeros(1).long().storage()),) * 2,
        tensor((3_000_000,), (0,), storage=torch.zeros(1).long().storage()),
    ),
    "a list 900 deep": lambda: nested(900),
    "a batch of false length": lambda: batch(_batch_size=[HUGE]),
    "a batch with a field of another length": lambda: batch(_tensordict={"x": torch.zeros(3)}),
    "arguments without an end": lambda: Applied(set, batch(_batch_size=[HUGE], _tensordict={})),
    "a batch without its fields": lambda: batch(_tensordict=None),
    "a batch without a state": lambda: New(TensorDict),
    "data of false length": lambda: NonTensorData("a", batch_size=[HUGE]),
}


def dtype_of_size(code: str, size: int) -> Stated:
    order, flags = "<" if code[0] == "U" else "|", np.dtype(code).flags
    return dtype(code, 3, order, None, None, None, size, -1, flags)


IGNORED: dict[str, Any] = {
    "text of a negative size": lambda: array((0,), dtype_of_size("U2", -1), b""),
    "bytes of a negative size": lambda: array((0,), dtype_of_size("S2", -1), b""),
    "text of another size": lambda: array((1,), dtype_of_size("U1", 1 << 40), b"a\0\0\0"),
    "a batch with a class of its choice": lambda: batch(__class__=dict),
    "a batch with a special attribute": lambda: batch(__doc__="x"),
    "a state for what has none": lambda: Stated(
        Made(np.arange(2).__reduce_ex__(5)[0], b"A" * 8, np.dtype("i8"), (1,), "C"), (1, (9,))
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", IGNORED)
def test_a_state_reaches_no_other_library(tmp_path: Path, which: str) -> None:
    """What numpy, torch and tensordict would obey is not even looked at."""
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(crafted(IGNORED[which]()))
    found = read_data_proto(file).non_tensor_batch["x"]
    assert len(repr(found)) < 1000
    store = StepStore(tmp_path / "run")
    store.save(1, found)
    assert repr(store.load(1)) == repr(found)


def test_parts_that_are_shared_are_read_once(tmp_path: Path) -> None:
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(crafted(laughs(30)))
    found = read_data_proto(file).non_tensor_batch["x"]
    assert found[0] is found[9]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", list(ATTACKS))
def test_a_small_file_cannot_make_a_large_value(tmp_path: Path, which: str) -> None:
    file = tmp_path / "gen_batch.dp"
    sys.setrecursionlimit(5000)
    try:
        file.write_bytes(crafted(ATTACKS[which]()))
    finally:
        sys.setrecursionlimit(1000)
    assert file.stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(ForeignDumpError) as caught:
        read_data_proto(file)
    assert str(file) in str(caught.value)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kB"


def test_a_length_in_a_pickle_allocates_nothing(tmp_path: Path) -> None:
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(b"\x80\x04" + pickle.BINBYTES8 + (1 << 31).to_bytes(8, "little") + b"abc")
    tracemalloc.start()
    try:
        with pytest.raises(ForeignDumpError):
            read_data_proto(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
