"""Hostile dumps: no input runs code, leaves the directory, or takes memory at will."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlskip.format import chunks
from rlskip.format.container import Reader
from rlskip.store import CorruptDumpError, DumpError, StepStore

Forge = Callable[..., None]

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a dump with something of everything."""
    store = StepStore(tmp_path_factory.mktemp("sound"))
    offsets = torch.tensor([0, 2, 5])
    batch = TensorDict({"ids": torch.arange(600).reshape(2, 300)}, [2])
    batch["jagged"] = torch.nested.nested_tensor_from_jagged(torch.randn(5, 3), offsets)
    batch["text"] = NonTensorStack("a", "b")
    store.save(
        1,
        {
            "batch": batch,
            "strings": [f"s{i}" for i in range(9)],
            "runs": [[1, 2, 3], [4] * 9],
            "array": np.array([[1.5, 2.5]]),
            "objects": np.array([None, "x"], dtype=object),
            "text": np.array(["ab", "c"]),
            "scalars": (1, 2.5, float("nan"), 2**70, 1j, b"bytes", np.float32(1), torch.float32),
        },
    )
    return {file.name: file.read_bytes() for file in (store.directory / "1").iterdir()}


def _nodes(tree: Any, path: tuple = ()) -> list[tuple]:
    found = [path]
    if isinstance(tree, list | dict):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += _nodes(value, (*path, key))
    return found


def _replace(index: dict[str, Any], where: int, value: Any) -> None:
    """Put `value` into the index at its `where`-th place."""
    places = _nodes(index)[1:]
    *path, last = places[where % len(places)]
    at: Any = index
    for key in path:
        at = at[key]
    at[last] = value


_ALTERATIONS = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 2**20), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 2**20), st.none()),
    st.tuples(st.just("append"), st.binary(min_size=1, max_size=9), st.none()),
    # With every checksum made to fit again:
    st.tuples(st.just("node"), st.integers(0, 2**20), _JSON),
    st.tuples(st.just("swap"), st.integers(0, 2**20), st.integers(0, 2**20)),
    st.tuples(st.just("chunk"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("number"), st.integers(0, 2**20), st.integers(-(2**65), 2**65)),
    st.tuples(st.just("meta"), st.integers(0, 2**20), _JSON),
)


def _alter(dump: Path, forge: Forge, alterations: list[tuple]) -> None:
    for kind, a, b in alterations:
        data = bytearray(dump.read_bytes())
        if not data:
            return
        if kind == "flip":
            data[a % len(data)] ^= 1 << b
            dump.write_bytes(data)
        elif kind == "cut":
            dump.write_bytes(data[: a % len(data)])
        elif kind == "append":
            dump.write_bytes(data + a)

        elif kind == "meta":
            _alter_meta(dump.with_name("meta.json"), a, b)

        def change(index: dict, body: bytearray, kind: str = kind, a: Any = a, b: Any = b) -> None:
            if kind in ("node", "number"):
                _replace(index, a, b)
            elif kind == "swap":
                places = _nodes(index)[1:]
                value: Any = index
                for key in places[b % len(places)]:
                    value = value[key]
                _replace(index, a, json.loads(json.dumps(value)))
            elif kind == "chunk":
                body[16 + a % (len(body) - 16)] = b

        if kind in ("node", "number", "swap", "chunk"):
            try:
                forge(dump, change)
            except Exception:  # already beyond parsing
                return


def _alter_meta(meta: Path, where: int, value: Any) -> None:
    said = json.loads(meta.read_bytes())
    del said["seal"]
    _replace(said, where, value)
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"))
    said["seal"] = xxhash.xxh3_128_hexdigest(canonical.encode())
    meta.write_text(json.dumps(said))


def _read_one(original: dict[str, bytes], forge: Forge, alterations: list, folder: Path) -> bool:
    """Whether the altered dump loads. Anything but a value or a DumpError is a failure."""
    shutil.rmtree(folder, ignore_errors=True)
    dump = folder / "1" / "gen_batch.dp"
    dump.parent.mkdir(parents=True)
    for name, data in original.items():
        dump.with_name(name).write_bytes(data)
    _alter(dump, forge, alterations)
    limit = chunks.MAX_RATIO * dump.stat().st_size
    try:
        value = StepStore(folder).load(1)
    except DumpError as error:
        return not (error.where or pytest.fail("an error that does not say where"))
    assert _size(value) <= limit
    return True


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


@settings(max_examples=100)
@given(alterations=st.lists(_ALTERATIONS, min_size=1, max_size=3))
def test_an_altered_dump_loads_or_is_refused(
    alterations: list[tuple], original: dict[str, bytes], forge: Forge, tmp_path: Path
) -> None:
    _read_one(original, forge, alterations, tmp_path / "dumps")


# -- the known ways ----------------------------------------------------------------------


def _refused(store: StepStore, match: str) -> None:
    with pytest.raises(CorruptDumpError, match=match):
        store.load(1)
    assert store.steps() == []
    (kept,) = store.directory.glob("1.bad-*")
    assert (kept / "gen_batch.dp").exists()


def test_a_pickle_is_never_opened(store: StepStore) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(store.directory / "run-by-pickle"),)

    meta = store.save(1, {"a": 1})
    dump = store.directory / "1" / "gen_batch.dp"
    dump.write_bytes(pickle.dumps(Evil()).ljust(meta.stored, b"."))
    _refused(store, "not a dump of rlskip")
    assert not (store.directory / "run-by-pickle").exists()


def test_a_named_tuple_of_a_functions_name_calls_nothing(store: StepStore, forge: Forge) -> None:
    for step, named in ((1, ["os", "system"]), (2, ["subprocess", "Popen"])):
        store.save(step, 0)

        def lie(index: dict, body: bytearray, named: list[str] = named) -> None:
            index["rollouts"] = ["namedtuple", *named, ["args"], ["x"]]

        forge(store.directory / str(step) / "gen_batch.dp", lie)
        loaded = store.load(step)
        assert type(loaded).__bases__ == (tuple,)
        assert loaded.args == "x"


@pytest.mark.parametrize("claimed", [2**31 - 1, 2**40, 2**62])
def test_a_size_in_a_header_allocates_nothing(
    claimed: int, store: StepStore, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, torch.arange(1000))

    def claim(index: dict, body: bytearray) -> None:
        index["arrays"][0][0] = claimed
        index["arrays"][0][2] *= -(-claimed // chunks.CHUNK) if claimed < 2**32 else 1

    asked: list[int] = []
    empty = np.empty
    monkeypatch.setattr(
        np, "empty", lambda shape, *rest: asked.append(np.prod(shape)) or empty(shape, *rest)
    )
    dump = store.directory / "1" / "gen_batch.dp"
    forge(dump, claim)
    size = dump.stat().st_size
    _refused(store, "does not fit it")
    assert max(asked, default=0) <= chunks.MAX_RATIO * size


def test_a_run_of_zeros_without_padding_is_refused(store: StepStore, forge: Forge) -> None:
    """A header alone expands to a chunk of zeros; a thousand of them would to a gigabyte."""
    store.save(1, torch.zeros(4 << 20, dtype=torch.uint8))

    def strip(index: dict, body: bytearray) -> None:
        ((_, _, listed),) = index["arrays"]
        headers = b""
        for i, chunk in enumerate(listed):
            headers += body[16 + i * chunk[0] :][:32]
        for chunk in listed:
            chunk[0] = 32
        body[16:] = headers

    forge(store.directory / "1" / "gen_batch.dp", strip)
    _refused(store, "does not fit it")


def test_an_index_that_claims_to_be_huge(store: StepStore) -> None:
    store.save(1, torch.arange(1000))
    dump = store.directory / "1" / "gen_batch.dp"
    data = bytearray(dump.read_bytes())
    struct.pack_into("<Q", data, len(data) - 32, 2**50)
    dump.write_bytes(data)
    _refused(store, "its end is missing or altered")


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (2, 6 << 5, "a codec of another's, loaded as a plug-in"),
        (4, 0xFF, "more bytes than there is room for"),
        (17, 35, "a filter of another's"),
        (22, 40, "a codec of another's"),
        (31, 0x40, "memory left as it was"),
        (31, 0x08, "a lazy run, read from another file"),
    ],
)
def test_a_compressed_run_is_checked_before_the_decompressor_sees_it(
    at: int, value: int, why: str, store: StepStore, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, torch.arange(1000))

    def lie(index: dict, body: bytearray) -> None:
        body[16 + at] = value

    forge(store.directory / "1" / "gen_batch.dp", lie)
    _refused(store, "does not match the index")


def test_a_file_that_is_not_a_dump_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for content in (b"", b"rlskip\r\n", b"\0" * 100):
        file.write_bytes(content)
        with open(file, "rb") as opened, pytest.raises(CorruptDumpError):
            Reader(opened, str(file))
