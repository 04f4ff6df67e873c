"""docs/store.md is enough to write a reader from: here is one of 60 lines."""

from __future__ import annotations

import array
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import blosc2
import pytest
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.store import Identity, StepStore

GOLDEN = Path(__file__).parents[1] / "format" / "golden" / "v4"
CODES = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
         "f8": "d", "bool": "?", "bfloat16": "H", "float32": "f", "int64": "q", "int32": "i",
         "uint8": "B"}  # fmt: skip


class Reader:
    """A dump's directory, read by the page with blosc2, json and xxhash; arrays come as lists."""

    def __init__(self, directory: Path) -> None:
        self.meta = json.loads((directory / "meta.json").read_bytes())
        seal = self.meta.pop("seal")
        text = json.dumps(self.meta, sort_keys=True, separators=(",", ":"))
        assert xxhash.xxh3_128_hexdigest(text.encode()) == seal
        data = (directory / "gen_batch.dp").read_bytes()
        assert len(data) == self.meta["stored"]
        assert data[:16] == b"rlskip\r\n" + bytes([4, 0, 0, 0, 0, 0, 0, 0])
        assert data[-8:] == b"\r\nend\r\n\0"
        stored, plain = memoryview(data[-40:-24]).cast("Q")
        packed, at = data[-40 - stored : -40], 16
        assert xxhash.xxh3_128_hexdigest(packed) == data[-24:-8].hex() == self.meta["checksum"]
        (length,) = memoryview(packed[12:16]).cast("i")
        text = blosc2.decompress2(packed[:length])
        assert (len(text), not any(packed[length:])) == (plain, True)
        self.index, self.arrays = json.loads(text), []
        assert all(self.index[n] == self.meta[n] for n in ("step", "call", "rank", "world_size"))
        for nbytes, spec, stored_as, chunks in self.index["arrays"]:
            whole = array.array(CODES[spec.replace("x", "u")])
            for size, checksum in chunks:
                assert xxhash.xxh3_128_hexdigest(data[at : at + size]) == checksum
                raw = blosc2.decompress2(data[at : at + size])
                whole.extend(memoryview(raw).cast(CODES[stored_as.replace("x", "u")]).tolist())
                at += size
            assert len(whole) * whole.itemsize == nbytes
            self.arrays.append(whole.tobytes())
        assert at == len(data) - 40 - stored

    def numbers(self, number: int | None, name: str) -> list:
        return [] if number is None else memoryview(self.arrays[number]).cast(CODES[name]).tolist()

    def value(self, node: Any) -> Any:
        match node:
            case ["list" | "tuple" | "set" | "frozenset", "any", nodes]:
                return [self.value(node) for node in nodes]
            case ["list" | "tuple", "int" | "float" as form, number]:
                return self.numbers(number, "i8" if form == "int" else "f8")
            case ["list", "str" | "runs" as form, number, of]:
                flat = self.arrays[of] if form == "str" else self.value(of)
                ends = [0, *itertools.accumulate(self.numbers(number, "i8"))]
                runs = [flat[a:b] for a, b in itertools.pairwise(ends)]
                return [r.decode("utf-8", "surrogatepass") for r in runs] if form == "str" else runs
            case ["dict" | "tensordict", *_, entries]:
                return {self.value(key): self.value(value) for key, value in entries}
            case ["tensor", "dense", name, shape, number, _]:
                return shape, self.numbers(number, name)
            case ["tensor", "jagged", values, offsets, None, 1]:
                (_, flat), (_, ends) = self.value(values), self.value(offsets)
                return [flat[a:b] for a, b in itertools.pairwise(ends)]
            case ["ndarray", "O", _, content] | ["nontensor", content, _]:
                return self.value(content)
            case ["tensordictstack", "data", _, content]:
                return self.value(content)
            case [tag, *_]:
                return tag  # the page has the others
        return node


def test_the_reader_is_short() -> None:
    assert len(inspect.getsource(Reader).splitlines()) <= 60


def test_it_reads_the_golden_dump() -> None:
    reader, ours = Reader(GOLDEN / "3"), StepStore(GOLDEN).load(3)
    assert reader.value(reader.index["aside"])["rng"] == ([16], list(range(16)))
    theirs = reader.value(reader.index["rollouts"])
    assert set(theirs) == set(ours)
    batch = theirs["batch"]
    assert batch["ids"] == ([2, 3], ours["batch"]["ids"].flatten().tolist())
    assert batch["half"] == ([2], ours["batch"]["half"].view(torch.uint16).tolist())
    assert batch["jagged"] == [row.tolist() for row in ours["batch"]["jagged"].unbind()]
    assert (batch["task"], batch["each"]) == ("maths", ["a", "b"])
    assert theirs["long"] == ([300_000], ours["long"].tolist())
    assert theirs["empty"] == ([0, 7], [])
    assert theirs["objects"] == [None, {"turns": [1, 2.5]}]
    assert (theirs["runs"], theirs["strings"]) == (ours["runs"], ours["strings"])


def test_it_reads_a_fresh_dump(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-5, 150_000, (64, 9000), generator=generator)
    tensors = {"ids": ids, "mask": ids > 7, "logp": torch.randn(64, 9000, generator=generator)}
    rollouts = {
        "batch": TensorDict(dict(tensors), batch_size=[64]),
        "uids": NonTensorStack(*(NonTensorData(f"uid-{i}") for i in range(64))),
        "turns": [[i, 2**40] for i in range(10)],
    }
    store = StepStore(tmp_path, rank=1, world_size=2)
    store.save(12, rollouts, call="part-3", identity=Identity.of({"prompts": "é", "n": 2}))
    reader = Reader(tmp_path / "12.part-3.r1-of-2")
    assert reader.index["aside"] is None
    theirs = reader.value(reader.index["rollouts"])
    for field, tensor in tensors.items():
        assert theirs["batch"][field] == ([64, 9000], tensor.flatten().tolist())
    assert theirs["uids"] == [f"uid-{i}" for i in range(64)]
    assert theirs["turns"] == rollouts["turns"]


def test_it_sees_every_altered_byte(tmp_path: Path) -> None:
    StepStore(tmp_path).save(1, {"ids": torch.arange(40)})
    for name in ("gen_batch.dp", "meta.json"):
        file = tmp_path / "1" / name
        whole = file.read_bytes()
        for at in range(0, len(whole), 7):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises((AssertionError, LookupError, ValueError)):
                Reader(tmp_path / "1")
        file.write_bytes(whole)
    Reader(tmp_path / "1")
