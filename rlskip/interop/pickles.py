"""Reads verl's dumps, which are pickles, and archives of torch.save.

Both are parsed by :mod:`rlskip.interop.unpickle`, at every level: the file itself, the archive of
torch.save within it, and the storages within that. Neither pickle's C code nor torch's own readers
are used.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlskip.batch.tables import DataProtoParts
from rlskip.errors import RlskipError
from rlskip.interop.bounds import Budget, Expansion, ForeignDumpError
from rlskip.interop.rebuild import NAMES, STORAGES, Rebuilder
from rlskip.interop.unpickle import Name, Unpickler


class _Reader:
    """Reads one file, and all that is nested in it, on one budget."""

    def __init__(self, size: int) -> None:
        self._budget = Budget(size)

    def pickle(self, file: io.BytesIO, storage: Callable[[Any], torch.Tensor] | None = None) -> Any:
        parsed = Unpickler(file, NAMES, self._budget, storage).load()
        return Rebuilder(self._budget, self._pickled_storage, self.archive).value(parsed)

    def archive(self, data: bytes) -> Any:
        """What torch.save wrote: a zip of a pickle and of the memory of its tensors."""
        # torch would read any other beginning in an older format, such as a tar file.
        if data[:4] != b"PK\x03\x04":
            raise ForeignDumpError("it is not an archive of torch.save")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
            sizes = {info.filename: info.file_size for info in records}
            if any(name.endswith("/constants.pkl") or "/code/" in name for name in sizes):
                raise ForeignDumpError("an archive of TorchScript, which holds code")
            packed = any(info.compress_type for info in records)
            if packed or len(sizes) < len(records) or sum(sizes.values()) > len(data):
                raise ForeignDumpError("an archive in a form that torch.save does not write")
            (main,) = (name for name in sizes if name.endswith("/data.pkl"))
            root = main.removesuffix("data.pkl")
            if sizes.get(f"{root}byteorder") and archive.read(f"{root}byteorder") != b"little":
                raise ForeignDumpError("tensors in another byte order")
            storages: dict[str, torch.Tensor] = {}

            def storage(pid: Any) -> torch.Tensor:
                kind, key, count = _reference(pid)
                if key not in storages:
                    storages[key] = _storage(archive.read(f"{root}data/{key}"), kind)
                if len(storages[key]) != count:
                    raise ForeignDumpError("a storage of another size than its record")
                return storages[key]

            return self.pickle(io.BytesIO(archive.read(main)), storage)

    def _pickled_storage(self, data: bytes) -> torch.Tensor:
        """A storage in a plain pickle: torch.save's older form, a stream of five pickles."""
        file = io.BytesIO(data)
        magic, version, system = (Unpickler(file, (), self._budget).load() for _ in range(3))
        found = Unpickler(file, STORAGES, self._budget, _reference).load()
        keys = Unpickler(file, (), self._budget).load()
        if magic != _MAGIC or version != 1001 or system.get("little_endian") is not True:
            raise ForeignDumpError("a storage in a form that torch does not pickle")
        kind, key, count = found
        if keys != [key] or int.from_bytes(file.read(8), "little") != count:
            raise ForeignDumpError("a storage in a form that torch does not pickle")
        content = file.read()
        if len(content) != count * kind.itemsize:
            raise ForeignDumpError("a storage of another size than its record")
        return _storage(content, kind)


_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save's older form


def _reference(pid: Any) -> tuple[torch.dtype, str, int]:
    """Type, name and number of elements of the storage that a pickle refers to."""
    word, name, key, _, count, *_ = pid
    dtype = STORAGES.get(name.name) if isinstance(name, Name) else None
    if word != "storage" or dtype is None or type(key) is not str or type(count) is not int:
        raise ForeignDumpError("a storage in a form that torch does not pickle")
    return dtype, key, count


def _storage(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype)


# -- the two files -----------------------------------------------------------------------


def read_data_proto(path: Path) -> DataProtoParts:
    """Read verl's ``gen_batch.dp``, in either of its serialisations.

    Raises
    ------
    ForeignDumpError
        It is not a DataProto, names something that no DataProto needs, or takes too much memory.
    """
    with named_errors(path):
        data = path.read_bytes()
        found = _Reader(len(data)).pickle(io.BytesIO(data))
        if not isinstance(found, DataProtoParts):
            raise ForeignDumpError("it is a pickle, but not of a DataProto")
        return found


def read_archive(path: Path) -> Any:
    """Read what torch.save wrote: containers, numbers, text, tensors and arrays.

    Raises
    ------
    ForeignDumpError
        As :func:`read_data_proto` does.
    """
    with named_errors(path):
        data = path.read_bytes()
        found = _Reader(len(data)).archive(data)
        Expansion(Budget(len(data))).charge(found)
        return found


def read_queue_batch(path: Path) -> dict[str, Any]:
    """Read verl's ``tq_batch.pt``: `tensordict`, `tags`, `keys`, `global_steps`.

    Raises
    ------
    ForeignDumpError
        As :func:`read_data_proto` does.
    """
    with named_errors(path):
        found = read_archive(path)
        if not isinstance(found, dict) or not {"tensordict", "tags", "keys"} <= found.keys():
            raise ForeignDumpError("it does not hold a sampled batch of a queue")
        rows, tags, keys = found["tensordict"], found["tags"], found["keys"]
        fits = isinstance(rows, TensorDict) and len(rows) == len(tags) == len(keys)
        if not fits or not all(isinstance(tag, dict) for tag in tags):
            raise ForeignDumpError("its rows, tags and keys differ in number")
        return {**found, "keys": [str(key) for key in keys]}


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
