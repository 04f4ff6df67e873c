"""`rlskip rescore --write`: a run of its own with the new scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import rlskip as package
from rlskip.batch.tables import DataProtoParts
from rlskip.rescore.writing import WriteError, with_scores
from rlskip.store import Identity, StepStore
from tests.rescore.judged import RUN, answer, save

SCORES, LENGTHS = {0: 0.5, 2: 2.0}, [2, 3, 1]
TOKENS = torch.tensor([[0.0, 1, 0], [0, 0, 7], [0, 0, 0]])
NEW = [[0.0, 0.5, 0], [0, 0, 7], [2, 0, 0]]


def ragged(layout: torch.layout) -> torch.Tensor:
    rows = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
    return torch.nested.nested_tensor(rows, layout=layout)


RAGGED = [row[:n] for row, n in zip(NEW, LENGTHS, strict=True)]
COLUMNS: dict[str, tuple[Any, Any]] = {
    "a token": (TOKENS, NEW),
    "a row": (torch.tensor([1.0, 2, 3]), [0.5, 2, 2]),
    "whole numbers": (torch.tensor([1, 2, 3]), [0.5, 2, 2]),
    "[B, 1]": (torch.tensor([[1.0], [2], [3]]), [[0.5], [2], [2]]),
    "jagged": (ragged(torch.jagged), RAGGED),
    "nested": (ragged(torch.strided), RAGGED),
    "array": (TOKENS.numpy(), NEW),
    "numbers": ([1.0, 2, None], [0.5, 2, 2]),
    "lists": ([row.tolist() for row in TOKENS], NEW),
    "objects": (np.array([1.0, 2, None], object), [0.5, 2, 2]),
    "not finite": (torch.tensor([torch.nan, 2, torch.inf]), [0.5, 2, 2]),
    "not finite, a token": (
        torch.tensor([[0, torch.nan], [1, 0], [0, 0]]),
        [[0, 0.5], [1, 0], [2, 0]],
    ),
    "whole numbers, jagged": (
        torch.nested.nested_tensor([torch.tensor([n]) for n in range(3)], layout=torch.jagged),
        [[0.5], [1], [2]],
    ),
}


def plain(column: Any) -> Any:
    if isinstance(column, torch.Tensor) and column.is_nested:
        return [row.tolist() for row in column.unbind()]
    return column.tolist() if hasattr(column, "tolist") else column


@pytest.mark.parametrize("name", COLUMNS)
def test_each_form_of_rewards_is_replaced(name: str) -> None:
    column, new = COLUMNS[name]
    before = plain(column)
    found = with_scores({"rewards": column, "other": [1, 2, 3]}, "rewards", SCORES, LENGTHS)
    assert plain(found["rewards"]) == new
    assert found["other"] == [1, 2, 3]
    assert str(plain(column)) == str(before)  # a NaN is not equal to itself


KINDS = {
    "TensorDict": lambda: TensorDict({"rewards": TOKENS.clone()}, [3]),
    "lazy": lambda: LazyStackedTensorDict(
        *(TensorDict({"rewards": TOKENS[i, :n].clone()}, []) for i, n in enumerate(LENGTHS))
    ),
    "queue": lambda: {
        "groups": [], "keys": ["a_0_0", "a_1_0", "b_0_0"],
        "fields": TensorDict({"rewards": ragged(torch.jagged)}, [3]),
    },
    "batch": lambda: DataProtoParts(TensorDict({"rewards": TOKENS.clone()}, [3]), {}, {}),
    "non-tensors": lambda: DataProtoParts(None, {"rewards": np.array([1.0, 2, 3], object)}, {}),
    "rows": lambda: [{"rewards": row} for row in TOKENS],
    "tuple of rows": lambda: tuple({"rewards": row} for row in TOKENS),
    "whole numbers": lambda: [{"rewards": row} for row in TOKENS.long().numpy()],
    "a row without": lambda: [{"uid": "a"}, {"rewards": 1.0}, {"rewards": None}],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_rollouts_is_rescored(kind: str, tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    scored = with_scores(KINDS[kind](), "rewards", SCORES, LENGTHS)
    assert type(scored) is type(KINDS[kind]())
    store.save(1, scored)
    (rollouts,) = package.open(tmp_path)[1].rollouts()
    assert rollouts.rewards[0] == 0.5
    assert rollouts.rewards[2] == 2.0


def test_the_run_has_the_name_identity_and_other_columns_of_the_first(
    judges: Path, rlskip: Any
) -> None:
    save(judges / "dumps", steps=2)
    store = StepStore(judges / "dumps" / RUN)
    identity = Identity.of({"prompts": "hash", "n": 4})
    columns = store.load(2)
    store.save(3, columns, identity=identity, info={"job": "j", "seconds": 3.5}, sidecar={"rng": 7})
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one", "--write", judges / "n")
    for written in (3, 3):  # what is there already stays
        assert f"{written} dumps in" in rlskip(*command).out
    new = StepStore(judges / "n" / RUN)
    assert new.steps() == [1, 2, 3]
    meta = new.read_meta(3)
    assert meta is not None
    assert meta.identity == identity
    assert meta.info["rescored"]["reward"] == "judges.one"
    assert (meta.info["job"], meta.info["seconds"]) == ("j", 3.5)
    assert new.load(3, part="aside") == {"rng": 7}
    loaded = new.load(3)
    assert loaded["score"] == [len(answer(2, i)) / 8 + (i % 4 == 1) for i in range(16)]
    assert {**loaded, "score": 0} == {**columns, "score": 0}
    assert store.load(3) == columns


def test_a_dump_that_is_there_stays_only_for_the_same_rollouts_and_scores(
    judges: Path, rlskip: Any
) -> None:
    columns = {"input": ["a"], "output": ["b"], "score": [0.0]}
    store = StepStore(judges / "dumps" / RUN)
    store.save(1, columns)
    command = ("rescore", "1", "-d", judges / "dumps", "--reward", "judges:one", "--write", "n")
    for truth, code in (("b", 0), ("b", 0), ("c", 2)):
        (judges / "data.jsonl").write_text(
            f'{{"prompt": "a", "data_source": "", "gts": "{truth}"}}'
        )
        assert rlskip(*command, "--data", "data.jsonl").code == code
    store.quarantine(1, "test")
    store.save(1, {**columns, "more": ["generated again"]})
    (judges / "data.jsonl").write_text('{"prompt": "a", "data_source": "", "gts": "b"}')
    said = rlskip(*command, "--data", "data.jsonl")
    assert (said.code, "other rollouts or other scores" in said.err) == (2, True)


def test_of_failed_sessions_alone_the_others_keep_their_scores(judges: Path, rlskip: Any) -> None:
    save(judges / "dumps", steps=1)
    command = ("rescore", "1", "-d", judges / "dumps", "--reward", "judges:trl", "--only-failed")
    assert rlskip(*command, "--write", judges / "n").code == 0
    found = StepStore(judges / "n" / RUN).load(1)["score"]
    assert found == [1.0 if i % 4 == 1 else len(answer(1, i)) / 8 for i in range(16)]


def test_a_run_without_rewards_is_scored_and_not_written(judges: Path, rlskip: Any) -> None:
    StepStore(judges / "dumps" / RUN).save(1, {"input": ["a"], "output": ["b"], "gts": ["b"]})
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one")
    assert rlskip(*command, "--json").json["new"]["mean"] == 1.125
    assert rlskip(*command, "--write", judges / "n").code == 2
    with pytest.raises(WriteError, match="tuple"):
        with_scores({"rewards": (1.0,)}, "rewards", {0: 1.0}, [1])
    with pytest.raises(WriteError, match="not numbers"):
        with_scores({"rewards": [[[1.0], [1.0, 2.0]]]}, "rewards", {0: 1.0}, [1])
    without_tokens = {"rewards": [[], [1.0]]}
    assert with_scores(without_tokens, "rewards", {0: 0.0}, [0, 1]) == without_tokens
    with pytest.raises(WriteError, match="no token"):
        with_scores(without_tokens, "rewards", {0: 1.0}, [0, 1])
