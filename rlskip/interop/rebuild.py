"""Makes the values that a parsed pickle describes, each with a bound on memory and time.

numpy and torch trust their callers with addresses, sizes and offsets. Nothing of a pickle therefore
reaches their own constructors of pickles: arrays are made from bytes and a dtype of a few codes,
tensors as views of a storage, batches from their fields.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.columns import objects_of
from rlskip.batch.tables import DataProtoParts
from rlskip.format.arrays import check_characters
from rlskip.format.batches import check_entry, check_jagged
from rlskip.format.torch_maker import TORCH_DTYPES, TorchMaker
from rlskip.interop.bounds import Budget, ForeignDumpError
from rlskip.interop.unpickle import Name, Pickled

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset)
_UNFINISHED = object()
_TORCH = TorchMaker(host_classes=False)
_ROW = 1 << 10
"""Bytes of an object besides its elements, and of a part of one: many may have one state."""
_DTYPE = re.compile(r"[biufcSU][1-9]\d{0,8}|O8|[mM]8")
_UNIT = re.compile(r"[A-Za-z]{1,2}")

STORAGES = {
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


class Rebuilder:
    """Makes the values of one file.

    Parameters
    ----------
    budget
        Is charged for what is larger than the bytes that describe it.
    load_storage
        Reads the bytes that torch pickles for a storage within a plain pickle; a storage is a flat
        tensor of all its elements.
    load_archive
        Reads the bytes of an archive of torch.save within a plain pickle.
    """

    def __init__(
        self,
        budget: Budget,
        load_storage: Callable[[bytes], torch.Tensor],
        load_archive: Callable[[bytes], Any],
    ) -> None:
        self._budget = budget
        self._load_storage = load_storage
        self._load_archive = load_archive
        self._made: dict[int, Any] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def value(self, parsed: Any) -> Any:
        """The value of a part of the parsed pickle; of the same part always the same one."""
        if type(parsed) is Name:
            raise ForeignDumpError(f"it holds {parsed.name} itself")
        if type(parsed) is not Pickled and type(parsed) not in _CONTAINERS:
            return parsed
        made = self._made.get(id(parsed))
        if made is _UNFINISHED:
            raise ForeignDumpError("a value that contains itself")
        if made is None:
            self._made[id(parsed)] = _UNFINISHED
            made = self._make(parsed)
            self._made[id(parsed)] = made
        return made

    def _make(self, parsed: Any) -> Any:
        if isinstance(parsed, Pickled):
            if parsed.name not in _REBUILD:
                raise ForeignDumpError(f"it holds a {parsed.name} where no dump of rollouts does")
            self._budget.spend(_ROW)
            return _REBUILD[parsed.name](self, parsed)
        if isinstance(parsed, dict):
            if any(isinstance(key, Pickled) for key in parsed):
                raise ForeignDumpError("a key that is not plain")
            made: Any = parsed.copy()
            made.update((key, self.value(value)) for key, value in parsed.items())
            return made
        return type(parsed)(map(self.value, parsed))

    # -- numpy's -----------------------------------------------------------------------------

    def _array(self, made: Pickled) -> np.ndarray:
        _, shape, dtype, by_columns, data = made.state
        return self._elements(dtype, shape, data, "F" if by_columns else "C")

    def _buffered(self, made: Pickled) -> np.ndarray:
        """An array of protocol 5, copied, so that nothing else shares its memory."""
        data, dtype, shape, order, *axes = made.arguments
        found = self._elements(dtype, shape, data, order)
        return found.transpose(*axes) if axes and axes[0] is not None else found

    def _scalar(self, made: Pickled) -> Any:
        dtype, data = made.arguments
        return self._elements(dtype, (), data, "C")[()]

    def _elements(self, dtype: Any, shape: Any, data: Any, order: str) -> np.ndarray:
        kind = _dtype(dtype)
        shape = self._budget.shape(shape, kind.itemsize)
        flat: np.ndarray
        if not isinstance(data, list if kind.hasobject else bytes | bytearray):
            raise ForeignDumpError("an array in a form that numpy does not pickle")
        if len(data) != math.prod(shape) * (1 if kind.hasobject else kind.itemsize):
            raise ForeignDumpError("an array of another size than its elements")
        if kind.hasobject:
            flat = objects_of([self.value(item) for item in data])
        else:
            flat = np.frombuffer(bytearray(data), kind) if data else np.empty(0, kind)
            check_characters(flat)
        flat = flat.reshape(shape, order="F" if order == "F" else "C")
        return flat

    # -- torch's -----------------------------------------------------------------------------

    def _tensor(self, made: Pickled) -> torch.Tensor:
        storage, offset, size, stride, _, _, *more = made.arguments
        flat = self._storage(storage)
        if made.name.endswith("_v3"):
            flat = flat.view(torch.uint8).view(more.pop(0))
        size = self._budget.shape(self.value(size), flat.element_size())
        # as_strided refuses what is beyond the storage, which it never enlarges.
        tensor = flat.as_strided(size, tuple(stride), offset)
        if more and more[0]:
            flags = {name: bool(more[0].get(name)) for name in ("conj", "neg")}
            torch._utils.set_tensor_metadata(tensor, flags)
        return tensor

    def _storage(self, parsed: Any) -> torch.Tensor:
        if isinstance(parsed, torch.Tensor):
            return parsed
        data = parsed.arguments[0] if isinstance(parsed, Pickled) else None
        if not isinstance(data, bytes) or parsed.name != "torch.storage._load_from_bytes":
            raise ForeignDumpError("a tensor without a storage")
        if id(data) not in self._storages:
            self._storages[id(data)] = self._load_storage(data)
        return self._storages[id(data)]

    def _parameter(self, made: Pickled) -> Any:
        return self.value(made.arguments[0])

    def _typed(self, made: Pickled) -> Any:
        """A tensor that is pickled with its class and its attributes, which are dropped."""
        make, _, arguments, *_ = made.arguments
        if not isinstance(make, Name) or make.name not in _TENSORS:
            raise ForeignDumpError("a tensor in a form that torch does not pickle")
        return self._make(Pickled(make.name, arguments))

    def _strided(self, made: Pickled) -> torch.Tensor:
        """A nested tensor of the strided layout, from its parts."""
        buffer, sizes, strides, offsets = map(self.value, made.arguments)
        self._budget.spend(_ROW * len(sizes))
        parts = []
        rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
        for size, stride, offset in rows:
            self._budget.shape(size, buffer.element_size())
            parts.append(buffer.as_strided(size, stride, offset))
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)

    def _jagged(self, made: Pickled) -> torch.Tensor:
        """A nested tensor of the jagged layout, from its values and offsets."""
        parts = made.arguments[0]
        values, offsets, lengths = (
            self.value(parts.get(name)) for name in ("values", "offsets", "lengths")
        )
        return _nested(values, offsets, lengths, parts.get("_ragged_idx", 1))

    # -- batches -----------------------------------------------------------------------------

    def _made_batch(self, made: Pickled) -> Any:
        kind, state = made.arguments
        return self._make(Pickled(kind.name, (), state))

    def _tensordict(self, made: Pickled) -> TensorDict:
        state = made.state
        self._budget.spend(_ROW * len(state["_tensordict"]))
        return self._batch(
            {name: self.value(value) for name, value in state["_tensordict"].items()},
            self.value(state["_batch_size"]),
            self.value(state.get("_td_dim_names")),
        )

    def _batch(self, fields: dict[str, Any], batch_size: Any, names: Any = None) -> TensorDict:
        batch_size = self._budget.shape(batch_size, 1)
        for value in fields.values():
            check_entry(_TORCH, value, list(batch_size))
        return _TORCH.tensordict(fields, list(batch_size), None, names)

    def _wrapped(self, made: Pickled) -> NonTensorData:
        state = made.state
        data = self.value(state["non_tensordict"]["data"])
        return NonTensorData(data, batch_size=self.value(state["tensordict"]).batch_size)

    def _stack(self, made: Pickled) -> Any:
        kind = NonTensorStack if made.name.endswith("NonTensorStack") else LazyStackedTensorDict
        self._budget.spend(_ROW * len(made.state["tensordicts"]))
        parts = [self.value(part) for part in made.state["tensordicts"]]
        stack = kind(*parts, stack_dim=made.state["stack_dim"])
        stack._td_dim_name = made.state.get("_td_dim_name")
        return stack

    def _consolidated(self, made: Pickled) -> TensorDict:
        metadata, storage = map(self.value, made.arguments)
        return self._part(metadata, storage.reshape(-1).view(torch.uint8))

    def _part(self, metadata: dict[str, Any], memory: torch.Tensor) -> TensorDict:
        """A TensorDict whose tensors are ranges of one."""
        facts, fields, jagged = metadata["cls_metadata"], {}, {}
        self._budget.spend(_ROW * (len(metadata["non_tensors"]) + len(metadata["leaves"])))
        for name, (data, size, _) in metadata["non_tensors"].items():
            fields[name] = NonTensorData(data, batch_size=self._budget.shape(size, 1))
        for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
            kind = TORCH_DTYPES[dtype.removeprefix("torch.")]
            shape = self._budget.shape(shape, kind.itemsize)
            stop = min(stop, start + math.prod(shape) * kind.itemsize)  # without the padding
            tensor = memory[start:stop].view(kind).view(shape)
            if name.startswith("<NJT"):
                part, _, name = name[1:].partition(">")
                jagged[part] = tensor
                if part != "NJT_OFFSETS":  # it comes last
                    continue
                lengths = jagged.pop("NJT_LENGTHS", None)
                tensor = _nested(jagged.pop("NJT_VALUES"), tensor, lengths, 1)
            fields[name] = tensor
        known = ("cls", "cls_metadata", "non_tensors", "leaves", "size")
        for name in metadata.keys() - set(known):
            fields[name] = self._part(metadata[name], memory)
        return self._batch(fields, facts["batch_size"], facts.get("names"))

    def _data_proto(self, made: Pickled) -> DataProtoParts:
        batch, others, meta_info = made.state
        if isinstance(batch, bytes):
            self._budget.spend(_ROW * len(batch))  # what is in it besides tensors
            batch = self._load_archive(batch)
        elif isinstance(batch, tuple):
            batch = self._from_numpy(*batch)
        else:
            batch = self.value(batch)
        parts = DataProtoParts(batch, self.value(others), self.value(meta_info))
        is_batch = batch is None or isinstance(batch, TensorDict)
        if not is_batch or not isinstance(others, dict) or not isinstance(meta_info, dict):
            raise ForeignDumpError("its parts are not those of a DataProto")
        return parts

    def _from_numpy(self, batch_size: Any, _: Any, items: dict[str, Any]) -> TensorDict:
        """VERL_DATAPROTO_SERIALIZATION_METHOD=numpy (verl.protocol.serialize_tensordict)."""
        layouts = {"jagged": torch.jagged, "strided": torch.strided}
        fields = {
            name: self._dense(*item)
            if len(item) == 3
            else torch.nested.as_nested_tensor(
                [self._dense(*part) for part in item[1]], layout=layouts[item[0]]
            )
            for name, item in items.items()
        }
        return self._batch(fields, self.value(batch_size))

    def _dense(self, dtype: str, shape: Any, data: Any) -> torch.Tensor:
        self._budget.spend(_ROW)
        kind, raw = TORCH_DTYPES[dtype], self.value(data)
        shape = self._budget.shape(tuple(self.value(shape)), kind.itemsize)
        if not len(raw):
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).view(shape)

    def _size(self, made: Pickled) -> torch.Size:
        (sizes,) = made.arguments
        self._budget.spend(8 * len(sizes))
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ForeignDumpError("a shape that is not a tuple of sizes")
        return torch.Size(sizes)

    def _image(self, made: Pickled) -> Any:
        from PIL import Image

        info, mode, size, palette, data, *_ = made.state
        width, height = self._budget.shape(size, 4)
        if not isinstance(data, bytes) or width * height > 8 * len(data):
            raise ForeignDumpError(f"an image of {width}x{height} pixels without their bytes")
        image = Image.frombytes(mode, (width, height), data)
        if palette and mode in ("L", "LA", "P", "PA"):
            image.putpalette(palette)
        image.info.update(self.value(info))
        return image


def _nested(values: Any, offsets: Any, lengths: Any, ragged: Any) -> torch.Tensor:
    check_jagged(_TORCH, values, offsets, lengths, ragged)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def _dtype(parsed: Any) -> np.dtype:
    """The dtype of a code, in a byte order, of a unit; nothing else in its state counts."""
    if not isinstance(parsed, Pickled) or parsed.name != "numpy.dtype":
        raise ForeignDumpError("an array in a form that numpy does not pickle")
    code = parsed.arguments[0]
    _, order, subarray, names, fields, *layout = parsed.state
    if not _DTYPE.fullmatch(code) or order not in ("<", ">", "|", "="):
        raise ForeignDumpError(f"an array of dtype {code!r:.60}")
    if not subarray is names is fields is None:
        raise ForeignDumpError("an array of structures")
    if code in ("m8", "M8"):
        unit, count, _, _ = layout[3][1]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        if unit != "generic":
            if not _UNIT.fullmatch(unit) or type(count) is not int:
                raise ForeignDumpError("a time of an unknown unit")
            code = f"{code}[{count}{unit}]"
    return np.dtype(f"{order}{code}")


_TENSORS: Mapping[str, Callable[[Rebuilder, Pickled], Any]] = {
    "torch._utils._rebuild_tensor_v2": Rebuilder._tensor,
    "torch._utils._rebuild_tensor_v3": Rebuilder._tensor,
    "torch._utils._rebuild_parameter": Rebuilder._parameter,
    "torch._utils._rebuild_nested_tensor": Rebuilder._strided,
    "torch.nested._internal.nested_tensor._rebuild_njt": Rebuilder._jagged,
}
_REBUILD: Mapping[str, Callable[[Rebuilder, Pickled], Any]] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": Rebuilder._typed,
    "torch.Size": Rebuilder._size,
    "numpy._core.multiarray._reconstruct": Rebuilder._array,
    "numpy._core.multiarray.scalar": Rebuilder._scalar,
    "numpy._core.numeric._frombuffer": Rebuilder._buffered,
    "tensordict._reductions._make_td": Rebuilder._made_batch,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": Rebuilder._consolidated,
    "tensordict._td.TensorDict": Rebuilder._tensordict,
    "tensordict._lazy.LazyStackedTensorDict": Rebuilder._stack,
    "tensordict.tensorclass.NonTensorStack": Rebuilder._stack,
    "tensordict.tensorclass.NonTensorData": Rebuilder._wrapped,
    "verl.protocol.DataProto": Rebuilder._data_proto,
    "PIL.Image.Image": Rebuilder._image,
}
# These are named where they decide nothing, such as the class of a tensor.
_NAMED_ONLY = (
    "numpy.ndarray", "numpy.dtype", "torch.Tensor", "torch.nn.parameter.Parameter",
    "torch.nested._internal.nested_tensor.NestedTensor", "torch.device",
    "torch.serialization._get_layout", "torch._dynamo.decorators._DimRange",
    "torch.storage._load_from_bytes",
)  # fmt: skip
NAMES = (*_REBUILD, *_NAMED_ONLY, *STORAGES)
"""All that a pickle of rollouts may name."""
