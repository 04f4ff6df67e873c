"""verl's dumps are pickles: read through a list of what such dumps need, and nothing else.

A pickle names functions to call. Here a name that is not on the list ends the reading before
anything is called, at every level: the file itself, the tensors within it (a zip of torch.save
with a pickle of its own), and the storages within those.

The list holds constructors of plain data only. `torch.load` runs with this module's unpickler
in the place of Python's, so there is one list and not two.

Calling is not all: numpy and torch take addresses and raw memory where they trust the caller.
So their types can be named here but not called, arrays and dtypes are made by functions of this
module, and the state that a pickle gives to an object is looked at before it is set.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from rlskip.errors import RlskipError


class ForeignDumpError(RlskipError, ValueError):
    """A file of another trainer that cannot be read, or must not be."""


class _PickledDataProto:
    """What a pickle calls ``verl.protocol.DataProto``; its state is kept as it came."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _storage(data: bytes) -> Any:
    """torch.storage._load_from_bytes, which would read anything."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _latin1(text: str, encoding: str) -> bytes:
    """_codecs.encode as numpy uses it; any other encoding would import a codec."""
    if encoding != "latin1":
        raise ForeignDumpError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


class _Named:
    """What a pickle has in the place of a type that it may name and must not call.

    ``numpy.ndarray(shape, "O", bytes)`` takes the bytes for addresses, ``torch.Tensor`` and
    ``torch.UntypedStorage`` have keyword arguments that are addresses.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class _NamedStorage(_Named):
    dtype = torch.uint8  # all that torch.load asks the type of a storage for


_NDARRAY, _TENSOR = _Named("numpy.ndarray"), _Named("torch.Tensor")
_PARAMETER, _NESTED = _Named("torch.nn.Parameter"), _Named("NestedTensor")
_DTYPE = re.compile(r"[biufcSUO]\d{1,9}|[mM]8")


def _dtype(code: str, align: Any = False, copy: Any = True) -> np.dtype:
    """numpy.dtype, of the codes that pickled arrays have; nothing structured."""
    if not _DTYPE.fullmatch(code):
        raise ForeignDumpError(f"an array of dtype {code!r}")
    # A copy: numpy's own would not take the byte order that follows.
    made: np.dtype = np.dtype(code, False, True)  # type: ignore[call-overload]
    return made


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """numpy's: an empty array, of which the state that follows makes another."""
    if kind is not _NDARRAY or shape != (0,):
        raise ForeignDumpError("an array that numpy would not have pickled so")
    return np.empty(0, np.int8)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """numpy's _frombuffer (protocol 5), from memory that nothing else in the pickle can move."""
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, np.dtype):
        raise ForeignDumpError("an array that numpy would not have pickled so")
    if dtype.hasobject:
        raise ForeignDumpError("an array of objects made from bytes, which would be addresses")
    flat: np.ndarray = np.frombuffer(data, dtype).copy()
    made: np.ndarray = flat.reshape(shape, order="F" if order == "F" else "C")
    return made


def _rebuild(make: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
    """torch's _rebuild_from_type_v2, which would call anything."""
    kinds = {_TENSOR: torch.Tensor, _PARAMETER: torch.nn.Parameter, _NESTED: _nested_type()}
    if kind not in kinds or getattr(make, "__name__", None) not in _REBUILD:
        raise ForeignDumpError("a tensor that torch would not have pickled so")
    rebuilt = torch._tensor._rebuild_from_type_v2(make, kinds[kind], arguments, state)
    assert isinstance(rebuilt, torch.Tensor)
    return rebuilt


def _nested_type() -> Any:
    return import_module("torch.nested._internal.nested_tensor").NestedTensor


_REBUILD = ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_nested_tensor", "_rebuild_njt")
_OURS: dict[tuple[str, str], Any] = {
    ("verl.protocol", "DataProto"): _PickledDataProto,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("_codecs", "encode"): _latin1,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("torch", "Tensor"): _TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild,
    ("torch.nested._internal.nested_tensor", "NestedTensor"): _NESTED,
    ("torch.nn.parameter", "Parameter"): _PARAMETER,
    ("torch.storage", "UntypedStorage"): _NamedStorage("torch.UntypedStorage"),
}
_ADMITTED: dict[str, tuple[str, ...]] = {
    "builtins": ("set", "frozenset", "bytes", "bytearray", "complex", "slice", "range"),
    "collections": ("OrderedDict", "defaultdict"),
    "numpy._core.multiarray": ("scalar",),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_nested_tensor"),
    "torch._dynamo.decorators": ("_DimRange",),
    "torch.nested._internal.nested_tensor": ("_rebuild_njt",),
    "torch.serialization": ("_get_layout",),
    "tensordict._reductions": ("_make_td", "_rebuild_tensordict_files_consolidated"),
    "tensordict._td": ("TensorDict",),
    "tensordict._lazy": ("LazyStackedTensorDict",),
    "tensordict.tensorclass": ("NonTensorData", "NonTensorStack"),
    "PIL.Image": ("Image",),
}
# The same under the names that older versions gave it.
_RENAMED = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
# Whose instances take a state as it comes. Arrays and dtypes do once it has been looked at.
_STATEFUL = {
    (_PickledDataProto.__module__, _PickledDataProto.__qualname__),
    ("PIL.Image", "Image"),
    ("tensordict._lazy", "LazyStackedTensorDict"),
    ("tensordict._td", "TensorDict"),
    ("tensordict.tensorclass", "NonTensorData"),
    ("tensordict.tensorclass", "NonTensorStack"),
    ("torch._dynamo.decorators", "_DimRange"),
}


_Python: Any = pickle._Unpickler  # written in Python: that in C shows nobody the state it sets


class Unpickler(_Python):  # type: ignore[misc]
    """Python's, for which only what is listed above exists."""

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        if (module, name) in _OURS:
            return _OURS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ADMITTED.get(module, ()):
            return getattr(import_module(_today(module)), name)
        raise ForeignDumpError(
            f"it names {module}.{name}, which no dump of rollouts needs: nothing of it was run",
            remedy="if you wrote this file yourself, drop that field and dump again",
        )

    def load_build(self) -> None:
        state, made = self.stack[-1], self.stack[-2]
        if type(made) is np.ndarray:
            _check_array(made, state)
        elif isinstance(made, np.dtype):
            _check_dtype(made, state)
        elif (type(made).__module__, type(made).__qualname__) not in _STATEFUL:
            raise ForeignDumpError(f"it alters a {type(made).__qualname__}")
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_Python.dispatch, pickle.BUILD[0]: load_build}


def _check_array(made: np.ndarray, state: Any) -> None:
    """An array takes a state once, while nothing looks into its memory; addresses never."""
    _, shape, dtype, _, data = state
    if made.size or made.base is not None or not isinstance(dtype, np.dtype):
        raise ForeignDumpError("an array that numpy would not have pickled so")
    if dtype.hasobject:
        if not isinstance(data, list):
            raise ForeignDumpError("an array of objects made from bytes, which would be addresses")
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(data):
            raise ForeignDumpError("an array of more objects than there are")


def _check_dtype(made: np.dtype, state: Any) -> None:
    """Nothing may change but the byte order, and the unit of a time."""
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
        raise ForeignDumpError(f"a dtype {made} that is none")


def load(file: IO[bytes], **kwargs: Any) -> Any:
    """As pickle.load; torch.load calls it, too."""
    return Unpickler(file, **kwargs).load()


def _today(module: str) -> str:
    """numpy 1 keeps under numpy.core what numpy 2 keeps under numpy._core."""
    if module.startswith("numpy._core") and not hasattr(np, "_core"):
        return module.replace("numpy._core", "numpy.core")
    return module


# -- the two files -----------------------------------------------------------------------


def read_data_proto(path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """verl's ``gen_batch.dp``, in either of its serialisations.

    Returns
    -------
    (batch, non_tensor_batch, meta_info)
        A TensorDict or None, and two dicts.

    Raises
    ------
    ForeignDumpError
        It is no DataProto, or it names what none needs.
    """
    with open(path, "rb") as file:
        found = _reading(path, lambda: load(file))
    state = getattr(found, "state", None)
    if not isinstance(found, _PickledDataProto) or not isinstance(state, tuple) or len(state) != 3:
        raise ForeignDumpError("it is a pickle, but of no DataProto", str(path))
    packed, others, meta_info = state
    if isinstance(packed, bytes):
        batch = _reading(path, lambda: _torch_load(io.BytesIO(packed)))
    elif isinstance(packed, tuple):
        batch = _reading(path, lambda: _from_numpy(*packed))
    else:
        batch = packed
    is_batch = batch is None or isinstance(batch, TensorDict)
    if not (is_batch and isinstance(others, dict) and isinstance(meta_info, dict)):
        raise ForeignDumpError("its parts are not those of a DataProto", str(path))
    return batch, others, meta_info


def read_queue_batch(path: Path) -> dict[str, Any]:
    """verl's ``tq_batch.pt``: `tensordict`, `tags`, `keys`, `global_steps`; raises as above."""
    with open(path, "rb") as file:
        found = _reading(path, lambda: _torch_load(file))
    names = {"tensordict", "tags", "keys"}
    if not isinstance(found, dict) or not names <= found.keys():
        raise ForeignDumpError("it holds no sampled batch of a queue", str(path))
    rows, tags, keys = found["tensordict"], found["tags"], found["keys"]
    fits = isinstance(rows, TensorDict) and len(rows) == len(tags) == len(keys)
    if not fits or not all(isinstance(tag, dict) for tag in tags):
        raise ForeignDumpError("its rows, tags and keys are not equally many", str(path))
    return {**found, "keys": [str(key) for key in keys]}


def _torch_load(file: IO[bytes]) -> Any:
    # Whatever begins otherwise torch would read in an older way, tar files among them.
    if file.read(4) != b"PK\x03\x04" or not zipfile.is_zipfile(file):
        raise ForeignDumpError("no archive of torch.save")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise ForeignDumpError("an archive of TorchScript, which holds code")
    file.seek(0)
    this = import_module(__name__)
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=this)


def _from_numpy(batch_size: Any, device: Any, items: dict[str, Any]) -> TensorDict:
    """VERL_DATAPROTO_SERIALIZATION_METHOD=numpy (verl.protocol.serialize_tensordict)."""
    return TensorDict(
        {
            name: _tensor(*item)
            if len(item) == 3
            else torch.nested.as_nested_tensor(
                [_tensor(*part) for part in item[1]],
                layout={"jagged": torch.jagged, "strided": torch.strided}[item[0]],
            )
            for name, item in items.items()
        },
        batch_size=batch_size,
    )


def _tensor(dtype: str, shape: Any, data: Any) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ForeignDumpError(f"{dtype!r} is no dtype")
    if not len(data):
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(tuple(shape))


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns; whatever it meets in a file of another's ends in one error."""
    try:
        return read()
    except ForeignDumpError as error:
        raise ForeignDumpError(error.what, str(path), error.remedy) from error
    except (MemoryError, OSError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ForeignDumpError(
            f"it cannot be read: {type(error).__name__}: {reason}", str(path)
        ) from error
