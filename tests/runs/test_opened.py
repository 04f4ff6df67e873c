"""rlskip.open: runs, steps, calls and rows, of which no more is read than is asked for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import rlskip
from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.batch.tables import DataProtoParts
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Dumps, compare_sides
from rlskip.config.steps import Steps
from rlskip.runs.opened import NoSuchPlaceError, Run, Runs, Step
from rlskip.store import DumpError, StepStore
from tests.faulty_files import FaultyFiles

COLUMNS: dict[str, Any] = {
    "prompts": torch.tensor([[0, 1], [0, 1], [2, 3]]),
    "responses": torch.tensor([[5, 0, 0], [6, 7, 8], [9, 9, 0]]),
    "attention_mask": torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    "rollout_log_probs": -torch.arange(9.0).reshape(3, 3),
    "rm_scores": torch.tensor([[1.0, 0, 0], [0, 0, 0.5], [0, 2, 0]]),
    "extra": torch.tensor([7, 8, 9]),
    "half": torch.ones(3).bfloat16(),  # which numpy lacks
}
UIDS = np.array(["a", "a", "b"], object)
ROWS = [
    {"group": "a", "session": 0, "prompt": [1], "response": [5], "log_probs": [-0.0], "reward": 1},
    {"group": "a", "session": 1, "prompt": [1], "response": [6, 7, 8],
     "log_probs": [-3, -4, -5], "reward": 0.5},
    {"group": "b", "session": 0, "prompt": [2, 3], "response": [9, 9], "log_probs": [-6, -7],
     "reward": 2},
]  # fmt: skip


def batch(**columns: Any) -> TensorDict:
    return TensorDict({**COLUMNS, **columns}, [3])


KINDS: dict[str, Any] = {
    "mapping": {**COLUMNS, "uid": list(UIDS)},
    "DataProto": DataProtoParts(batch(), {"uid": UIDS}, {"n": 1}),
    "queue": {
        "groups": [{"uid": "a", "tags": {}}],
        "keys": ["a_0_0", "a_1_0", "b_0_0"],
        "fields": batch(),
    },
    "rows": [  # without padding, which is not told from the tokens of a single row
        {
            "uid": uid,
            "prompt_ids": row["prompt"],
            "completion_ids": row["response"],
            "logprobs": row["log_probs"],
            "reward": row["reward"],
            **{name: COLUMNS[name][i] for name in ("extra", "half")},
        }
        for i, (uid, row) in enumerate(zip(UIDS, ROWS, strict=True))
    ],
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "e_p" / "GBS2_N2_in2_out3"


@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_are_the_same_whatever_holds_them(kind: str, directory: Path) -> None:
    StepStore(directory).save(4, KINDS[kind])
    run = rlskip.open(directory)
    found = list(run.iter_rows())
    for i, (row, expected) in enumerate(zip(found, ROWS, strict=True)):
        assert {name: row[name] for name in expected} == expected
        assert (row["step"], row["call"], row["row"], row["turn"]) == (4, None, i, 0)
        assert (row["uid"], row["extra"]) == (UIDS[i], 7 + i)
        assert "responses" not in row
    for chosen in (["reward"], ["extra", "prompt"], ["group", "session"], ["log_probs", "mask"]):
        some = list(run.iter_rows(chosen))
        assert [list(row) for row in some] == [["step", "call", "row", *chosen]] * 3
        assert some == [{name: row[name] for name in some[0]} for row in found]
    with pytest.raises(DumpError, match="'nothing'") as error:
        list(run.iter_rows(["nothing"]))
    assert "extra" in error.value.remedy


CHAT = [{"role": "user", "content": "Hi"}]
ODD: dict[str, Any] = {
    "mapping": {**COLUMNS, "extra": {"score": [1, 2, 3]}, "one": "text", "other": [1, 2, 3, 4]},
    "own names": {**COLUMNS, "uid": list(UIDS), "mask": [None] * 3, "rank": [7, 8, 9]},
    "no prompts": {"responses": COLUMNS["responses"], "rm_scores": COLUMNS["rm_scores"]},
    "chats that are the prompts": {
        "num_tokens": 99,
        "prompt": [CHAT, CHAT, [*CHAT, *CHAT]],
        "completion": list("xyz"),
        "reward": [1.0, 0.0, 1.0],
    },
    "chats and tokens": {**COLUMNS, "prompt": [CHAT, [*CHAT, *CHAT], CHAT]},
    "no tokens": {"one": 1, "prompts": ["a", "b"], "texts": list("xyz"), "labels": [1, 0, 1]},
    "uids of another length": {**COLUMNS, "uid": ["a", "b"], "score": [1, 2], "reward": None},
    "uids that are none": {**COLUMNS, "uid": [None, 0.5, None]},
    "jagged": {
        "responses": torch.nested.nested_tensor_from_jagged(
            torch.arange(4), torch.tensor([0, 1, 3, 4])
        ),
        "one": [1],
    },
    "lazy queue": {
        **KINDS["queue"],
        "fields": LazyStackedTensorDict(
            *(
                TensorDict({"prompts": torch.arange(i + 1), "responses": torch.arange(2)}, [])
                for i in range(3)
            )
        ),
    },
}


@pytest.mark.parametrize("kind", list(ODD))
@pytest.mark.parametrize("described", [False, True])
def test_a_field_alone_has_the_values_that_it_has_among_all(
    kind: str, described: bool, directory: Path
) -> None:
    names = [str(name) for name in columns_of(ODD[kind])]
    info = RowFields.of(names).to_meta() if described and kind != "lazy queue" else {}
    StepStore(directory).save(1, ODD[kind], info=info)
    run = rlskip.open(directory).run
    rows = list(run.iter_rows())
    assert len(rows) == 3
    for name in rows[0]:
        assert [row.get(name) for row in run.iter_rows([name])] == [row[name] for row in rows]
    assert [one.rows for one in run.sessions([])] == [one.rows for one in run.sessions()]


@pytest.mark.parametrize("kind", [kind for kind in ODD if "chats" in kind])
def test_equal_chats_are_prompts_of_one_group(kind: str, directory: Path) -> None:
    StepStore(directory).save(1, ODD[kind])
    run = rlskip.open(directory).run
    last = "1" if kind == "chats that are the prompts" else "0"
    assert [row["group"] for row in run.iter_rows()][::2] == ["0", last]
    assert len(list(run.groups())) == 2


@pytest.mark.parametrize("kind", list(KINDS)[:-1])
def test_a_field_reads_that_field_alone(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 2**62, (3, 100_000)))
    rollouts = {
        "mapping": {**COLUMNS, "noise": noise},
        "DataProto": DataProtoParts(batch(noise=noise), {"uid": UIDS}, {}),
        "queue": {**KINDS["queue"], "fields": batch(noise=noise)},
    }[kind]
    StepStore(directory).save(1, rollouts)
    read, pread = [], os.pread

    def count(handle: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(handle, size, offset)

    monkeypatch.setattr(os, "pread", count)
    run = rlskip.open(directory)
    assert [row["reward"] for row in run.iter_rows(["reward"])] == [1, 0.5, 2]
    assert sum(read) < 10_000
    assert {"noise", "extra"} <= set(run.fields())
    assert sum(read) < 20_000
    list(run.iter_rows(["noise"]))
    assert sum(read) > 2_000_000


def test_fields_are_those_of_all_steps_and_of_rows_that_are_mappings(directory: Path) -> None:
    store = StepStore(directory)
    store.save(1, {"responses": [[1], [2]]})
    store.save(2, {"responses": [[1], [2]], "later": [1, 2]})
    store.save(3, [{"responses": [1], "own": 1}, {"responses": [2], "other": 2}])
    run = rlskip.open(directory).run
    assert run.fields() == ["responses", "later", "own", "other"]
    assert run[3].fields() == ["responses", "own", "other"]


def test_a_step_has_a_dump_that_is_not_quarantined(directory: Path) -> None:
    store = StepStore(directory)
    later = "part-1"
    for step, call in ((1, ""), (1, later), (2, later), (3, ""), (3, later), (4, "")):
        store.save(step, KINDS["mapping"], call=call)
    for step, call in ((2, later), (3, "")):
        store.quarantine(step, "for a test", call)
    (directory / "5").mkdir()
    run = rlskip.open(directory).run
    assert run.steps() == [step.number for step in run] == [1, 3, 4]
    assert [step in run for step in range(6)] == [False, True, False, True, True, False]
    assert [len(list(step.iter_rows(["reward"]))) for step in run] == [6, 3, 3]
    for missing in (2, 5):
        with pytest.raises(NoSuchPlaceError, match="no dump"):
            run[missing]
    kept = [path.relative_to(directory).name for path in run.quarantine()]
    assert [name.partition(".bad-")[0] for name in kept] == ["2.part-1", "3"]


def test_a_thousand_steps_open_without_being_looked_at(directory: Path) -> None:
    for step in (1, 500):
        StepStore(directory).save(step, KINDS["mapping"])
    for step in range(1_000):
        (directory / str(step)).mkdir(exist_ok=True)
    with FaultyFiles(directory.parents[1]) as files:
        runs = rlskip.open(directory.parents[1])
        opened = len(files.operations)
        assert next(iter(runs[0][500:].iter_rows()))["step"] == 500
    assert opened < 30
    assert len(files.operations) < opened + 60
    assert runs[0].steps() == [1, 500]


def test_reading_writes_nothing_and_loads_no_torch(directory: Path) -> None:
    for step, kind in enumerate(KINDS, 1):
        StepStore(directory).save(step, KINDS[kind])
    # This process's sign of life, which it touches meanwhile, is not a file of the run's.
    files = [path for path in directory.rglob("*") if path.is_file() and ".work" not in path.parts]
    before = {path: path.stat().st_mtime_ns for path in files}
    code = f"""
        import sys, rlskip
        run = rlskip.open({str(directory)!r})
        for step in run:
            rows = list(step.iter_rows())
            assert [row["response"] for row in rows] == {[row["response"] for row in ROWS]}
            assert [row["half"] for row in rows] == [1, 1, 1]
            assert [row["extra"] for row in step.iter_rows(["extra"])] == [7, 8, 9]
            assert [len(group.sessions) for group in step.groups()] == [2, 1]
            assert [dump.verify() for dump in step.dumps()] == [None]
        repr(run)
        print(sorted({{"torch", "tensordict", "hydra"}} & sys.modules.keys()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.check_output(command, text=True).strip() == "[]"
    assert {path: path.stat().st_mtime_ns for path in files} == before
    there = [p for p in directory.rglob("*") if p.is_file() and ".work" not in p.parts]
    assert sorted(there) == sorted(files)


def test_runs_and_steps_are_named_and_sliced(dumps: Path) -> None:
    runs = rlskip.open(dumps)
    assert isinstance(runs, Runs)
    assert [run.name.split("/")[0] for run in runs] == ["grpo-lr2_tiny", "grpo_tiny"]
    run = runs["grpo_tiny/GBS4_N2_in6_out8"]
    assert run == runs[1] == rlskip.open(run.directory)
    assert [len(list(one.iter_rows(["reward"]))) for one in (runs, run, run[1:3], run[2])] == [
        48, 24, 16, 8,
    ]  # fmt: skip
    assert {row["run"] for row in runs.iter_rows(["reward"])} == {one.name for one in runs}
    assert [one.name for one in list(runs)[1:]] == [run.name]
    assert list(next(run.iter_rows(["run", "step", "reward"]))) == ["step", "call", "row", "reward"]
    assert ([step.number for step in run[2:]], run[1:3][2:].steps()) == ([2, 3], [2])
    assert (run[::2].steps(), 2 in run, 9 in run) == ([2], True, False)
    assert (np.int64(2) in run, run[np.int64(2)]) == (True, run[2]), "as a table has them"
    assert repr(run) == f"<run {run.name}: steps 1-3>"
    assert "2 runs in" in repr(runs)
    assert (repr(run[2]), repr(Step(run, 2, 0))) == (
        f"<step {run.name}/2>", f"<step {run.name}/2/0>",
    )  # fmt: skip
    with pytest.raises(NoSuchPlaceError) as error:
        run[9]
    assert error.value.remedy == "its steps are 1-3"
    assert rlskip.open(run.directory).run == rlskip.open(run.directory.parent).run == run
    with pytest.raises(NoSuchPlaceError, match="2 runs"):
        _ = runs.run
    with pytest.raises(NoSuchPlaceError, match="nothing"):
        runs["nothing"]
    with pytest.raises(ValueError, match="counted upwards"):
        run[-2:]


def test_a_column_of_a_rows_name_and_other_values_is_kept(directory: Path) -> None:
    more = {"prompt_ids": [1], "completion_ids": [2], "step": 9}
    StepStore(directory).save(1, [{"prompt": i, "prompt_text": i, **more} for i in (3, 4)])
    run: Any = rlskip.open(directory)
    for own in ("own_prompt", "own_prompt_text"):
        for fields in (None, [own], iter([own])):
            assert [row[own] for row in run.iter_rows(fields)] == [3, 4]
    (row, _) = run.iter_rows()
    assert (row["prompt"], row["step"], row["own_step"], row["group"]) == ([1], 1, 9, "3")


class Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)


def test_a_tokenizer_adds_text(directory: Path) -> None:
    StepStore(directory).save(1, KINDS["mapping"])
    run = rlskip.open(directory, tokenizer=Letters())
    assert [row["response_text"] for row in run.iter_rows()] == ["f", "ghi", "jj"]
    (row, *_) = run[1:].iter_rows(["prompt_text"])
    assert row["prompt_text"] == "b"


# -- a loop over many steps takes the memory of one ----------------------------------------------

STEPS = 100


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("long") / "e_p" / "GBS4_N2_in1_out1"
    store = StepStore(directory)
    for step in range(1, STEPS + 1):
        columns = {"uid": list("00112233"), "responses": np.arange(1600).reshape(8, 200) + step}
        store.save(step, {**columns, "rewards": np.zeros(8)})
    found = rlskip.open(directory)
    assert isinstance(found, Run)
    return found


def compare(run: Run) -> None:
    assert compare_sides(*Dumps.pair(run, run), Rounding(), Steps.parse("all")).is_equal


READERS: dict[str, Callable[[Run], object]] = {
    "rows": lambda run: sum(1 for _ in run.iter_rows()),
    "groups": lambda run: sum(len(group.sessions) for group in run.groups()),
    "compare": compare,
}


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is traced, and only reference counts free it: a cycle would keep what it holds."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("traced")
def test_memory_does_not_grow_with_the_steps(long_run: Run, name: str) -> None:
    def peak(some: Run) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        READERS[name](some)
        return tracemalloc.get_traced_memory()[1] - before

    peak(long_run[:3])  # imports
    few = peak(long_run[:21])
    # What one step takes, and 2 kB for each step; its rows take 13 kB. What another thread of the
    # tests takes meanwhile counts, too, but not every time.
    found: list[int] = []
    while not found or (found[-1] >= few + 2000 * STEPS and len(found) < 3):
        found.append(peak(long_run))
    assert found[-1] < few + 2000 * STEPS, (few, found)
