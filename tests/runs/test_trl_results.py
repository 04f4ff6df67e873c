"""Dumps of TRL are shown as sessions with their tokens, although their tuples have no names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.store import StepStore

N = 4  # completions of each of two prompts
PROMPTS = [[1, 2, 3]] * N + [[4]] * N
COMPLETIONS = [[10 + i, 20, *[30] * (i % 3)] for i in range(2 * N)]
LOGPROBS = [[-0.5] * len(row) for row in COMPLETIONS]
TOOL_MASK = [[1, 0, *[1] * (len(row) - 2)] for row in COMPLETIONS]
TEXTS = [f"text {i}" for i in range(2 * N)]
OUTPUTS: dict[str, tuple[Any, ...]] = {
    # What the `_generate` of GRPO and of RLOO returns in TRL 1.16.
    "grpo": (PROMPTS, COMPLETIONS, None, TEXTS, None, {}, None, None),
    "grpo with vLLM and tools": (
        PROMPTS, COMPLETIONS, TOOL_MASK, [[{"role": "assistant"}]] * 2 * N, LOGPROBS,
        {"first": [float(i) for i in range(2 * N)]}, None, None,
    ),
    "rloo": (PROMPTS, COMPLETIONS, TEXTS),
    "sdpo": (PROMPTS, COMPLETIONS),
}  # fmt: skip


def save(root: Path, output: Any) -> Path:
    kept = {"output": output, "metrics": {"a": [1.0]}, "num_tokens": 99}
    StepStore(root / "run_trl" / "GBS2_N4_inany_out8").save(1, kept)
    return root


@pytest.mark.parametrize("trainer", OUTPUTS)
def test_sessions_are_counted_and_shown(rlskip: Any, tmp_path: Path, trainer: str) -> None:
    dumps = save(tmp_path, OUTPUTS[trainer])
    (shown,) = rlskip("show", 1, "-d", dumps, "--json").json
    assert (shown["rows"], shown["sessions"], shown["groups"]) == (8, 8, 2)
    assert shown["mean_length"] == sum(map(len, COMPLETIONS)) / 8
    assert shown["whole"]["num_tokens"] == 99
    first = shown["sample"][0]
    assert (first["prompt"], first["response"]) == (PROMPTS[0], COMPLETIONS[0])
    names = {field["name"] for field in shown["fields"]}
    assert {"prompt_ids", "completion_ids"} <= names
    assert ("completions" in names) == (trainer != "sdpo")
    if "vLLM" in trainer:
        assert {"logprobs", "completion_mask", "first"} <= names
        assert first["log_probs"] == LOGPROBS[0]
        assert first["mask"] == TOOL_MASK[0]
    lines = rlskip("export", 1, "-d", dumps, "--to", "jsonl").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["response"] for row in rows] == COMPLETIONS
    assert "output" not in rows[0]
    assert len({row["uid"] for row in rows}) == 2
    report = rlskip("report", dumps, "--html", tmp_path / "page.html", "--json").json
    assert (report["sessions_counted"], report["groups_counted"]) == (8, 2)
    assert report["sessions_shown"] == 8


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in one tensor, padded with 0 on one side, and the mask of what is not padding."""
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    tokens = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    ones = [[1] * len(row) for row in rows]
    mask = [pad + one if left else one + pad for one, pad in zip(ones, pads, strict=True)]
    return torch.tensor(tokens), torch.tensor(mask)


@pytest.mark.parametrize("trainer", ["online_dpo", "gkd"])
def test_padded_tensors_are_shown_without_their_padding(
    rlskip: Any, tmp_path: Path, trainer: str
) -> None:
    prompts, completions = padded(PROMPTS, left=True), padded(COMPLETIONS, left=False)
    if trainer == "online_dpo":
        output: tuple[Any, ...] = (*prompts, *completions)
    else:
        tokens, seen = (torch.hstack(pair) for pair in zip(prompts, completions, strict=True))
        labels = torch.where(seen.bool(), tokens, -100)
        labels[:, : prompts[0].shape[1]] = -100
        output = tokens, seen, labels
    dumps = save(tmp_path, output)
    (shown,) = rlskip("show", 1, "-d", dumps, "--sessions", 8, "--json").json
    assert (shown["sessions"], shown["groups"]) == (8, 2)
    assert shown["mean_length"] == sum(map(len, COMPLETIONS)) / 8
    assert [row["prompt"] for row in shown["sample"]] == PROMPTS
    assert [row["response"] for row in shown["sample"]] == COMPLETIONS


def test_diff_names_the_session_that_differs(rlskip: Any, tmp_path: Path) -> None:
    other = [*COMPLETIONS[:3], [99, *COMPLETIONS[3][1:]], *COMPLETIONS[4:]]
    a = save(tmp_path / "a", OUTPUTS["rloo"])
    b = save(tmp_path / "b", (PROMPTS, other, TEXTS))
    (found,) = rlskip("diff", a, b, "--json").json["differences"]
    assert (found["a"], found["b"], found["token"]) == (3, 3, 0)


@pytest.mark.parametrize("output", [(), ([1], [2]), ([[1]], [[2], [3]]), "text", ("a", "b")])
def test_another_tuple_is_shown_as_it_is(rlskip: Any, tmp_path: Path, output: Any) -> None:
    dumps = save(tmp_path, output)
    assert rlskip("show", 1, "-d", dumps).code == 0
    assert rlskip("export", 1, "-d", dumps, "--to", "jsonl").code == 0
