"""TRL's own GRPOTrainer trains on completions that docs/recipes.md writes for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
N = 4
# trl_app's words: its prompts are "i + j =", and ids are places in its vocabulary.
PLUS, EQUALS, END = 20, 21, 23


def given() -> list[dict[str, Any]]:
    """Four completions of each of the 16 prompts; the k-th says k + 1 words."""
    return [
        {"prompt": f"{i} + {j} =", "prompt_ids": [i, PLUS, j, EQUALS],
         "completions": " ".join([str(j)] * (k + 1)), "completion_ids": [j] * (k + 1) + [END]}
        for i in range(4) for j in range(4) for k in range(N)
    ]  # fmt: skip


def test_trl_trains_on_given_completions(
    trl_jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8").partition("## Train TRL on given completions")[2]
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)[:1]
    assert "n=2" in program
    rows = given()
    exec("import rlskip\n" + program.replace("n=2", f"n={N}"), {"rows": rows})
    skip = {"dump_dir": "given", "experiment_name": "grpo", "match": "prompt",
            "on_miss": "error", "rollout": {"enable": True}}  # fmt: skip
    job = {"args": {"output_dir": "out", "max_steps": 2}, "skip": skip}
    [results] = trl_jobs("trl_app.py", tmp_path, {"given": job})
    one = results["given"]
    assert one["error"] is None
    assert one["generated"]["train"] == 0
    assert len(one["log"]) == 3, "two steps, and the end"
    assert len(one["seen"]) == 2 * 2 * N
    known = {(row["prompt"], row["completions"]) for row in rows}
    assert {(prompt, said.removesuffix(" <eos>")) for prompt, said in one["seen"]} <= known
