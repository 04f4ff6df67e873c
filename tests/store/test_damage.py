"""Dumps that are not what was written: never loaded, always named, never lost."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import xxhash

from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.store import (
    AbsentDumpError,
    CorruptDumpError,
    DumpMeta,
    Identity,
    OtherFormatError,
    StepStore,
    UnsupportedTypeError,
)
from tests.faulty_files import flip

_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first bit": lambda d: flip(d / "gen_batch.dp", 0),
    "a bit of the version": lambda d: flip(d / "gen_batch.dp", 9),
    "a bit of the rollouts": lambda d: flip(d / "gen_batch.dp", 500),
    "a bit of a name": lambda d: flip(d / "gen_batch.dp", _start_of_index(d) + 46),
    "last bit": lambda d: flip(d / "gen_batch.dp", -1),
    "truncated": lambda d: os.truncate(d / "gen_batch.dp", 1000),
    "one byte more": lambda d: (d / "gen_batch.dp").open("ab").write(b"x"),
    "meta truncated": lambda d: os.truncate(d / "meta.json", 40),
    "meta edited": lambda d: (d / "meta.json").write_text(
        (d / "meta.json").read_text().replace('"n": 8', '"n": 9')
    ),
    "meta huge": lambda d: os.truncate(d / "meta.json", 1 << 40),
    "no meta": lambda d: (d / "meta.json").unlink(),
    "no rollouts": lambda d: (d / "gen_batch.dp").unlink(),
    "of another call": lambda d: _renamed_from(d, call="part-1"),
    "rollouts of another step": lambda d: shutil.copy(d.with_name("4") / "gen_batch.dp", d),
    "rollouts of another run": lambda d: _of_another_run(d),
    "a bit of the sidecar": lambda d: flip(d / "gen_batch.dp", _start_of_index(d) - 3),
    "of verl": lambda d: (
        (d / "gen_batch.dp").write_bytes(pickle.dumps({"a": 1})),
        (d / "meta.json").write_text(json.dumps({"step": 3})),
    ),
}


def _renamed_from(directory: Path, call: str = "", **rank: int) -> None:
    other = StepStore(directory.parent, **rank)
    other.save(3, "another", call=call)
    shutil.rmtree(directory)
    (found,) = (path for path in directory.parent.glob("3.[pr]*"))
    os.rename(found, directory)


def _of_another_run(directory: Path) -> None:
    """Put another run's rollouts in, and let meta.json say their size."""
    other = StepStore(directory.parent.with_name("other"))
    stored = other.save(3, {"a": torch.zeros(9)}).stored
    shutil.copy(other.directory / "3" / "gen_batch.dp", directory / "gen_batch.dp")
    meta = directory / "meta.json"
    said = DumpMeta.from_bytes(meta.read_bytes(), "")
    meta.write_bytes(attrs.evolve(said, stored=stored).to_bytes())


def _start_of_index(directory: Path) -> int:
    data = (directory / "gen_batch.dp").read_bytes()
    return len(data) - 40 - int.from_bytes(data[-40:-32], "little")


@pytest.mark.parametrize("damage", _DAMAGES)
def test_what_was_damaged_is_never_loaded_and_always_named(
    damage: str, store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        store.save(
            step,
            {"a": torch.randn(1000), "step": step},
            identity=Identity.of({"n": 8}),
            sidecar=torch.randn(50),
        )
    _DAMAGES[damage](store.directory / "3")
    with caplog.at_level(logging.WARNING), pytest.raises((CorruptDumpError, OtherFormatError)):
        store.load(3)
    if damage == "a bit of the version":  # then it is a sound dump of another version
        return
    assert str(store.directory / "3") in caplog.text
    assert "cannot be used" in caplog.text
    (kept,) = store.directory.glob("3.bad-*")
    assert kept.name in caplog.text
    assert store.read_meta(3) is None
    assert store.steps() == [4]
    assert store.load(4)["step"] == 4
    store.save(3, {"a": torch.zeros(1000)}, identity=Identity.of({"n": 8}))
    assert store.load(3)["a"].sum() == 0
    if "bit" not in damage and not damage.startswith("rollouts of"):  # evident at a glance
        _DAMAGES[damage](store.directory / "3")
        assert store.nearest(3) == 4
        assert store.read_meta(3) is None
        assert len(list(store.directory.glob("3.bad-*"))) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("info", {"seconds": float("nan")}),
        ("info", [1]),
        ("identity", {"prompts": "x", "unknown": 5}),
        ("nbytes", 10**400),
        ("created", "2026-01-01"),
        ("call", None),
        ("more", 1),
    ],
)
def test_a_forged_meta_is_a_corrupt_dump(name: str, value: Any, store: StepStore) -> None:
    store.save(3, "x")
    path = store.directory / "3" / "meta.json"
    plain = json.loads(path.read_text())
    del plain["seal"]
    plain[name] = value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**plain, "seal": xxhash.xxh3_128_hexdigest(text.encode())}))
    with pytest.raises(CorruptDumpError) as caught:
        store.load(3)
    assert caught.value.where == str(path)
    assert len(list(store.directory.glob("3.bad-*"))) == 1


def test_a_stack_that_is_exhausted_is_no_damage(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever on the way through both files that happens."""
    identity = Identity.of({"prompts": "x", "sampling.temperature": 1.0, "sampling.stop": ["a"]})
    store.save(1, {"a": [{"b": list(range(20))}]}, identity=identity)
    raised = set()

    def load(depth: int) -> Any:
        return load(depth - 1) if depth else store.load(1)

    here = len(inspect.stack())
    for depth in range(sys.getrecursionlimit() - here - 200, sys.getrecursionlimit() - here):
        try:
            load(depth)
        except (RecursionError, AbsentDumpError) as error:
            raised.add(type(error))
    assert raised
    assert raised <= {RecursionError, UnreadableDumpError}
    assert (store.steps(), list(store.directory.glob("*.bad-*"))) == ([1], [])
    assert len(store.load(1)["a"]) == 1


def test_an_identity_as_deep_as_it_may_be_is_read_back(store: StepStore) -> None:
    value: Any = ({1},)
    saved = 0
    for _ in range(110):
        with contextlib.suppress(UnsupportedTypeError):
            store.save(saved, "x", identity=Identity.of({"x": value}))
            saved += 1
        value = [value]
    assert 90 < saved <= 100
    assert [store.load(step) for step in range(saved)] == ["x"] * saved
