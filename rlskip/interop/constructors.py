"""What a pickle of rollouts may construct, each with a bound on memory and time.

A pickle names types and functions, and calls them with arguments of its choice. This module maps
each name to a function that checks the arguments first, because numpy and torch trust their callers
with addresses, sizes and offsets. A name without such a function cannot be called.

Every allocation is charged to the file's Budget, so a small file cannot fill the memory.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.interop.bounds import BATCHES, Budget, ForeignDumpError, check_shape


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys of dicts and sets that could be made to have equal hashes."""
    for key in keys:
        small = isinstance(key, int) and abs(key) < (1 << 61) - 1
        if key is not None and not small and not isinstance(key, str | bytes | DimRange):
            raise ForeignDumpError(f"a key of type {type(key).__name__}")


# -- names -------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Name:
    """What a pickle gets for a name. REDUCE calls `call`, NEWOBJ calls `new`; None: refused."""

    name: str
    call: Callable[..., Any] | None = None
    new: Callable[[], Any] | None = None
    dtype: torch.dtype | None = None  # of a storage


class PickledDataProto:
    """The content of a ``verl.protocol.DataProto``; verl is not needed."""

    state: Any = None


class DimRange:
    """An annotation of torch's compiler on a tensor; it is dropped."""


@attrs.frozen(eq=False)
class Storage:
    """The memory of tensors: `flat` has all its elements."""

    flat: torch.Tensor


class Constructors:
    """The table of names for one file.

    Parameters
    ----------
    load_storage
        Reads the bytes that torch pickles for a storage within a plain pickle.
    """

    def __init__(self, budget: Budget, load_storage: Callable[[bytes], Storage]) -> None:
        self._budget = budget
        self._load_storage = load_storage
        self._table: dict[tuple[str, str], Name] = {}
        self._fill()

    def find(self, module: str, name: str) -> Any:
        """The entry for `module`.`name`; raises ForeignDumpError if the table has none."""
        module = _RENAMED.get(module, module)
        if (module, name) in self._table:
            return self._table[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ForeignDumpError(
            f"it names {module}.{name}, which no dump of rollouts needs: nothing of it was run",
            remedy="if you wrote this file yourself, drop that field and dump again",
        )

    def _add(self, module: str, name: str, call: Any = None, **more: Any) -> Name:
        made = Name(f"{module}.{name}", call, **more)
        self._table[module, name] = made
        return made

    def _fill(self) -> None:
        add = self._add
        add("verl.protocol", "DataProto", new=PickledDataProto)
        add("_codecs", "encode", _latin1)
        for kind in (set, frozenset):
            add("builtins", kind.__name__, _collection(kind))
        add("builtins", "bytes", lambda: b"")
        add("builtins", "bytearray", _bytearray)
        add("builtins", "complex", _complex)
        add("builtins", "slice", slice)
        add("builtins", "range", self._range)
        for plain in (list, dict, int, float, str):
            add("builtins", plain.__name__)
        add("collections", "OrderedDict", _ordered)
        add("collections", "defaultdict", self._defaultdict)
        self._numpy = add("numpy", "ndarray")
        add("numpy", "dtype", _dtype)
        add("numpy._core.multiarray", "_reconstruct", self._reconstruct)
        add("numpy._core.multiarray", "scalar", self._scalar)
        add("numpy._core.numeric", "_frombuffer", self._from_buffer)
        add("torch", "Size", lambda sizes=(): torch.Size(check_shape(sizes, self._budget, 1)))
        add("torch", "device", _device)
        add("torch.serialization", "_get_layout", _layout)
        add("torch._dynamo.decorators", "_DimRange", new=DimRange)
        add("torch.storage", "_load_from_bytes", self._storage)
        add("torch.storage", "UntypedStorage", dtype=torch.uint8)
        add("torch", "UntypedStorage", dtype=torch.uint8)
        for storage, dtype in _STORAGES.items():
            add("torch", f"{storage}Storage", dtype=dtype)
        self._rebuilding = (
            add("torch._utils", "_rebuild_tensor_v2", self._tensor),
            add("torch._utils", "_rebuild_tensor_v3", self._tensor_v3),
            add("torch._utils", "_rebuild_parameter", _parameter),
            add("torch._utils", "_rebuild_nested_tensor", self._strided),
            add("torch.nested._internal.nested_tensor", "_rebuild_njt", _jagged),
        )
        add("torch._tensor", "_rebuild_from_type_v2", self._rebuild)
        self._kinds = (
            add("torch", "Tensor"),
            add("torch.nn.parameter", "Parameter"),
            add("torch.nested._internal.nested_tensor", "NestedTensor"),
        )
        self._batches = {
            add(module, kind.__name__, new=lambda kind=kind: kind.__new__(kind)): kind
            for module, kind in (
                ("tensordict._td", TensorDict),
                ("tensordict._lazy", LazyStackedTensorDict),
                ("tensordict.tensorclass", NonTensorData),
                ("tensordict.tensorclass", NonTensorStack),
            )
        }
        add("tensordict._reductions", "_make_td", self._batch)
        add("tensordict._reductions", "_rebuild_tensordict_files_consolidated", self._consolidated)
        add("PIL.Image", "Image", new=_image)

    # -- Python's ----------------------------------------------------------------------------

    def _range(self, *limits: int) -> range:
        made = range(*limits)
        self._budget.spend(len(made))
        return made

    def _defaultdict(self, factory: Name | None = None) -> Any:
        kinds = {self._table["builtins", t.__name__]: t for t in (list, dict, set, int, float, str)}
        return collections.defaultdict(None if factory is None else kinds[factory])

    # -- numpy's -----------------------------------------------------------------------------

    def _reconstruct(self, kind: Any, shape: Any, code: Any) -> np.ndarray:
        """An empty array, which the state that follows replaces."""
        if kind is not self._numpy or shape != (0,):
            raise ForeignDumpError("an array in a form that numpy does not pickle")
        return np.empty(0, np.int8)

    def _scalar(self, dtype: Any, data: Any) -> Any:
        self._plain(dtype, data)
        if len(data) != dtype.itemsize:
            raise ForeignDumpError("a number of another size than its dtype")
        return np.frombuffer(data, dtype)[0]

    def _from_buffer(
        self, data: Any, dtype: Any, shape: Any, order: str, axes: Any = None
    ) -> np.ndarray:
        """Protocol 5's arrays, copied, so that nothing else in the pickle shares their memory."""
        self._plain(dtype, data)
        shape = check_shape(shape, self._budget, dtype.itemsize)
        flat: np.ndarray = np.frombuffer(data, dtype).copy()
        made: np.ndarray = flat.reshape(shape, order="F" if order == "F" else "C")
        return made if axes is None else made.transpose(axes)

    def _plain(self, dtype: Any, data: Any) -> None:
        if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
            raise ForeignDumpError("an array in a form that numpy does not pickle")
        if dtype.hasobject:
            raise ForeignDumpError("an array of objects made from bytes, which would be addresses")

    def set_array(self, made: np.ndarray, state: Any) -> None:
        """Set the state of an array before anything refers to its memory; addresses are refused."""
        _, shape, dtype, _, data = state
        if made.size or made.base is not None or not isinstance(dtype, np.dtype):
            raise ForeignDumpError("an array in a form that numpy does not pickle")
        shape = check_shape(shape, self._budget, dtype.itemsize)
        if not dtype.hasobject:
            self._plain(dtype, data)
            if len(data) != math.prod(shape) * dtype.itemsize:
                raise ForeignDumpError("an array of another size than its memory")
        elif not isinstance(data, list):
            raise ForeignDumpError("an array of objects made from bytes, which would be addresses")
        elif math.prod(shape) != len(data):
            raise ForeignDumpError("an array of more objects than there are")
        made.__setstate__(state)

    # -- torch's -----------------------------------------------------------------------------

    def _storage(self, data: Any) -> Storage:
        if not isinstance(data, bytes):
            raise ForeignDumpError("a storage in a form that torch does not pickle")
        return self._load_storage(data)

    def _tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any,
        requires_grad: Any, hooks: Any = None, metadata: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(storage, Storage):
            raise ForeignDumpError("a tensor without a storage")
        flat = storage.flat
        size = check_shape(size, self._budget, flat.element_size())
        # as_strided refuses what is beyond the storage, which it never enlarges.
        made = flat.as_strided(size, tuple(stride), offset)
        if metadata:
            flags = {name: bool(metadata.get(name)) for name in ("conj", "neg")}
            torch._utils.set_tensor_metadata(made, flags)
        return made.requires_grad_() if requires_grad is True else made

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any,
        requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
            raise ForeignDumpError("a tensor without a storage")
        typed = Storage(storage.flat.view(torch.uint8).view(dtype))
        return self._tensor(typed, offset, size, stride, requires_grad, hooks, metadata)

    def _strided(self, buffer: Any, sizes: Any, strides: Any, offsets: Any) -> torch.Tensor:
        """A nested tensor of the strided layout, from its parts."""
        rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
        parts = []
        for size, stride, offset in rows:
            check_shape(size, self._budget, buffer.element_size())
            parts.append(buffer.as_strided(size, stride, offset))
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)

    def _rebuild(self, make: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
        if kind not in self._kinds or make not in self._rebuilding:
            raise ForeignDumpError("a tensor in a form that torch does not pickle")
        made: torch.Tensor = make.call(*arguments)
        return made

    # -- tensordict's ------------------------------------------------------------------------

    def _batch(self, kind: Any, state: Any) -> Any:
        made = kind.new() if kind in self._batches else None
        set_batch(made, state)
        return made

    def _consolidated(self, metadata: Any, storage: Any) -> Any:
        make: Any = import_module("tensordict._reductions")
        return make._rebuild_tensordict_files_consolidated(metadata, storage)


_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8,
    "Byte": torch.uint8, "Bool": torch.bool,
}  # fmt: skip
# The same under the names of older versions.
_RENAMED = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}


def _latin1(text: str, encoding: str) -> bytes:
    """How numpy and protocol 2 write bytes; any other encoding would import a codec."""
    if encoding != "latin1":
        raise ForeignDumpError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _collection(kind: Any) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple):
            raise ForeignDumpError(f"a {kind.__name__} made from a {type(items).__name__}")
        check_keys(items)
        return kind(items)

    return make


def _bytearray(data: Any = b"", encoding: str = "latin-1") -> bytearray:
    if isinstance(data, str) and encoding == "latin-1":
        data = data.encode("latin-1")
    if not isinstance(data, bytes):
        raise ForeignDumpError(f"bytes made from a {type(data).__name__}")
    return bytearray(data)


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise ForeignDumpError("a complex number of other parts than floats")
    return complex(real, imaginary)


def _ordered(pairs: Any = ()) -> Any:
    check_keys(key for key, _ in pairs)
    return collections.OrderedDict([(key, value) for key, value in pairs])


def _device(kind: Any, index: Any = 0) -> torch.device:
    return torch.device(kind, index) if isinstance(kind, str) else torch.device("cpu")


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ForeignDumpError(f"{name!r} is not a layout")
    return found


_DTYPE = re.compile(r"[biufcSUO][1-9]\d{0,8}|[mM]8")


def _dtype(code: str, align: Any = False, copy: Any = True) -> np.dtype:
    """numpy.dtype for the codes that pickled arrays have; structured ones are refused."""
    if not _DTYPE.fullmatch(code):
        raise ForeignDumpError(f"an array of dtype {code!r}")
    # A copy: numpy's own dtype would not take the byte order that follows.
    made: np.dtype = np.dtype(code, False, True)  # type: ignore[call-overload]
    return made


def set_dtype(made: np.dtype, state: Any) -> None:
    """Set the byte order of a dtype and the unit of a time; nothing else may change."""
    _, order, subarray, names, fields, *layout = state
    own = (made.itemsize, made.alignment)
    fits = (
        subarray is names is fields is None
        and tuple(layout[:2]) in {(-1, -1), own}
        and layout[2] == made.flags
        and (order == "|") == (made.byteorder == "|")
        and (len(layout) == 3 or (made.kind in "mM" and not layout[3][0]))
    )
    if not fits:
        raise ForeignDumpError(f"an invalid state of dtype {made}")
    made.__setstate__(state)  # type: ignore[attr-defined]


def _parameter(data: Any, requires_grad: Any, hooks: Any = None) -> torch.Tensor:
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _jagged(parts: Mapping[str, Any]) -> torch.Tensor:
    """A nested tensor of the jagged layout, from its values and offsets."""
    ragged = parts.get("_ragged_idx", 1)
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def set_batch(made: Any, state: Any) -> None:
    """The state of a TensorDict or a relative of it: its attributes."""
    if not isinstance(made, BATCHES) or not isinstance(state, dict):
        raise ForeignDumpError("a TensorDict in a form that tensordict does not pickle")
    if any(not isinstance(name, str) or name.startswith("__") for name in state):
        raise ForeignDumpError("a TensorDict with a special attribute")
    made.__setstate__(state)


def _image() -> Any:
    kind: Any = import_module("PIL.Image").Image
    return kind.__new__(kind)


def set_image(made: Any, state: Sequence[Any], budget: Budget) -> None:
    """Set the state of an image, which allocates its memory before it reads its bytes."""
    _, _, size, _, data, *_ = state
    width, height = check_shape(tuple(size), budget, 4)
    if not isinstance(data, bytes) or width * height > 8 * len(data):
        raise ForeignDumpError(f"an image of {width}x{height} pixels from {len(data)} bytes")
    made.__setstate__(list(state))
