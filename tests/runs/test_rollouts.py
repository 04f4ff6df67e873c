"""Rollouts of any shape as rows: `show`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    assert [len(row["response"]) for row in padded] == padded.tokens.lengths == [3, 5]


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
    StepStore(tmp_path / "e_p" / "s").save(1, [{"text": "\x1b[2J[red]boo[/red]\x07"}])
    out = rlskip("show", 1, "-d", tmp_path).out
    assert "\\x1b[2J[red]boo[/red]\\x07" in out
    assert "\x1b" not in out


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
