"""Every trainer of TRL that generates: the second run generates nothing, or it is refused by name.

And environments: replayed where rewards read what the dump holds, else refused by name; and the
stages that GRPO records. Real trainers of the interpreter that $RLSKIP_TRL names (`.ci/env trl`
makes it).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.timeout(900)]

GENERATE = (
    "GRPOTrainer", "RLOOTrainer", "GMPOTrainer", "SDPOTrainer", "SDFTTrainer",
    "DistillationTrainer",
)  # fmt: skip
REFUSED = ("A2POTrainer", "GKDTrainer", "OnlineDPOTrainer")
SAME_PLACE = ("GRPOTrainer", "RLOOTrainer")


def skip(name: str) -> dict[str, Any]:
    return {"dump_dir": f"dumps/{name}", "rollout": {"enable": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, trl_jobs: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl_trainers")
    jobs = {
        f"{which} {name}": {"trainer": name, "skip": None if which == "bare" else skip(name)}
        for name in GENERATE
        for which in ("bare", "first", "second")
    }
    jobs |= {name: {"trainer": name, "skip": skip("others")} for name in (*REFUSED, "SFTTrainer")}
    jobs |= {f"same place {name}": {"trainer": name, "skip": skip("same")} for name in SAME_PLACE}
    results: list[dict[str, Any]] = trl_jobs("trl_trainers_app.py", folder, jobs)
    return results[0]


@pytest.mark.parametrize("name", GENERATE)
def test_the_second_run_generates_nothing_and_logs_the_same(
    name: str, runs: dict[str, Any]
) -> None:
    bare, first, second = (runs[f"{which} {name}"] for which in ("bare", "first", "second"))
    assert bare["error"] is first["error"] is second["error"] is None
    assert bare["generated"] == first["generated"] == 2, "for two steps of two batches"
    assert second["generated"] == 0
    assert len([line for line in bare["log"] if "loss" in line]) == 2
    assert json.dumps(bare["log"]) == json.dumps(first["log"]) == json.dumps(second["log"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_without_a_method_to_replace_is_refused_by_name(
    name: str, runs: dict[str, Any]
) -> None:
    assert runs[name]["generated"] == 0
    assert runs[name]["error"].startswith("AttachError: rlskip.hosts.trl.attach: rlskip knows no")
    assert name in runs[name]["error"]


def test_a_trainer_that_never_generates_is_left_alone(runs: dict[str, Any]) -> None:
    assert runs["SFTTrainer"]["error"] is None
    assert len(runs["SFTTrainer"]["log"]) == 3


def test_one_trainers_rollouts_are_not_anothers(runs: dict[str, Any]) -> None:
    first, second = (runs[f"same place {name}"] for name in SAME_PLACE)
    assert first["error"] is None
    assert second["generated"] == 0
    assert "stage: 'trl.RLOOTrainer' now, 'trl.GRPOTrainer' in the dump" in second["error"]


# -- environments ---------------------------------------------------------------------------------
SESSIONS = 2 * 8


@pytest.fixture(scope="module")
def sessions(trl_jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl_environments")
    one, several = {"reward": "completions"}, {"reward": "completions", "several": True}
    jobs = {
        "bare": {**one, "skip": None},
        "first": {**one, "skip": skip("one")},
        "second": {**one, "skip": skip("one")},
        "first of several": {**several, "skip": skip("several")},
        "second of several": {**several, "skip": skip("several")},
        "swapped": {**several, "swapped": True, "skip": skip("several")},
        "other kind": {**several, "skip": skip("one")},
        "other level": {**one, "level": 1, "skip": skip("one")},
        **{name: {"reward": name, "skip": skip(name)} for name in ("owned", "takes", "reads")},
    }
    results: list[dict[str, Any]] = trl_jobs("trl_environments_app.py", folder, jobs)
    return results[0]


@pytest.mark.parametrize("which", ["", " of several"])
def test_the_second_run_calls_no_tool_and_logs_the_same(
    sessions: dict[str, Any], which: str
) -> None:
    bare, first, second = sessions["bare"], sessions[f"first{which}"], sessions[f"second{which}"]
    assert bare["error"] is first["error"] is second["error"] is None
    # Each session calls a tool and generates before and after it.
    assert (bare["called"], bare["generated"]) == (SESSIONS, 2 * SESSIONS)
    assert (first["called"], first["generated"]) == (SESSIONS, 2 * SESSIONS)
    assert (second["called"], second["generated"]) == (0, 0)
    assert json.dumps(bare["log"]) == json.dumps(first["log"]) == json.dumps(second["log"])
    assert bare["log"][0]["tools/call_frequency"] == 1
    assert bare["log"][0]["grad_norm"] > 0


@pytest.mark.parametrize("name", ["owned", "takes", "reads"])
def test_a_reward_that_reads_environments_is_refused_in_the_first_step(
    sessions: dict[str, Any], name: str
) -> None:
    refused = sessions[name]
    assert refused["error"].startswith("ConfigError: rlskip.hosts.trl.attach: a reward reads")
    assert "compute the reward from `completions`" in refused["error"]
    assert refused["generated"] == SESSIONS
    assert refused["log"] == []


def test_environments_are_compared(sessions: dict[str, Any]) -> None:
    assert "identity.environments" in sessions["other kind"]["error"]
    for name in ("swapped", "other level"):  # of what `reset` takes
        assert "prompts: row 0 differs" in sessions[name]["error"]
    assert {sessions[f"other {what}"]["generated"] for what in ("kind", "level")} == {0}


# -- what is recorded ------------------------------------------------------------------------------
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
