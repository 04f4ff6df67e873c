"""What a dump records of its rows is what its readers go by: trainers of TRL, and a stage's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlskip.batch.row_fields import RowFields
from rlskip.hosts.trl.seams import SEAMS
from rlskip.store import StepStore

N = 4  # completions of each of two prompts
PROMPTS = [[1, 2, 3]] * N + [[4]] * N
COMPLETIONS = [[10 + i, 20, *[30] * (i % 3)] for i in range(2 * N)]
LOGPROBS = [[-0.5] * len(row) for row in COMPLETIONS]
TOOL_MASK = [[1, 0, *[1] * (len(row) - 2)] for row in COMPLETIONS]
TEXTS = [f"text {i}" for i in range(2 * N)]
OUTPUTS: dict[str, tuple[Any, ...]] = {
    # What the trainers' methods return in TRL 1.16; GRPO's with vLLM and tools, too.
    "GRPOTrainer": (PROMPTS, COMPLETIONS, None, TEXTS, None, {}, None, None),
    "GRPOTrainer with vLLM": (
        PROMPTS, COMPLETIONS, TOOL_MASK, [[{"role": "assistant"}]] * 2 * N, LOGPROBS,
        {"first": [float(i) for i in range(2 * N)]}, None, None,
    ),
    "RLOOTrainer": (PROMPTS, COMPLETIONS, TEXTS),
    "SDPOTrainer": (PROMPTS, COMPLETIONS),
}  # fmt: skip


def save(root: Path, trainer: str, output: tuple[Any, ...]) -> Path:
    """Dump `output` as the trainer of this name would."""
    seam = SEAMS[trainer.split()[0]]
    named = seam.named(output)
    assert seam.output(named) == output
    columns = [name for name, part in named.items() if hasattr(part, "__len__")]
    info = RowFields.of(columns, {}).to_meta()
    kept = {**named, "metrics": {"a": [1.0]}, "num_tokens": 99}
    StepStore(root / "run_trl" / "GBS2_N4_inany_out8").save(1, kept, info=info)
    return root


@pytest.mark.parametrize("trainer", OUTPUTS)
def test_sessions_are_counted_and_shown(rlskip: Any, tmp_path: Path, trainer: str) -> None:
    dumps = save(tmp_path, trainer, OUTPUTS[trainer])
    (shown,) = rlskip("show", 1, "-d", dumps, "--sessions", 8, "--json").json
    figures = shown["figures"]
    assert (shown["rows"], figures["sessions"], figures["groups"]) == (8, 8, 2)
    assert figures["length"] == sum(map(len, COMPLETIONS)) / 8
    first = shown["sample"][0]
    assert (first["prompt"], first["response"]) == (PROMPTS[0], COMPLETIONS[0])
    names = set(shown["fields"])
    assert {"prompt_ids", "completion_ids"} <= names
    assert ("completions" in names) == ("SDPO" not in trainer)
    if "vLLM" in trainer:
        assert {"logprobs", "tool_mask", "extra_fields.first"} <= names
        assert first["log_probs"] == LOGPROBS[0]
        assert first["mask"] == TOOL_MASK[0]
    lines = rlskip("export", 1, "-d", dumps, "--to", "jsonl").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["response"] for row in rows] == COMPLETIONS
    assert all(len(row.get("completions", "")) < 10 for row in rows), "its own, not the batch's"
    assert len({row["uid"] for row in rows}) == 2
    report = rlskip("report", dumps, "--html", tmp_path / "page.html", "--json").json
    assert (report["sessions"], report["groups"]) == (8, 2)
    assert report["shown"] == 8


ROWS = {
    "ids": [{"task": "a", "try": 0}, {"task": "b", "try": 0}, {"task": "a", "try": 1}],
    "asked": [[1], [2], [1]],
    "said": [[5, 6], [7], [8]],
    "won": [1.0, 0.0, 0.5],
}
FIELDS = {"prompt": "asked", "response": "said", "reward": "won"}


@pytest.mark.parametrize(
    ("more", "groups"),
    [
        ({"group": "ids.task", "session": "ids.try"}, ["a", "b", "a"]),
        ({"n": 2}, ["0", "0", "1"]),
        ({}, ["0", "1", "0"]),  # equal prompts
    ],
)
def test_a_stages_own_names_are_read(
    rlskip: Any, tmp_path: Path, more: dict[str, Any], groups: list[str]
) -> None:
    info = RowFields.of(ROWS.keys(), {**FIELDS, **more}).to_meta()
    StepStore(tmp_path / "e_p" / "s").save(1, ROWS, info=info)
    lines = rlskip("export", 1, "-d", tmp_path, "--to", "jsonl").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["uid"], row["response"], row["reward"]) for row in rows] == [
        *zip(groups, ROWS["said"], ROWS["won"], strict=True)
    ]


def test_a_mask_of_another_length_is_never_taken_for_sampled_tokens(
    rlskip: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def dumps(name: str, mask: list[int] | None) -> Path:
        rows = {"prompt_ids": [[1]], "completion_ids": [[5, 6, 7]], "rewards": [[0.0, 0.0, 1.0]]}
        rows["completion_mask"] = [mask]
        StepStore(tmp_path / name / "e_p" / "GBSany_Nany_inany_outany").save(1, rows)
        return tmp_path / name

    odd, whole = dumps("odd", [1, 0]), dumps("whole", None)
    rlskip("report", odd, "--html", tmp_path / "page.html")
    assert caplog.text.count("completion_mask has 2 values in row 0, and its response has 3") == 1
    found = rlskip("compare", odd, whole, "--json").json
    assert found["first"]["stage"] == "mask", "not known is not sampled"
    found = rlskip("compare", odd, dumps("none", [0, 0, 0]), "--json").json
    assert found["first"]["stage"] == "mask", "nor is it known that nothing was sampled"
    assert rlskip("compare", odd, odd).code == 0
