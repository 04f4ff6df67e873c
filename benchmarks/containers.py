"""Other containers for the same narrowed arrays, next to which ``benchmarks.store`` measures ours.

frames       one Blosc2 frame an array, which Blosc2 opens without a check of what is in it
arrow        Arrow IPC with zstd, one stream an array; narrowed integers, which it cannot shuffle
safetensors  narrowed integers, not compressed

Each is synced, as ours is; none but frames has checksums. One whose library is not installed is
left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import torch
import xxhash

from rlskip._copies import fresh, share
from rlskip.format import chunks
from rlskip.format.chunks import CHUNK, Array

Write = Callable[[Path, Sequence[np.ndarray]], None]
Read = Callable[[Path, Sequence[np.ndarray]], list[np.ndarray]]


def known() -> dict[str, tuple[Write, Read]]:
    """The containers whose library is installed: functions to write and to read arrays."""
    found: dict[str, tuple[Write, Read]] = {"frames": (write_frames, read_frames)}
    for name, module in (("arrow", "pyarrow"), ("safetensors", "safetensors.torch")):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        found[name] = _arrow(library) if name == "arrow" else _safetensors(library)
    return found


def _narrowed(arrays: Sequence[np.ndarray]) -> list[tuple[Array, str]]:
    """The arrays cut into chunks, and what each is stored as."""
    kinds = [a.dtype.kind if a.dtype.kind in "iu" else "x" for a in arrays]
    cut = [Array.of(a, f"{k}{a.itemsize}") for k, a in zip(kinds, arrays, strict=True)]
    return [(array, chunks.narrowest(array)) for array in cut]


def _columns(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    stored = [spec for _, spec in _narrowed(arrays)]
    return [a if spec[0] == "x" else a.astype(spec) for a, spec in zip(arrays, stored, strict=True)]


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_frames(file: Path, arrays: Sequence[np.ndarray]) -> None:
    cut = _narrowed([a if a.dtype.kind in "iu" else a.view(f"u{a.itemsize}") for a in arrays])
    jobs = [(part, spec) for array, spec in cut for part in array.parts]
    packed = iter(share(lambda job: chunks.pack(*job), jobs))
    with file.open("wb") as out:
        for array, spec in cut:
            size = int(spec[1])
            frame = blosc2.SChunk(
                chunksize=CHUNK // int(array.spec[1]) * size, cparams={"typesize": size}
            )
            for _ in array.parts:
                frame.append_chunk(next(packed))
            data = frame.to_cframe()
            digest = xxhash.xxh3_128_digest(data)
            out.write(len(data).to_bytes(8, "little") + spec.encode() + digest + data)
    _sync(file)


def read_frames(file: Path, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    found, jobs = [], []
    with file.open("rb") as source:
        for array in like:
            size, spec, digest = (source.read(n) for n in (8, 2, 16))
            data = source.read(int.from_bytes(size, "little"))
            assert xxhash.xxh3_128_digest(data) == digest
            frame = blosc2.schunk_from_cframe(data)
            out = fresh(array.nbytes)
            whole = spec.decode()[:1] + str(array.itemsize)
            jobs += [
                (frame.get_chunk(i), spec.decode(), out[i * CHUNK : (i + 1) * CHUNK], whole)
                for i in range(frame.nchunks)
            ]
            found.append(out.view(array.dtype))
    share(lambda job: chunks.unpack(*job), jobs)
    return found


def _arrow(pyarrow: Any) -> tuple[Write, Read]:
    ipc = importlib.import_module("pyarrow.ipc")

    def write(file: Path, arrays: Sequence[np.ndarray]) -> None:
        options = ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.OSFile(str(file), "wb") as out:
            for column in _columns(arrays):
                batch = pyarrow.record_batch([pyarrow.array(column)], names=["values"])
                with ipc.new_stream(out, batch.schema, options=options) as stream:
                    stream.write_batch(batch)
        _sync(file)

    def read(file: Path, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        with pyarrow.OSFile(str(file), "rb") as source:
            tables = [ipc.open_stream(source).read_all() for _ in like]
        columns = [table.column(0).chunk(0).to_numpy() for table in tables]
        return [c.astype(a.dtype, copy=False) for c, a in zip(columns, like, strict=True)]

    return write, read


def _safetensors(library: Any) -> tuple[Write, Read]:
    def write(file: Path, arrays: Sequence[np.ndarray]) -> None:
        columns = enumerate(_columns(arrays))
        library.save_file({str(i): torch.from_numpy(column) for i, column in columns}, file)
        _sync(file)

    def read(file: Path, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = library.load_file(file)
        return [found[str(i)].numpy().astype(a.dtype, copy=False) for i, a in enumerate(like)]

    return write, read
