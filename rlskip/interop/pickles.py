"""Reads verl's dumps, which are pickles, and constructs only what such dumps need.

A pickle names functions to call. A name that is not in the table of
:mod:`rlskip.interop.constructors` ends the reading before anything is called, at every level: the
file itself, the archive of torch.save within it, and the storages within that. The unpickler below
reads all levels; neither pickle's C code nor torch's own readers are used.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from rlskip.errors import RlskipError
from rlskip.interop.bounds import BATCHES, Budget, ForeignDumpError, check_shape, check_value
from rlskip.interop.constructors import (
    Constructors,
    DimRange,
    Name,
    PickledDataProto,
    Storage,
    check_keys,
    set_batch,
    set_dtype,
    set_image,
)

_Python: Any = pickle._Unpickler  # the one in C does not show the states that it sets
_DICTS = (dict, OrderedDict, defaultdict)
_CHUNK = 1 << 20


class _Bounded:
    """A file that never reads past its end: a length in a pickle allocates nothing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        here = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(here)
        self.readline = file.readline

    def read(self, n: int) -> bytes:
        return self._file.read(max(0, min(n, self._size - self._file.tell())))


class Unpickler(_Python):  # type: ignore[misc]
    """Python's unpickler, limited to the names of `constructors`; only plain containers grow.

    `storage` finds the storage that an archive of torch refers to.
    """

    def __init__(
        self, file: Any, reader: _Reader, storage: Callable[[Any], Storage] | None
    ) -> None:
        super().__init__(file)
        self._constructors = reader.constructors
        self._budget = reader.budget
        self._storage = storage
        self._built: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self._constructors.find(module, name)

    def get_extension(self, code: int) -> None:
        raise ForeignDumpError("a name by number, which only its writer can look up")

    def persistent_load(self, pid: Any) -> Storage:
        if self._storage is None:
            raise ForeignDumpError("a reference to a storage outside an archive of torch")
        return self._storage(pid)

    # -- calls ---------------------------------------------------------------------------

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        self.append(self._call(kind, tuple(arguments)))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _call(self, name: Any, arguments: Any) -> Any:
        if not isinstance(name, Name) or name.call is None or type(arguments) is not tuple:
            raise ForeignDumpError(f"a call of {getattr(name, 'name', type(name).__name__)}")
        sized = (list, tuple, dict, str, bytes, bytearray)
        self._budget.spend(sum(len(one) for one in arguments if isinstance(one, sized)))
        return name.call(*arguments)

    def load_newobj(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or name.new is None or arguments != ():
            raise ForeignDumpError(f"a call of {getattr(name, 'name', type(name).__name__)}")
        self.append(name.new())

    def load_newobj_ex(self) -> None:
        raise ForeignDumpError("a call with keywords")

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if id(made) in self._built:
            raise ForeignDumpError("an object that is given two states")
        self._built[id(made)] = made
        if type(made) is np.ndarray:
            self._constructors.set_array(made, state)
        elif isinstance(made, np.dtype):
            set_dtype(made, state)
        elif isinstance(made, PickledDataProto):
            made.state = state
        elif isinstance(made, BATCHES):
            set_batch(made, state)
        elif type(made).__module__ == "PIL.Image":
            set_image(made, state, self._budget)
        elif not isinstance(made, DimRange):
            raise ForeignDumpError(f"it changes a {getattr(made, 'name', type(made).__name__)}")

    # -- containers ----------------------------------------------------------------------

    def _grow(self, kinds: tuple[type, ...], made: Any) -> None:
        if type(made) not in kinds:
            raise ForeignDumpError(f"it changes a {type(made).__name__}")

    def load_append(self) -> None:
        self._grow((list,), self.stack[-2])
        super().load_append()

    def load_appends(self) -> None:
        self._grow((list,), self.metastack[-1][-1])
        super().load_appends()

    def load_setitem(self) -> None:
        self._grow(_DICTS, self.stack[-3])
        check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._grow(_DICTS, self.metastack[-1][-1])
        check_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        check_keys(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        self._grow((set,), self.metastack[-1][-1])
        check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        check_keys(self.stack)
        super().load_frozenset()

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch: ClassVar[dict[int, Any]] = {
        **_Python.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


class _Reader:
    """Reads one file, and all that is nested in it, on one budget."""

    def __init__(self, size: int) -> None:
        self.budget = Budget(size)
        self.constructors = Constructors(self.budget, self._pickled_storage)

    def pickle(self, file: IO[bytes], storage: Callable[[Any], Storage] | None = None) -> Any:
        return Unpickler(_Bounded(file), self, storage).load()

    def archive(self, file: IO[bytes]) -> Any:
        """What torch.save wrote: a zip of a pickle and of the memory of its tensors."""
        # torch would read any other beginning in an older format, such as a tar file.
        if file.read(4) != b"PK\x03\x04" or not zipfile.is_zipfile(file):
            raise ForeignDumpError("it is not an archive of torch.save")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if any(name.endswith("/constants.pkl") or "/code/" in name for name in sizes):
                raise ForeignDumpError("an archive of TorchScript, which holds code")
            packed = any(info.compress_type for info in archive.infolist())
            doubled = len(sizes) < len(archive.infolist())
            if packed or doubled or sum(sizes.values()) > self.budget.size:
                raise ForeignDumpError("an archive in a form that torch.save does not write")
            (main,) = (name for name in sizes if name.endswith("/data.pkl"))
            root = main.removesuffix("data.pkl")
            if sizes.get(f"{root}byteorder") and archive.read(f"{root}byteorder") != b"little":
                raise ForeignDumpError("tensors in another byte order")
            storages: dict[str, Storage] = {}

            def storage(pid: Any) -> Storage:
                kind, key, count = _reference(pid)
                if key not in storages:
                    with archive.open(f"{root}data/{key}") as record:
                        storages[key] = _read_storage(record, sizes[f"{root}data/{key}"], kind)
                if len(storages[key].flat) != count:
                    raise ForeignDumpError("a storage of another size than its record")
                return storages[key]

            return self.pickle(io.BytesIO(archive.read(main)), storage)

    def _pickled_storage(self, data: bytes) -> Storage:
        """A storage in a plain pickle: torch.save's older form, a stream of five pickles."""
        self.budget.parse(len(data))
        file = io.BytesIO(data)
        wanted: dict[str, tuple[torch.dtype, int]] = {}

        def storage(pid: Any) -> Storage:
            kind, key, count = _reference(pid)
            wanted[key] = kind, count
            return Storage(torch.empty(0))

        magic, version, system = (self.pickle(file) for _ in range(3))
        if magic != _MAGIC or version != 1001 or system.get("little_endian") is not True:
            raise ForeignDumpError("a storage in a form that torch does not pickle")
        found, keys = self.pickle(file, storage), self.pickle(file)
        if not isinstance(found, Storage) or keys != list(wanted) or len(keys) != 1:
            raise ForeignDumpError("a storage in a form that torch does not pickle")
        kind, count = wanted[keys[0]]
        rest = len(data) - file.tell() - 8
        if int.from_bytes(file.read(8), "little") != count or count * kind.itemsize != rest:
            raise ForeignDumpError("a storage of another size than its record")
        return _read_storage(file, rest, kind)


_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save's older form


def _reference(pid: Any) -> tuple[torch.dtype, str, int]:
    """Type, name and number of elements of the storage that a pickle refers to."""
    word, name, key, _, count, *_ = pid
    dtype = name.dtype if isinstance(name, Name) else None
    if word != "storage" or dtype is None or type(key) is not str or type(count) is not int:
        raise ForeignDumpError("a storage in a form that torch does not pickle")
    return dtype, key, count


def _read_storage(file: IO[bytes], nbytes: int, dtype: torch.dtype) -> Storage:
    memory = torch.empty(nbytes, dtype=torch.uint8)
    view = memory.numpy()
    for start in range(0, nbytes, _CHUNK):
        part = view[start : start + _CHUNK]
        chunk = file.read(len(part))
        if len(chunk) < len(part):
            raise ForeignDumpError("a storage that ends early")
        part[:] = np.frombuffer(chunk, np.uint8)
    return Storage(memory.view(dtype))


# -- the two files -----------------------------------------------------------------------


def read_data_proto(path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Read verl's ``gen_batch.dp``, in either of its serialisations.

    Returns
    -------
    (batch, non_tensor_batch, meta_info)
        A TensorDict or None, and two dicts.

    Raises
    ------
    ForeignDumpError
        It is not a DataProto, names something that no DataProto needs, or takes too much memory.
    """
    with _reading(path) as (file, reader):
        found = reader.pickle(file)
        state: Any = getattr(found, "state", None)
        is_state = isinstance(state, tuple) and len(state) == 3
        if not isinstance(found, PickledDataProto) or not is_state:
            raise ForeignDumpError("it is a pickle, but not of a DataProto")
        batch, others, meta_info = state
        if isinstance(batch, bytes):
            batch = reader.archive(io.BytesIO(batch))
        elif isinstance(batch, tuple):
            batch = _from_numpy(reader.budget, *batch)
        is_batch = batch is None or isinstance(batch, TensorDict)
        if not (is_batch and isinstance(others, dict) and isinstance(meta_info, dict)):
            raise ForeignDumpError("its parts are not those of a DataProto")
        check_value([batch, others, meta_info], reader.budget)
        return batch, others, meta_info


def read_queue_batch(path: Path) -> dict[str, Any]:
    """Read verl's ``tq_batch.pt``: `tensordict`, `tags`, `keys`, `global_steps`.

    Raises
    ------
    ForeignDumpError
        As :func:`read_data_proto` does.
    """
    with _reading(path) as (file, reader):
        found = reader.archive(file)
        if not isinstance(found, dict) or not {"tensordict", "tags", "keys"} <= found.keys():
            raise ForeignDumpError("it does not hold a sampled batch of a queue")
        rows, tags, keys = found["tensordict"], found["tags"], found["keys"]
        check_value(found, reader.budget)
        fits = isinstance(rows, TensorDict) and len(rows) == len(tags) == len(keys)
        if not fits or not all(isinstance(tag, dict) for tag in tags):
            raise ForeignDumpError("its rows, tags and keys differ in number")
        return {**found, "keys": [str(key) for key in keys]}


def _from_numpy(budget: Budget, batch_size: Any, device: Any, items: dict[str, Any]) -> TensorDict:
    """VERL_DATAPROTO_SERIALIZATION_METHOD=numpy (verl.protocol.serialize_tensordict)."""
    return TensorDict(
        {
            name: _tensor(budget, *item)
            if len(item) == 3
            else torch.nested.as_nested_tensor(
                [_tensor(budget, *part) for part in item[1]],
                layout={"jagged": torch.jagged, "strided": torch.strided}[item[0]],
            )
            for name, item in items.items()
        },
        batch_size=batch_size,
    )


def _tensor(budget: Budget, dtype: str, shape: Any, data: Any) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or not isinstance(data, bytes | bytearray | np.ndarray):
        raise ForeignDumpError(f"{dtype!r} is not a dtype")
    shape = check_shape(tuple(shape), budget, kind.itemsize)
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[IO[bytes], _Reader]]:
    """A file, opened, and its reader."""
    with named_errors(path), open(path, "rb") as file:
        try:
            yield file, _Reader(os.fstat(file.fileno()).st_size)
        except OSError as error:  # zipfile seeks where the file says
            raise ForeignDumpError(f"it cannot be read: {error}") from error


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turn every error in the content of a file into a ForeignDumpError."""
    try:
        yield
    except ForeignDumpError as error:
        raise ForeignDumpError(error.what, str(path), error.remedy) from error
    except (OSError, RlskipError):
        raise
    except (Exception, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise ForeignDumpError(
            f"it cannot be read: {type(error).__name__}: {reason}", str(path)
        ) from error
