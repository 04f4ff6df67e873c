"""TRL's environments: replayed where rewards read what the dump holds, else refused by name.

Real trainers of the interpreter that $RLSKIP_TRL names (`.ci/env trl` makes it).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.trl

SESSIONS = 2 * 8


def skip(name: str) -> dict[str, Any]:
    return {"dump_dir": f"dumps/{name}", "rollout": {"enable": True}}


@pytest.fixture(scope="module")
def runs(trl_jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
        **{name: {"reward": name, "skip": skip(name)} for name in ("owned", "takes", "reads")},
    }
    results: list[dict[str, Any]] = trl_jobs("trl_environments_app.py", folder, jobs)
    return results[0]


@pytest.mark.parametrize("which", ["", " of several"])
def test_the_second_run_calls_no_tool_and_logs_the_same(runs: dict[str, Any], which: str) -> None:
    bare, first, second = runs["bare"], runs[f"first{which}"], runs[f"second{which}"]
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
    runs: dict[str, Any], name: str
) -> None:
    refused = runs[name]
    assert refused["error"].startswith("ConfigError: rlskip.hosts.trl.attach: a reward reads")
    assert "compute the reward from `completions`" in refused["error"]
    assert refused["generated"] == SESSIONS
    assert refused["log"] == []


def test_environments_are_compared(runs: dict[str, Any]) -> None:
    assert "prompts: row 0 is 'loud' now, 'guess' in the dump" in runs["swapped"]["error"]
    assert "identity.environments" in runs["other kind"]["error"]
    assert runs["swapped"]["generated"] == runs["other kind"]["generated"] == 0
