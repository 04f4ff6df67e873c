"""docs/recipes.md: its programs run in order, in one namespace, and make what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

# Two groups of two sessions; of the first one's, one is right.
PROMPTS = {0: ("What is 2+2?", [1, 2]), 1: ("What is 3+3?", [1, 3])}
SAMPLES = [
    {"group_index": group, "prompt": text, "response": f"said {k}", "tokens": [*ids, 10 + k, 20],
     "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -1.0 - k],
     "reward": float(group or k)}
    for group, (text, ids) in PROMPTS.items() for k in range(2)
]  # fmt: skip


class Tokenizer:
    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's programs leave in their namespace, and in this folder."""
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 7, "samples": SAMPLES}, "rollout_7.pt")
    made: dict[str, Any] = {"tokenizer": Tokenizer()}
    page = PAGE.read_text(encoding="utf-8").partition("<!-- needs: verl -->")[0]
    for block in re.findall(r"(?ms)^```python\n(.*?)^```", page):
        exec(compile(block, PAGE.name, "exec"), made)
    return made


def test_the_recipes_make_what_they_say(names: dict[str, Any]) -> None:
    assert names["rollouts"]["completion_ids"] == [[10, 20], [11, 20]]
    assert names["useful"] == [(1, 2)]
    assert [row["reward"] for row in names["rows"]] == [0.25] * 4
    first, second, *_ = map(json.loads, Path("text/7.jsonl").read_text().splitlines())
    assert first == {"input": "1 2", "output": "10 20", "gts": None, "score": 0.0, "step": 7}
    assert second["score"] == 1.0


def test_atif_has_what_its_models_ask_for(names: dict[str, Any]) -> None:
    """No others than the fields of v1.7 are allowed there."""
    files = sorted(Path("atif").iterdir())
    assert [file.stem for file in files] == ["7-0-0", "7-0-1", "7-1-0", "7-1-1"]
    for file in files:
        made = json.loads(file.read_text())
        assert (made["schema_version"], made["trajectory_id"]) == ("ATIF-v1.7", file.stem)
        assert made.keys() <= {"schema_version", "trajectory_id", "agent", "steps", "extra"}
        assert made["agent"].keys() == {"name", "version"}
        assert [one["step_id"] for one in made["steps"]] == [1, 2], "from 1, without a gap"
        for one in made["steps"]:
            assert one["source"] in ("system", "user", "agent")
            assert isinstance(one["message"], str)
            assert one["source"] == "agent" or "metrics" not in one
    said = json.loads(files[1].read_text())
    assert [one["message"] for one in said["steps"]] == ["What is 2+2?", "said 1"]
    assert said["steps"][1]["metrics"] == {
        "prompt_token_ids": [1, 2], "completion_token_ids": [11, 20], "logprobs": [-0.5, -2.0],
    }  # fmt: skip
    assert said["extra"] == {"reward": 1.0, "group": "0"}


def test_traces_have_what_verifiers_reads(names: dict[str, Any]) -> None:
    episodes = [json.loads(line) for line in Path("traces.jsonl").read_text().splitlines()]
    assert len(episodes) == 4
    for one in episodes:
        assert one["run"]["work"] == {"type": "train", "step": 7}
        (trace,) = one["traces"]
        for i, node in enumerate(trace["nodes"]):
            assert node["parent"] == (i - 1 if i else None)
            assert len(node.get("mask", [])) == len(node.get("token_ids", []))
            assert len(node.get("logprobs", [])) == sum(node.get("mask", []))
    trace = episodes[1]["traces"][0]
    assert trace["rewards"] == {"reward": {"score": 1.0}}
    assert [node["message"]["content"] for node in trace["nodes"]] == ["What is 2+2?", "said 1"]
    assert trace["nodes"][1]["token_ids"] == [1, 2, 11, 20]
    assert trace["nodes"][1]["mask"] == [False, False, True, True]
