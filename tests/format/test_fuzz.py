"""Sealed files of random nodes: each loads as a value that can be used, or is refused by name."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.format.chunks import pack
from rlskip.format.container import Reader
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.format.kinds import Packer, rebuild
from rlskip.store import (
    CorruptDumpError,
    TooLargeDumpError,
    UnknownTypeError,
    UnsupportedTypeError,
    fingerprint,
)
from tests.format.values import seal

_TEXT = np.frombuffer("añ☃\U0001f600bcdefgh".encode(), np.uint8)
# Arrays that fit some nodes: numbers, lengths that add up, offsets, text, pixels, zeros.
_ARRAYS: list[tuple[str, np.ndarray]] = [
    ("i8", np.arange(8)),
    ("i8", np.array([0, 2, 5, 8])),
    ("i8", np.array([2, 3, 3])),
    ("i8", np.array([-1, 2**62, 5, 7])),
    ("x8", np.linspace(-1, 1, 8)),
    ("x4", np.array([97, 0x1F600, 0xD800, 0], np.int32)),
    ("x4", np.array([0x7FFFFFFF, 1], np.int32)),
    ("x1", _TEXT),
    ("i8", np.array([2, 3, len(_TEXT) - 5])),
    ("u1", np.array([0, 1, 1, 0, 255, 1, 0, 1], np.uint8)),
    ("x1", np.zeros(0, np.uint8)),
    ("i8", np.zeros(1 << 11, np.int64)),
    ("x1", np.zeros(1 << 14, np.uint8)),
    ("x1", np.arange(64, dtype=np.uint8)),
]
_JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 99, 2**31, 2**50, 2**62, 2**63, 2**70, -(2**63), 0.5,
    float("nan"), float("inf"), "", "x", "U", "O", "<i8", ">i8", "<U1", "<U0", "|S0", "|b1",
    "int64", "bool", "complex64", "float4_e2m1fn_x2", "any", "data", "lazy", "cuda", "cpu", "meta",
    "L", "RGB", "1", "00" * 8, "ff", "0x1f", "-0x" + "f" * 40, "a.b", "\ud800", [], [0], [1, 2],
    [-1], [2**50], [2**62, 2**62, 0], {}, {"a": 1}, [[]], ["list"], ["user:x", 1], [0, 1, 2, 3, 4],
]  # fmt: skip
_NUMPY = ["<i8", ">i8", "|i1", "|u1", "<f8", ">f4", "<c16", "|b1", "<U1", ">U2", "|S4", "<M8[ns]",
          ">m8[3D]", "<U0", "|S0", "<f2", "<f16", "|V8", "|O8", "O"]  # fmt: skip
_TORCH = ["int64", "int32", "uint8", "bool", "float32", "bfloat16", "complex64", "int4", "uint16",
          "float8_e4m3fn", "quint8", "bits8"]  # fmt: skip
# In a run's header: flags, the filters' ids and what belongs to each, the codec's, more flags.
_IDS = [2, 3, *range(16, 32)]
_MAX_BYTES = 64 << 20
_MODES = ["1", "L", "P", "PA", "RGB", "RGBA", "I", "F", "I;16", "CMYK", "LAB"]


class _Grammar:
    """Random nodes, most of whose parts are what belongs there."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left = 40

    def node(self) -> Any:
        self._left -= 1
        if self._left < 0 or self._chance.random() < 0.25:
            return self._chance.choice(_JUNK)
        parts = self._chance.choice(_KINDS)(self)
        for i in range(len(parts)):
            if self._chance.random() < 0.06:
                parts[i] = self._chance.choice([self._chance.choice(_JUNK), self.node()])
        if self._chance.random() < 0.02:
            del parts[self._chance.randrange(len(parts))]
        return parts

    def nodes(self) -> list:
        some = [self.node() for _ in range(self._chance.randrange(4))]
        times = self._chance.choice([1, 1, 1, 2, 100])
        return some * times if times < 100 or len(json.dumps(some)) < 1000 else some

    def entries(self) -> list:
        return [[self.key(), self.node()] for _ in range(self._chance.randrange(4))]

    def key(self) -> Any:
        return self._chance.choice(["a", "b", 1, None, self.node()])

    def array(self) -> int:
        return self._chance.randrange(len(_ARRAYS))

    def shape(self) -> list:
        shapes = [[], [0], [1], [8], [2, 4], [4], [1 << 11], [0, 2**40], [3, 0], [2, 2, 2], [64]]
        return list(self._chance.choice(shapes))

    def size(self) -> list:
        return list(self._chance.choice([[8, 8], [2, 3], [0, 5], [1, 1], [128, 1024], [9, 0]]))

    def any_of(self, *values: Any) -> Any:
        return self._chance.choice(values)

    def listed(self) -> list:
        """A collection, after its tag."""
        form = self.any_of("any", "int", "float", "str", "runs")
        if form == "any":
            return [form, self.nodes()]
        if form == "str":
            return [form, *self.any_of((8, 7), (2, 13), (self.array(), self.array()))]
        if form == "runs":
            return [form, self.any_of(2, self.array()), ["list", "int", self.any_of(0, 1)]]
        return [form, self.array()]

    def dense(self) -> list:
        number = self.any_of(None, self.array(), self.array())
        device = self.any_of(None, "cuda", "cpu")
        return ["tensor", "dense", self.any_of(*_TORCH), self.shape(), number, device]

    def number(self) -> list:
        """A tensor of integers that can be offsets."""
        which, n = self.any_of((0, 8), (1, 4), (2, 3), (3, 4))
        return ["tensor", "dense", "int64", [n], which, None]


_KINDS: list[Callable[[_Grammar], list]] = [
    lambda g: ["list", *g.listed()],
    lambda g: ["list", "any", g.nodes()],
    lambda g: ["tuple", *g.listed()],
    lambda g: [g.any_of("set", "frozenset"), *g.listed()],
    lambda g: [g.any_of("dict", "ordereddict"), g.entries()],
    lambda g: ["defaultdict", g.any_of(None, "list", "int"), g.entries()],
    lambda g: [g.any_of("bytes", "bytearray"), g.array()],
    lambda g: ["int", g.any_of("0x7", "-0x" + "f" * 40, hex(2**61 - 1))],
    lambda g: ["float", "7ff8000000000001"],
    lambda g: ["str", g.any_of("eda080edb080", "61", "")],
    lambda g: ["fields", "m", g.any_of("T", "a.b", "OrderedDict"), g.entries()],
    lambda g: ["ndarray", g.any_of(*_NUMPY), g.shape(), g.any_of(None, g.array(), g.array())],
    lambda g: ["ndarray", "O", g.shape(), ["list", *g.listed()]],
    lambda g: ["scalar", g.any_of(*_NUMPY), "00" * g.any_of(1, 2, 4, 8, 16)],
    lambda g: ["scalar", g.any_of("U", "S"), g.any_of("é", "6162", g.node())],
    lambda g: g.dense(),
    lambda g: ["tensor", "jagged", g.any_of(g.number(), g.dense()), g.number(),
               g.any_of(None, g.number()), g.any_of(1, 1, 2)],
    lambda g: ["size", g.shape()],
    lambda g: ["tensordict", g.any_of([], [8], [2]), g.any_of(None, "cpu", "cuda"),
               g.any_of(None, ["x"]),
               [[g.any_of("a", "b", "c"), g.any_of(g.dense(), g.number(), g.node())]]],
    lambda g: ["tensordictstack", "data", g.any_of(0, 1, -1), ["list", *g.listed()]],
    lambda g: ["tensordictstack", g.any_of("lazy", "nontensor"), g.any_of(0, 1), g.nodes()],
    lambda g: ["tensordictstack", "lazy", 0, [["tensordict", [], None, None, []]] * 2],
    lambda g: ["nontensor", g.node(), g.any_of([], [8], [2**40])],
    lambda g: ["dataproto", g.node(), g.entries(), g.node()],
    lambda g: ["image", g.any_of(*_MODES), g.size(), g.array(),
               g.any_of(None, ["list", "any", [0] * 1024]), ["dict", g.entries()]],
]  # fmt: skip


class Fuzzer:
    """Reads sealed files of random nodes from memory, and counts what became of them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        chunks = [pack(a, s) if a.size else b"" for s, a in _ARRAYS]
        self._body = b"".join(chunks)
        ends = itertools.accumulate(map(len, chunks))
        self._starts = [end - len(c) for end, c in zip(ends, chunks, strict=True) if c]
        self._listing = [
            [a.nbytes, s, s, [[len(c)]] if c else []]
            for (s, a), c in zip(_ARRAYS, chunks, strict=True)
        ]
        self.counted: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0

    def read(self, seed: int, measured: bool = False) -> None:
        """One file. Fails where it is neither a value nor an error by name, or takes too much."""
        data = self._forged(random.Random(seed))
        self._file.seek(0)
        self._file.truncate()
        self._file.write(data)
        if measured:
            tracemalloc.start()
        began = time.thread_time()
        try:
            reader = Reader(self._file, "dump", max_bytes=_MAX_BYTES)
            value = rebuild(reader, "rollouts", into="torch")
        except (
            CorruptDumpError, UnreadableDumpError, UnknownTypeError, TooLargeDumpError
        ) as error:  # fmt: skip
            self.counted[type(error).__name__ if error.where == "dump" else "nowhere"] += 1
        else:
            self.counted["loaded"] += 1
            # A value that was loaded is like any other.
            for use in (Packer().node, fingerprint):
                try:
                    use(value)
                except UnsupportedTypeError:
                    self.counted[f"not for {use.__name__}"] += 1
        assert not self.counted["nowhere"], f"seed {seed}: an error that does not name the file"
        seconds = time.thread_time() - began
        self.slowest = max(self.slowest, seconds)
        assert seconds < 10 + len(data) / 1e6, f"seed {seed} takes {seconds:.1f} s"
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 3 * _MAX_BYTES, (
                f"seed {seed} takes {peak / 2**20:.0f} MiB"
            )  # it is packed and hashed, too

    def _forged(self, chance: random.Random) -> bytes:
        listing: Any = json.loads(json.dumps(self._listing))
        if chance.random() < 0.1:
            entry = chance.choice(listing)
            at = chance.randrange(4)
            junk = chance.choice([*_JUNK, "i8", "u2", "x1", "f2", entry[0] + 8, entry[0] // 2])
            if at < 3 or not entry[3]:
                entry[at] = junk
            else:
                entry[3][0][0] = junk
        index = {"rollouts": _Grammar(chance).node(), "arrays": listing}
        body = bytearray(self._body)
        if chance.random() < 0.2:  # within a compressed run
            body[chance.randrange(len(body))] = chance.randrange(256)
        if chance.random() < 0.2:  # in one's header, where Blosc2 finds what to load by id
            run = chance.choice(self._starts)
            body[run + chance.choice(_IDS)] = chance.choice([6 << 5, 0xFF, 32, 35, 40, 160, 255])
        return seal(index, bytes(body))


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    """With a bound on this process's memory: what is beyond it fails as MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), before[1]))
    try:
        with open(os.memfd_create("dump"), "w+b", buffering=0) as file:
            yield Fuzzer(file)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**64))
def test_a_sealed_file_loads_or_is_refused(seed: int, fuzzer: Fuzzer) -> None:
    fuzzer.read(seed, measured=seed % 20 == 0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_200_000_sealed_files_load_or_are_refused(
    fuzzer: Fuzzer, request: pytest.FixtureRequest
) -> None:
    count = int(os.environ.get("RLSKIP_FUZZ", 200_000))
    first = random.SystemRandom().randrange(2**48)
    began = time.monotonic()
    for seed in range(first, first + count):
        fuzzer.read(seed, measured=seed % 500 == 0)
    rate = count / (time.monotonic() - began)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\nfuzzed from seed {first}: {count} files, {rate:.0f} a second, the slowest "
            f"{fuzzer.slowest:.2f} s; {dict(fuzzer.counted)}"
        )
    assert fuzzer.counted["loaded"] > count / 20
