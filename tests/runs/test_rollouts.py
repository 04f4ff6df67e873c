"""Rollouts of any shape as rows: `show`, trainers of TRL, and a stage's own names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlskip.batch.row_fields import RowFields
from rlskip.hosts.trl.seams import SEAMS
from rlskip.runs.columns import rollout_columns
from rlskip.runs.rollouts import Rollouts
from rlskip.store import StepStore


def test_show_gives_rows_without_padding(rlskip: Any, run_dir: Path) -> None:
    (shown,) = rlskip("show", 2, "-d", run_dir, "--sessions", 8, "--json").json
    rollouts = StepStore(run_dir).load(2)
    assert shown["fields"] == list(rollouts.keys())
    row = shown["sample"][1]
    length = int(rollouts["response_mask"][1].sum())
    assert row["prompt"] == rollouts["prompts"][1].tolist()
    assert row["response"] == rollouts["responses"][1, :length].tolist(), "without the padding"
    assert len(row["log_probs"]) == length
    assert max(row["log_probs"]) < 0, "not the padding's zero"
    assert row["reward"] == float(rollouts["rm_scores"][1].sum())
    assert [row["row"] for row in shown["sample"]] == list(range(8))
    shown = rlskip("show", run_dir / "2", "--sessions", 5).out
    assert "row 1, group s2p0, session 1, reward 1" in shown, "one of the best"
    assert {f"group s2p{i}" in shown for i in range(4)} == {True}, "one of every group"


def test_turns_are_put_in_order_and_gaps_belong_to_a_response() -> None:
    rows = [{"uid": "u", "session_id": 0, "turn": turn} for turn in (2, 0, 1)]
    (session,) = Rollouts(rollout_columns(rows)).sessions
    assert session.rows == [1, 2, 0]
    mask = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    responses = np.ones((2, 5), np.int64)
    padded = Rollouts(rollout_columns({"responses": responses, "response_mask": mask}))
    assert [len(row["response"]) for row in padded] == [3, 5]
    assert [one.length for one in padded.sessions] == [3, 5]


def test_a_reward_that_no_float_holds_is_none() -> None:
    rows = [{"input": "Q", "output": "A", "score": score} for score in (10**400, 1)]
    assert Rollouts(rollout_columns(rows)).rewards == [None, 1.0]


ASKED = {"role": "user", "content": "Q?"}
CALL = {"role": "assistant", "content": None, "tool_calls": ["f()"]}
TOOL = {"role": "tool", "content": "42"}
QUOTED = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("later", "observed"),
    [
        ([ASKED, QUOTED, TOOL], [TOOL]),
        ([ASKED, CALL, TOOL, ASKED], [TOOL, ASKED]),
        ([ASKED], [{"role": "user", "content": "<20>"}]),  # as verl repeats a prompt
        ([ASKED, TOOL], [{"role": "user", "content": "<20>"}]),  # rewritten
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_messages_between_turns_are_those_that_were_recorded(
    later: Any, observed: list[Any], has_tokens: bool
) -> None:
    said = {"role": "assistant", "content": "42"}
    rows = [
        {"uid": "u", "session": 0, "turn": 0, "raw_prompt": [ASKED], "completions": [CALL]},
        {"uid": "u", "session": 0, "turn": 1, "raw_prompt": later, "completions": [said]},
    ]
    if has_tokens:
        rows[0] |= {"prompt_ids": [1], "completion_ids": [10]}
        rows[1] |= {"prompt_ids": [1, 10, 20], "completion_ids": [12]}
    elif observed and observed[0]["role"] == "user":
        observed = []
    rollouts = Rollouts(rollout_columns(rows), decode=lambda ids: "".join(f"<{i}>" for i in ids))
    (session,) = rollouts.sessions
    assert session.messages == [ASKED, CALL, *observed, said]


def test_text_from_a_dump_cannot_touch_the_terminal(rlskip: Any, tmp_path: Path) -> None:
    """Text takes no memory that is counted."""
    StepStore(tmp_path / "e_p" / "s").save(1, [{"text": "\x1b[2J[red]boo[/red]\x07"}])
    out = rlskip("show", 1, "-d", tmp_path).out
    assert "\\x1b[2J[red]boo[/red]\\x07" in out
    assert "\x1b" not in out
    assert ("on disk" in out, "in memory" in out) == (True, False)


@pytest.mark.verl
def test_a_tokenizer_makes_text_of_tokens(
    run_dir: Path, tmp_path: Path, python_of: Callable[[str], str]
) -> None:
    """verl's environment has transformers; ours has not."""
    program = """
import base64, gzip, json, sys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from rlskip.cli.main import main
run, tokenizer, page = sys.argv[1:]
words = {f"w{i}": i for i in range(100)}
made = Tokenizer(models.WordLevel(words, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tokenizer)
main(["show", run + "/2", "--tokenizer", tokenizer, "--sessions", "1"])
main(["report", run, "--html", page, "--tokenizer", tokenizer, "--json"])
index = open(page).read().split('id="index">')[1].split("<")[0]
prompts = json.loads(gzip.decompress(base64.b64decode(index)))["runs"][0]["groups"]["prompt"]
assert main(["show", run + "/2", "--tokenizer", run]) == 2
print([text for text in prompts if "w88 w11" in text][0])
"""
    names = (run_dir, tmp_path / "tokenizer", tmp_path / "page.html")
    done = subprocess.run(
        [python_of("verl091"), "-c", program, *map(str, names)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "w88 w11 w29 w39 w24 w56"


# -- what a dump records of its rows is what its readers go by -----------------------------------


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
        assert "sampled" in rlskip("show", 1, "-d", dumps).out, "some tokens are a tool's"
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
        ({"prompt": None}, ["0", "0", "0"]),  # nothing tells them apart
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
