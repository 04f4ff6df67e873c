"""docs/store.md is enough to write a reader from: here is one that knows nothing of rlskip."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.store import Identity, StepStore

PIECE = 2 * 1024 * 1024


class Reader:
    """A dump's directory, read by the page; tensors and batches come as numpy and plain dicts."""

    def __init__(self, directory: Path) -> None:
        meta = json.loads((directory / "meta.json").read_bytes())
        seal = meta.pop("seal")
        canonical = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
        assert xxhash.xxh3_128_hexdigest(canonical) == seal
        self.meta = meta
        self.data = data = (directory / "gen_batch.dp").read_bytes()
        assert len(data) == meta["stored"]
        magic, version, zero = struct.unpack_from("<8sII", data)
        assert (magic, version, zero) == (b"rlskip\r\n", 4, 0)
        stored, plain, digest, end = struct.unpack("<QQ16s8s", data[-40:])
        assert end == b"\r\nend\r\n\0"
        packed = data[-40 - stored : -40]
        assert xxhash.xxh3_128_digest(packed) == digest == bytes.fromhex(meta["checksum"])
        text = unpack(packed)
        assert len(text) == plain
        self.index = json.loads(text)
        name = f"{meta['step']}.{meta['call']}" if meta["call"] else f"{meta['step']}"
        if meta["world_size"] > 1:
            name += f".r{meta['rank']}-of-{meta['world_size']}"
        assert name == directory.name
        for place in ("step", "call", "rank", "world_size"):
            assert self.index[place] == meta[place]
        self.arrays, offset = [], 16
        for nbytes, spec, narrow, pieces in self.index["arrays"]:
            assert len(pieces) == -(-nbytes // PIECE)
            parts = []
            for size, checksum in pieces:
                packed = data[offset : offset + size]
                assert xxhash.xxh3_128_hexdigest(packed) == checksum
                parts.append(np.frombuffer(unpack(packed), dtype(narrow)).astype(dtype(spec)))
                offset += size
            array = np.concatenate(parts) if parts else np.empty(0, dtype(spec))
            assert array.nbytes == nbytes
            self.arrays.append(array)
        assert offset == len(data) - 40 - stored
        assert sum(array.nbytes for array in self.arrays) == meta["nbytes"]

    def raw(self, number: int) -> bytes:
        return self.arrays[number].tobytes()

    def entries(self, pairs: list) -> dict:
        return {self.value(key): self.value(value) for key, value in pairs}

    def sequence(self, form: str, *rest: Any) -> list:
        if form == "any":
            return [self.value(node) for node in rest[0]]
        if form == "float":
            return np.frombuffer(self.raw(rest[0]), "<f8").tolist()
        counts = self.arrays[rest[0]].tolist()
        if form == "int":
            return counts
        ends = np.cumsum(counts).tolist()
        runs = zip([0, *ends], ends, strict=False)
        if form == "str":
            text = self.raw(rest[1])
            return [text[a:b].decode("utf-8", "surrogatepass") for a, b in runs]
        assert form == "runs"
        flat = self.value(rest[1])
        return [flat[a:b] for a, b in runs]

    def shaped(self, name: str, shape: list, number: int | None) -> np.ndarray:
        raw = b"" if number is None else self.raw(number)
        return np.frombuffer(raw, name).reshape(shape)

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        tag, *parts = node
        if tag in ("list", "tuple", "set", "frozenset"):
            kind = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag]
            return kind(self.sequence(*parts))
        if tag in ("dict", "ordereddict", "defaultdict"):
            return self.entries(parts[-1])
        if tag in ("bytes", "bytearray"):
            return self.raw(parts[0])
        if tag == "int":
            return int(parts[0], 16)
        if tag in ("float", "complex"):
            numbers = [struct.unpack(">d", bytes.fromhex(bits))[0] for bits in parts]
            return numbers[0] if tag == "float" else complex(*numbers)
        if tag == "ndarray":
            name, shape, content = parts
            if name != "O":
                return self.shaped(name, shape, content)
            objects = np.empty(len(values := self.value(content)), object)
            objects[:] = values
            return objects.reshape(shape)
        if tag == "scalar":
            name, content = parts
            if name == "U":
                return content
            raw = bytes.fromhex(content)
            return raw if name == "S" else np.frombuffer(raw, name)[0]
        if tag == "tensor" and parts[0] == "dense":
            name = {"bfloat16": "u2", "bool": "?"}.get(parts[1], parts[1])
            return self.shaped(name, parts[2], parts[3])
        if tag == "tensor" and parts[0] == "jagged":
            values, offsets, lengths = map(self.value, parts[1:4])
            ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
            return [values[a:b] for a, b in zip(offsets[:-1], ends, strict=True)]
        if tag in ("size", "dtype"):
            return parts[0]
        if tag == "tensordict":
            return self.entries(parts[3])
        if tag == "tensordictstack" and parts[0] == "data":
            return self.value(parts[2])
        if tag == "nontensor":
            return self.value(parts[0])
        raise NotImplementedError(tag)


def unpack(packed: bytes) -> bytes:
    (length,) = struct.unpack_from("<i", packed, 12)
    assert not any(packed[length:])
    return blosc2.decompress2(packed[:length])


def dtype(spec: str) -> str:
    return "<" + spec.replace("x", "u")


def test_it_reads_the_golden_dump() -> None:
    reader = Reader(Path(__file__).parents[1] / "format" / "golden" / "v4" / "3")
    assert reader.index["step"] == reader.meta["step"] == 3
    aside = reader.value(reader.index["aside"])
    assert aside["rng"].shape == (16,)
    ours = StepStore(Path(__file__).parents[1] / "format" / "golden" / "v4").load(3)
    theirs = reader.value(reader.index["rollouts"])
    assert set(theirs) == set(ours)
    batch = theirs["batch"]
    np.testing.assert_array_equal(batch["ids"], ours["batch"]["ids"].numpy())
    np.testing.assert_array_equal(batch["half"], ours["batch"]["half"].view(torch.uint16).numpy())
    for mine, row in zip(batch["jagged"], ours["batch"]["jagged"].unbind(), strict=True):
        np.testing.assert_array_equal(mine, row.numpy())
    assert (batch["task"], batch["each"]) == ("maths", ["a", "b"])
    np.testing.assert_array_equal(theirs["long"], ours["long"].numpy())
    np.testing.assert_array_equal(theirs["numpy"], ours["numpy"])
    assert theirs["names"].tolist() == ours["names"].tolist()
    assert theirs["objects"].tolist() == ours["objects"].tolist()
    for name in ("runs", "strings"):
        assert theirs[name] == ours[name]
    assert theirs["scalars"] == ours["scalars"]
    assert theirs["empty"].shape == (0, 7)


def test_it_reads_a_fresh_dump(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-5, 150_000, (64, 9000), generator=generator)
    rollouts = {
        "batch": TensorDict(
            {"ids": ids, "mask": ids > 7, "logp": torch.randn(64, 9000, generator=generator)},
            batch_size=[64],
        ),
        "uids": NonTensorStack(*(NonTensorData(f"uid-{i}") for i in range(64))),
        "turns": [[i, 2**40] for i in range(10)],
        7: float("nan"),
    }
    store = StepStore(tmp_path, rank=1, world_size=2)
    store.save(12, rollouts, call="part-3", identity=Identity.of({"prompts": "é", "n": 2}))
    reader = Reader(tmp_path / "12.part-3.r1-of-2")
    theirs = reader.value(reader.index["rollouts"])
    assert reader.index["aside"] is None
    for field in ("ids", "mask", "logp"):
        np.testing.assert_array_equal(theirs["batch"][field], rollouts["batch"][field].numpy())
    assert theirs["uids"] == [f"uid-{i}" for i in range(64)]
    assert theirs["turns"] == rollouts["turns"]
    assert theirs[7] != theirs[7]


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
