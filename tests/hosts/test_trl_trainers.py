"""Every trainer of TRL that generates: the second run generates nothing, or it is refused by name.

And environments: replayed where rewards read what the dump holds, else refused by name. Real
trainers of the interpreter that $RLSKIP_TRL names (`.ci/env trl` makes it).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.trl

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
