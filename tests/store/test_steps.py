"""The store by step: layout, choosing, presence, and dumps that are not what they seem."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.errors import ConfigError
from rlskip.store import (
    AbsentDumpError,
    CorruptDumpError,
    DumpMeta,
    Identity,
    NewerFormatError,
    StepStore,
    run_directory,
)
from rlskip.store.layout import as_step, safe_name

# -- names -------------------------------------------------------------------------------


_NAMES = st.text() | st.text(st.sampled_from("a./é"), min_size=100, max_size=300)


def test_the_layout_of_the_design() -> None:
    directory = run_directory("/dumps", "exp", "proj", 256, 8, 1024, 4096)
    assert directory == Path("/dumps/exp_proj/GBS256_N8_in1024_out4096")
    assert run_directory("~/d", "e", "p", 1, 1, 1, 1).is_relative_to(Path.home())
    assert run_directory("d", "e", "p", 1, 1, 1, 1).parts[0] == "d"


@pytest.mark.parametrize("url", ["s3://bucket/x", "hdfs://h/x", "gs://b", "file:///x", "s3:/b"])
def test_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"skip\.dump_dir: .*URL") as caught:
        run_directory(url, "e", "p", 1, 1, 1, 1)
    assert url in str(caught.value)


@given(_NAMES, _NAMES, _NAMES | st.integers())
def test_no_name_leaves_dump_dir(experiment: str, project: str, n: str | int) -> None:
    directory = run_directory("/dumps", experiment, project, n, n, n, n)
    assert directory.parent.parent == Path("/dumps")
    assert ".." not in directory.parts
    for part in directory.parts[2:]:
        assert part.isascii()
        assert len(part) < 255
        assert "\0" not in part


@given(_NAMES, _NAMES)
def test_no_two_names_collide(a: str, b: str) -> None:
    assert (safe_name(a) == safe_name(b)) == (a == b)
    assert safe_name(safe_name(a)) == safe_name(a) or safe_name(a) != a


@pytest.mark.parametrize(("a", "b"), [("a/b", "a-b"), ("a b", "a\tb"), ("..", "."), ("", "-")])
def test_names_that_clean_to_the_same(a: str, b: str) -> None:
    assert safe_name(a) != safe_name(b)


@given(st.integers(0) | st.text())
def test_steps_are_canonical_integers(name: int | str) -> None:
    step = as_step(str(name))
    assert step is None or str(step) == str(name)
    if isinstance(name, int):
        assert step == name


# -- choosing a step ---------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 30), max_size=8), st.integers(0, 30))
def test_repeat_chooses_by_the_four_rules(
    tmp_path_factory: pytest.TempPathFactory, present: set[int], step: int
) -> None:
    store = StepStore(tmp_path_factory.mktemp("run"))
    for number in present:
        (store.directory / str(number)).mkdir()
        (store.directory / str(number) / "half").touch()
    complete = {number for number in present if number % 3}
    for number in complete:
        shutil.rmtree(store.directory / str(number))
        store.save(number, number)
    expected = (
        step
        if step in complete
        else max((s for s in complete if s < step), default=None)
        if any(s < step for s in complete)
        else min((s for s in complete if s > step), default=None)
    )
    assert store.nearest(step) == expected
    assert store.steps() == sorted(complete)


def test_only_pure_integers_are_steps(store: StepStore) -> None:
    for step in (3, 0, 12):
        store.save(step, step)
    for name in ("007", "-1", "1.5", "4.bad-x", "x", "٣", "+2"):
        shutil.copytree(store.directory / "3", store.directory / name)
    assert store.steps() == [0, 3, 12]


def test_steps_of_another_process_are_seen(store: StepStore) -> None:
    other = StepStore(store.directory)
    for step in range(5):
        other.save(step, step)
        assert store.nearest(9) == step
        assert store.steps() == list(range(step + 1))
    shutil.rmtree(store.directory / "4")
    assert store.nearest(9) == 3


def test_saving_hides_no_step_of_another_process(store: StepStore) -> None:
    store.save(1, 1)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    assert store.steps() == [1]
    StepStore(store.directory).save(2, 2)
    store.save(3, 3)
    assert store.steps() == [1, 2, 3]


def test_a_step_added_within_a_tick_of_the_clock_is_seen(store: StepStore) -> None:
    store.save(1, 1)
    other = StepStore(store.directory)
    assert other.steps() == [1]
    then = os.stat(store.directory).st_mtime_ns
    store.save(2, 2)
    os.utime(store.directory, ns=(then, then))
    assert other.steps() == [1, 2]


def test_choosing_among_100_000_takes_milliseconds(store: StepStore) -> None:
    store.save(50_000, 1)
    for step in range(100_000):
        os.makedirs(store.directory / str(step), exist_ok=True)
    for step in (20, 21, 22, 23, 99_990):
        os.rmdir(store.directory / str(step))
    for step in (20, 99_990):
        store.save(step, step)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    store.nearest(5)  # the first look

    def seconds(step: int) -> float:
        began = time.perf_counter()
        assert store.nearest(step) == step
        return time.perf_counter() - began

    assert min(seconds(99_990) for _ in range(5)) < 0.005
    after_saves = []
    for step in (21, 22, 23):
        store.save(step, step)
        after_saves.append(seconds(step))
    assert min(after_saves) < 0.005
    assert store.nearest(24) == 23


@pytest.mark.parametrize("call", ["listdir", "stat", "open"])
def test_what_another_host_removes_meanwhile_is_absent(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.save(1, "x")
    real = getattr(os, call)

    def stale(path: Any, *flags: int, **options: Any) -> Any:
        if not isinstance(path, int) and "dir_fd" not in options:  # not of the open directory
            return real(path, *flags, **options)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, call, stale)
    assert store.peek(1) is None
    if call != "listdir":  # to load lists nothing
        with pytest.raises(AbsentDumpError):
            store.load(1)
    monkeypatch.undo()
    assert store.load(1) == "x"


# -- links -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_a_link_to_a_runs_directory_is_refused(tmp_path: Path, level: int) -> None:
    outside, dumps = tmp_path / "outside", tmp_path / "dumps"
    directory = run_directory(dumps, "e", "p", 1, 1, 1, 1)
    link = directory if level == 2 else directory.parent
    for path in (outside, link.parent):
        path.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match="is a symbolic link; below dump_dir none is followed"):
        run_directory(dumps, "e", "p", 1, 1, 1, 1)


def test_dump_dir_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "dumps").symlink_to(tmp_path / "disk")
    store = StepStore(run_directory(tmp_path / "dumps", "e", "p", 1, 1, 1, 1))
    store.save(1, "x")
    assert store.load(1) == "x"
    assert list((tmp_path / "disk").glob("e_p/*/1"))


@pytest.mark.parametrize(
    ("link", "options", "saved"),
    [
        (".work", {}, {}),
        ("1", {}, {}),
        ("1", {}, {"inner": 2}),
        ("1", {"rank": 1, "world_size": 2}, {}),
        ("1/2", {"rank": 1, "world_size": 2}, {"inner": 2}),
    ],
)
def test_nothing_is_written_or_removed_through_a_link(
    tmp_path: Path, link: str, options: dict[str, int], saved: dict[str, int]
) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "mine").mkdir(parents=True)
    (outside / "mine" / "text").write_text("not yours")
    for path in (outside / "mine" / "text", outside / "mine"):
        os.utime(path, (0, 0))
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside)
    store = StepStore(run, keep_last=1, **options)
    store.save(1, "x", **saved)
    assert store.load(1, **saved) == "x"
    assert [p.name for p in outside.rglob("*")] == ["mine", "text"]
    (kept,) = (run / link).parent.glob("*.bad-*")
    assert kept.is_symlink()


# -- presence ----------------------------------------------------------------------------


def test_a_dump_says_what_it_is(store: StepStore) -> None:
    identity = Identity(prompts="ab", n=8, sampling={"temperature": 1.0})
    meta = store.save(7, {"a": torch.zeros(10)}, identity=identity, info={"seconds": 1.5})
    assert store.peek(7) == meta
    assert (meta.step, meta.version, meta.nbytes) == (7, 1, 40)
    assert meta.identity == identity
    assert meta.info == {"seconds": 1.5}
    assert meta.created.endswith("+00:00")
    assert meta.stored == (store.directory / "7" / "gen_batch.dp").stat().st_size
    assert store.verify(7) == meta
    assert sorted(p.name for p in (store.directory / "7").iterdir()) == [
        "gen_batch.dp",
        "meta.json",
    ]


def test_info_that_is_no_json_is_refused_before_a_byte_is_written(store: StepStore) -> None:
    with pytest.raises(TypeError):
        store.save(1, 1, info={"x": object()})
    assert not store.directory.exists()


def test_what_is_absent(store: StepStore) -> None:
    assert store.steps() == []
    assert store.nearest(1) is None
    assert store.peek(1) is None
    with pytest.raises(AbsentDumpError, match="there is no dump of this step"):
        store.load(1)
    assert not store.directory.exists(), "looking creates nothing"


def test_mini_batches_of_a_step(store: StepStore) -> None:
    for inner in (0, 1):
        store.save(4, {"mini": inner}, inner=inner)
    assert store.steps() == []
    assert store.steps(inner=1) == [4]
    assert store.nearest(9, inner=0) == 4
    assert store.peek(4) is None
    assert store.peek(4, inner=2) is None
    assert store.load(4, inner=1) == {"mini": 1}
    store.set_aside(4, "for a test", inner=0)
    assert store.steps(inner=0) == []
    assert store.steps(inner=1) == [4]


def test_the_first_dump_of_a_step_stays_unless_replaced(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.save(1, "first")
    assert store.save(1, "second") == first
    assert store.load(1) == "first"
    store.save(1, "third", replace=True)
    assert store.load(1) == "third"
    (kept,) = store.directory.glob("1.bad-*")
    assert (kept / "gen_batch.dp").exists(), "what was replaced is kept"


# -- dumps that are not what was written -------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first bit": lambda d: _flip(d / "gen_batch.dp", 0),
    "a bit of the version": lambda d: _flip(d / "gen_batch.dp", 9),
    "a bit of the reserved bytes": lambda d: _flip(d / "gen_batch.dp", 14),
    "a bit of the rollouts": lambda d: _flip(d / "gen_batch.dp", 500),
    "a bit of the index": lambda d: _flip(d / "gen_batch.dp", -60),
    "a bit of the tail": lambda d: _flip(d / "gen_batch.dp", -30),
    "last bit": lambda d: _flip(d / "gen_batch.dp", -1),
    "truncated": lambda d: os.truncate(d / "gen_batch.dp", 1000),
    "one byte short": lambda d: os.truncate(
        d / "gen_batch.dp", (d / "gen_batch.dp").stat().st_size - 1
    ),
    "one byte more": lambda d: (d / "gen_batch.dp").open("ab").write(b"x"),
    "zero length": lambda d: os.truncate(d / "gen_batch.dp", 0),
    "meta of zero length": lambda d: os.truncate(d / "meta.json", 0),
    "meta truncated": lambda d: os.truncate(d / "meta.json", 40),
    "meta edited": lambda d: (d / "meta.json").write_text(
        (d / "meta.json").read_text().replace('"n": 8', '"n": 9')
    ),
    "meta of no mapping": lambda d: (d / "meta.json").write_text("[1]"),
    "meta endlessly nested": lambda d: (d / "meta.json").write_text("[" * 100_000),
    "meta huge": lambda d: os.truncate(d / "meta.json", 1 << 40),
    "no meta": lambda d: (d / "meta.json").unlink(),
    "no rollouts": lambda d: (d / "gen_batch.dp").unlink(),
    "a directory for a file": lambda d: _instead(d / "gen_batch.dp", Path.mkdir),
    "a directory for meta": lambda d: _instead(d / "meta.json", Path.mkdir),
    "a pipe for a file": lambda d: _instead(d / "gen_batch.dp", os.mkfifo),
    "a link for a file": lambda d: _link_out(d / "gen_batch.dp"),
    "a link for meta": lambda d: _link_out(d / "meta.json"),
    "a link for the step": lambda d: _link_out(d),
    "a file for the step": lambda d: (shutil.rmtree(d), d.write_text("x")),
    "of another step": lambda d: _swap_in(d, ["gen_batch.dp", "meta.json"]),
    "rollouts of another step": lambda d: _swap_in(d, ["gen_batch.dp"]),
    "meta of another step": lambda d: _swap_in(d, ["meta.json"]),
    "rollouts of another run": lambda d: _of_another_run(d),
    "a bit of what lies beside": lambda d: _flip(d / "gen_batch.dp", _start_of_index(d) - 3),
    "of verl": lambda d: (
        (d / "gen_batch.dp").write_bytes(pickle.dumps({"a": 1})),
        (d / "meta.json").write_text(json.dumps({"step": 3})),
    ),
}


def _instead(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _link_out(path: Path) -> None:
    run = next(parent for parent in path.parents if parent.name == "run")
    outside = run.with_name(f"outside-{path.name}")
    os.rename(path, outside)
    path.symlink_to(outside)


def _swap_in(directory: Path, names: list[str]) -> None:
    for name in names:
        shutil.copy(directory.with_name("4") / name, directory / name)


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
            identity=Identity(n=8),
            aside=torch.randn(50),
        )
    _DAMAGES[damage](store.directory / "3")
    with caplog.at_level(logging.WARNING), pytest.raises((CorruptDumpError, NewerFormatError)):
        store.load(3)
    if damage == "a bit of the version":  # then it is a sound dump of a version to come
        return
    assert str(store.directory / "3") in caplog.text
    assert "cannot be used" in caplog.text
    (kept,) = store.directory.glob("3.bad-*")
    assert kept.name in caplog.text
    assert store.peek(3) is None
    assert store.steps() == [4]
    assert store.load(4)["step"] == 4
    store.save(3, "generated anew")
    assert store.load(3) == "generated anew"


@pytest.mark.parametrize(
    "damage", [d for d in _DAMAGES if "bit" not in d and not d.startswith("rollouts of")]
)
def test_evident_damage_is_a_miss_at_a_glance(damage: str, store: StepStore) -> None:
    for step in (3, 4):
        rollouts = {"a": torch.zeros(1000 + step)}
        store.save(step, rollouts, identity=Identity(n=8))
    _DAMAGES[damage](store.directory / "3")
    assert store.peek(3) is None
    assert store.nearest(3) == 4
    assert len(list(store.directory.glob("3.bad-*"))) == 1


def test_a_dump_that_was_replaced_meanwhile_is_not_set_aside(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlskip.store import container

    store.save(1, {"a": torch.randn(1000)})
    _flip(store.directory / "1" / "gen_batch.dp", 500)

    original = container.Reader.expand_all

    def replaced_while_reading(self: container.Reader) -> None:
        other = StepStore(store.directory)
        other.set_aside(1, "another job was quicker to see it")
        other.save(1, "anew")
        original(self)

    monkeypatch.setattr(container.Reader, "expand_all", replaced_while_reading)
    with pytest.raises(CorruptDumpError):
        store.load(1)
    assert store.load(1) == "anew"


def test_a_dump_replaced_while_it_is_read_is_read_whole(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlskip.store import dump

    store.save(1, "first")
    original = dump.read_meta

    def replaced_meanwhile(here: Any) -> DumpMeta:
        meta = original(here)
        monkeypatch.undo()
        store.save(1, "second", replace=True)
        return meta

    monkeypatch.setattr(dump, "read_meta", replaced_meanwhile)
    assert store.load(1) == "first"
    assert store.load(1) == "second"


# -- versions ----------------------------------------------------------------------------

_GOLDEN = Path(__file__).parent / "golden"


def _as_version(store: StepStore, version: int) -> None:
    meta = store.directory / "1" / "meta.json"
    said = DumpMeta.from_bytes(meta.read_bytes(), "")
    meta.write_bytes(attrs.evolve(said, version=version).to_bytes())
    dump = store.directory / "1" / "gen_batch.dp"
    data = bytearray(dump.read_bytes())
    data[8] = version
    dump.write_bytes(data)


def test_format_0_is_set_aside_with_a_clear_message(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(1, "x")
    _as_version(store, 0)
    assert store.peek(1) is None
    assert "format 0, which no release ever wrote" in caplog.text
    assert len(list(store.directory.glob("1.bad-*"))) == 1


@pytest.mark.parametrize("look", [StepStore.peek, StepStore.load, StepStore.nearest])
def test_a_newer_format_is_refused_with_what_to_install(look: Any, store: StepStore) -> None:
    store.save(1, "x")
    _as_version(store, 2)
    with pytest.raises(NewerFormatError, match=r"format 2.*reads up to 1") as caught:
        look(store, 1)
    assert "pip install -U rlskip" in str(caught.value)
    assert (store.directory / "1").exists(), "it is sound: it stays"


def test_golden_dump_of_format_1(tmp_path: Path, same: Callable[[Any, Any], bool]) -> None:
    """Written when the format was frozen: every later version must read exactly this."""
    shutil.copytree(_GOLDEN / "v1", tmp_path / "v1")
    store = StepStore(tmp_path / "v1")
    assert store.steps() == [3]
    meta = store.peek(3)
    assert meta is not None
    assert meta.identity == Identity(
        prompts="0123", n=2, prompt_len=4, response_len=8, sampling={"temperature": 1.0}
    )
    assert meta.info == {"seconds": 2.5}
    assert same(store.load(3), golden_rollouts())
    assert same(store.load_aside(3), {"rng": torch.arange(16, dtype=torch.uint8)})


def golden_rollouts() -> dict[str, Any]:
    """Every kind that format 1 has; ``python tests/store/test_steps.py`` wrote the golden dump."""
    import numpy as np
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    offsets = torch.tensor([0, 2, 5])
    batch = TensorDict(
        {
            "ids": torch.tensor([[1, 2, 300], [70_000, -5, 2**40]]),
            "mask": torch.tensor([[True, False], [False, True]]),
            "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets),
        },
        [2],
    )
    batch.set("task", NonTensorData(data="maths", batch_size=[2]))
    batch.set("each", NonTensorStack("a", "b"))
    objects = np.empty(2, object)
    objects[:] = [None, {"turns": (1, 2.5)}]
    return {
        "batch": batch,
        "long": torch.arange(300_000),
        "zeros": torch.zeros(1000, 3),
        "empty": torch.empty(0, 7, dtype=torch.int32),
        "numpy": np.linspace(0, 1, 5),
        "names": np.array(["one", "zwei"]),
        "objects": objects,
        "runs": [[1, 2, 3], [], [4, 5, 6, 7, 8, 9]],
        "strings": ["a", "é", "\ud800", "d", "e", "f", "g", "h"],
        "scalars": [None, True, -1, 2**100, 0.1, float("inf"), 1j, b"\x00", np.float32(1.5)],
        "kinds": [(1,), {2}, frozenset([3]), torch.Size([4]), torch.int8, bytearray(b"5")],
        7: {"nested": {None: []}},
    }


if __name__ == "__main__":
    StepStore(_GOLDEN / "v1").save(
        3,
        golden_rollouts(),
        identity=Identity(
            prompts="0123", n=2, prompt_len=4, response_len=8, sampling={"temperature": 1.0}
        ),
        info={"seconds": 2.5},
        aside={"rng": torch.arange(16, dtype=torch.uint8)},
    )
