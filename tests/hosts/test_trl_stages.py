"""TRL's own GRPOTrainer records its stages; what differs is named at its stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.timeout(900)]

# name -> what differs from the golden run, and the stage and step at which that shows first
CASES: dict[str, tuple[dict[str, Any], str | None, int]] = {
    "again": ({}, None, 0),
    "advantages": ({"plant": "advantages"}, "advantages", 1),
    "nan": ({"plant": "nan"}, "log_probs", 2),
    "learning_rate": ({"args": {"learning_rate": 1e-3}}, "metrics.learning_rate", 1),
    "loss_type": ({"args": {"loss_type": "dr_grpo"}}, "metrics.loss", 1),
}


def job(name: str, more: dict[str, Any]) -> dict[str, Any]:
    return {
        **more,
        "args": {"output_dir": f"out/{name}", **more.get("args", {})},
        "skip": {"dump_dir": "dumps", "experiment_name": "same", "rollout": {"enable": True}},
        "record": {"enable": True, "dump_dir": f"records/{name}"},
    }


@pytest.fixture(scope="module")
def trained(trl_jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what each case recorded."""
    folder = tmp_path_factory.mktemp("trl_stages")
    cases = {"golden": {}, **{name: more for name, (more, *_) in CASES.items()}}
    jobs = {name: job(name, more) for name, more in cases.items()}
    [results] = trl_jobs("trl_app.py", folder, jobs)
    assert {name: one["error"] for name, one in results.items()} == dict.fromkeys(results)
    return folder / "records"


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named_at_its_stage(trained: Path, rlskip: Any, name: str) -> None:
    _, stage, step = CASES[name]
    answer = rlskip("compare", trained / "golden", trained / name, "--json")
    if stage is None:
        assert answer.code == 0, answer.out
        names = {one["stage"] for one in answer.json["steps"][0]["stages"]}
        assert {"rollouts", "rewards", "advantages", "log_probs", "metrics.loss"} <= names
        return
    assert answer.code == 1
    first = answer.json["first"]
    assert (first["stage"], first["step"]) == (stage, step), answer.json["verdict"]
    if not stage.startswith("metrics"):
        assert first["at"]["row"] is not None
    if name == "nan":
        assert (first["off"], first["at"]["b"]) == (1, None)
        assert first["at"]["token"] is not None


def test_a_bundle_of_a_step_has_equal_advantages_and_its_loss(
    trained: Path, rlskip: Any, tmp_path: Path
) -> None:
    out = tmp_path / "step.bundle"
    where = ("bundle", trained.parent / "dumps", 1, "-o", out)
    assert rlskip(*where, "--records", trained / "golden").code == 0
    stages = ("--advantages", "grpo,eps=1e-4", "--loss", "grpo")
    advantages, loss = rlskip("bundle", "--replay", out, *stages, "--json").json["stages"]
    assert advantages["state"] == "equal", advantages
    assert loss["state"] in ("equal", "within rounding"), loss


# -- completions that docs/recipes.md writes for it -----------------------------------------------
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
