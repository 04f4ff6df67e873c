"""The page of a genuine run of verl whose sessions have several turns, merged into one row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlskip.runs.opened import Run

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

TOOL = """
from verl.tools.function_tool import function_tool

@function_tool
def count(tokens: int) -> str:
    \"\"\"Count the tokens of an answer.

    Args:
        tokens: How many.
    \"\"\"
    return f"{tokens} tokens"
"""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def dumps(verl091: Any) -> Path:
    loops, tool = verl091.folder / "tools.yaml", verl091.folder / "tool.py"
    loops.write_text("- {name: tools, _target_: loops.Tools}\n")
    tool.write_text(TOOL)
    of = "actor_rollout_ref.rollout"
    run = verl091.train(
        "page", "v1", "+skip=rollout_tq_cache", "skip.dump_dir=dumps",
        f"{of}.agent.agent_loop_config_path={loops}", f"{of}.agent.default_agent_loop=tools",
        f"{of}.multi_turn.function_tool_path={tool}", f"{of}.multi_turn.max_assistant_turns=3",
        f"{of}.calculate_log_probs=True", "data.max_response_length=96",
        PYTHONPATH=str(HERE),
    )  # fmt: skip
    folder: Path = run.folder / "dumps"
    return folder


def test_the_page_sets_what_the_tool_said_apart(
    verl091: Any, dumps: Path, tmp_path: Path, content: Any
) -> None:
    out = tmp_path / "page.html"
    # verl's environment has transformers, for the tokenizer that the dumps name.
    command = [verl091.python, "-m", "rlskip.cli.main", "report", dumps, "--html", out, "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert (said["steps"], said["groups"], said["sessions"], said["shown"]) == (2, 8, 16, 16)
    page = content(out)
    assert page.index["runs"][0]["steps"]["sessions"] == [8, 8]
    found = page.sessions()
    texts = {int(k): text for chunk in page.chunks for k, text in chunk["texts"].items()}
    (run,) = (Run(path.parents[2]) for path in sorted(dumps.rglob("gen_batch.dp"))[:1])
    for one in run.sessions():
        (row,) = one.turns
        shown = found[one.place["step"], one.group, one.number]
        prompt, *parts = shown["parts"]
        assert prompt["ids"] == row["prompt"]
        assert [part["kind"] for part in parts] == [
            "sampled", "observed", "sampled", "observed", "sampled",
        ]  # fmt: skip
        sampled = [int(part["kind"] == "sampled") for part in parts for _ in part["ids"]]
        ids = [token for part in parts for token in part["ids"]]
        assert (ids, sampled) == (row["response"], row["mask"])
        for part in parts:
            if part["kind"] == "observed":
                said = "".join(texts[token] for token in part["ids"])
                assert "<|im_start|>tool\n" in said
                assert " tokens<|im_end|>\n<|im_start|>assistant" in said
                assert "values" not in part
            else:
                (values,) = part["values"].values()
                assert len(values) == len(part["ids"]) <= 6
