"""verl's dumps are pickles: read through a list of what such dumps need, and nothing else.

A pickle names functions to call. Here a name that is not on the list ends the reading before
anything is called, at every level: the file itself, the tensors within it (a zip of torch.save
with a pickle of its own), and the storages within those.

The list holds constructors of plain data only. `torch.load` runs with this module's unpickler
in the place of Python's, so there is one list and not two.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

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


_OURS: dict[tuple[str, str], Callable[..., Any]] = {
    ("verl.protocol", "DataProto"): _PickledDataProto,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("_codecs", "encode"): _latin1,
}
_ADMITTED: dict[str, tuple[str, ...]] = {
    "builtins": ("set", "frozenset", "bytearray", "complex", "slice", "range"),
    "collections": ("OrderedDict", "defaultdict"),
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "torch": ("Size", "device", "Tensor"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_nested_tensor"),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch._dynamo.decorators": ("_DimRange",),
    "torch.nested._internal.nested_tensor": ("NestedTensor", "_rebuild_njt"),
    "torch.nn.parameter": ("Parameter",),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("UntypedStorage",),
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


class Unpickler(pickle.Unpickler):
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
