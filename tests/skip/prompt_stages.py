"""Stages of several kinds, whose rows say for which prompt they were made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip import SkipManager
from rlskip.batch.columns import rows_of

counter = itertools.count(1)
made: list[str] = []  # the batches that were generated


def padded(rows: list[list[int]], left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[99] * (width - len(row)) for row in rows]
    pairs = zip(fill, rows, strict=True)
    return torch.tensor([a + b if left else b + a for a, b in pairs])


def column(prompts: str) -> dict[str, Any]:
    """One row a prompt, tokens padded on both sides to what the batch needs."""
    values = [next(counter) for _ in prompts]
    asked = [[ord(p)] * (1 + ord(p) % 3) for p in prompts]
    said = [[ord(p), *[value] * (1 + value % 4)] for p, value in zip(prompts, values, strict=True)]
    seen = [torch.tensor([[1] * len(row) for row in asked][i]) for i in range(len(prompts))]
    tokens, answers = padded(asked, left=True), padded(said)
    mask = torch.tensor([[i < len(row) for i in range(answers.shape[1])] for row in said])
    front = torch.tensor(
        [[i >= tokens.shape[1] - len(row) for i in range(tokens.shape[1])] for row in seen]
    )
    return {
        "prompts": tokens,
        "responses": answers,
        "input_ids": torch.cat([tokens, answers], 1),
        "attention_mask": torch.cat([front, mask], 1).long(),
        "response_mask": mask.long(),
        "name": list(prompts),
        "value": torch.tensor(values),
        "steps": 7,  # the same in all
    }


def groups(prompts: str) -> list[dict[str, Any]]:
    """Two rows a prompt."""
    pairs = [(i, p) for i, p in enumerate(prompts) for _ in range(2)]
    return [{"uid": f"{i}", "name": p, "value": next(counter)} for i, p in pairs]


def turns(prompts: str) -> TensorDict:
    """A session of one to three turns a prompt."""
    rows = [(p, turn, n) for p in prompts for n in [1 + ord(p) % 3] for turn in range(n)]
    return TensorDict(
        {
            "name": NonTensorStack(*(p for p, *_ in rows)),
            "value": torch.tensor([next(counter) for _ in rows]),
            "is_last_step": torch.tensor([turn == n - 1 for _, turn, n in rows]),
        },
        [len(rows)],
    )


def jagged(prompts: str) -> dict[str, Any]:
    """Tensors of any length, and what belongs to the whole batch."""
    values = [next(counter) for _ in prompts]
    parts = [torch.arange(1 + value % 3) for value in values]
    return {
        "value": torch.tensor(values),
        "responses": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "name": np.array([*prompts], object),
        "more": {"twice": [2 * value for value in values]},
        "meta_info": {"timing": {"s": next(counter)}, "global_steps": 3, "same": 1},
    }


KINDS: dict[str, tuple[Any, int]] = {
    "column": (column, 1), "groups": (groups, 2), "turns": (turns, 0), "jagged": (jagged, 1)
}  # fmt: skip


def values_of(result: Any) -> list[tuple[str, int]]:
    """Of each row the prompt that it is for, and its number."""
    return [(str(row["name"]), int(row["value"])) for row in rows_of(result)]


def check_rows(result: Any) -> None:
    """Whatever the widths were, a row's tokens are those that its name and its number tell."""
    if isinstance(result, dict) and "more" in result:
        values = result["value"].tolist()
        assert result["more"]["twice"] == [2 * value for value in values]
        assert [len(part) for part in result["responses"].unbind()] == [1 + v % 3 for v in values]
        assert result["meta_info"]["same"] == 1
        assert "timing" not in result
    if not isinstance(result, dict) or "prompts" not in result:
        return
    for i, (name, value) in enumerate(values_of(result)):
        prompt, answer = [ord(name)] * (1 + ord(name) % 3), [ord(name), *[value] * (1 + value % 4)]
        width = result["prompts"].shape[1]
        seen = result["attention_mask"][i].bool()
        assert result["prompts"][i][seen[:width]].tolist() == prompt
        assert result["responses"][i][result["response_mask"][i].bool()].tolist() == answer
        assert result["input_ids"][i][seen].tolist() == prompt + answer
        assert set(result["input_ids"][i][~seen].tolist()) <= {99, 0}
        assert seen[width:].tolist() == result["response_mask"][i].bool().tolist()


def stage(kind: str) -> Callable[..., Any]:
    make = KINDS[kind][0]

    @SkipManager.annotate(role="rollout", stage=kind, totals={"timing": lambda rows: {}})
    def generate(prompts: dict[str, Any]) -> Any:
        made.append("".join(prompts["text"]))
        return make(prompts["text"])

    return lambda batch: generate({"text": [*batch], "uid": [str(i) for i in range(len(batch))]})


def run(generate: Callable[..., Any], *batches: Any, first: int = 1) -> list[Any]:
    found = []
    for step, batch in enumerate(batches, first):
        SkipManager.set_step(step)
        found.append(generate(batch))
    return found
