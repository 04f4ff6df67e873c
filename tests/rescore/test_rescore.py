"""`rlskip rescore`: old against new, and no verdict asked for twice."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlskip.store import StepStore
from tests.clock import eventually

RUN = "judged_tiny/GBS4_N4_in8_out8"
GROUPS, SESSIONS = 4, 4
ROWS = GROUPS * SESSIONS

# In $ASKED, a line for each session; $PAUSE holds each call that long. "bad" is never judged, and
# the score of "odd" is none.
JUDGES = """
import asyncio, os, sys, time

PAUSE = float(os.environ.get("PAUSE", 0))

def note(*texts):
    with open(os.environ["ASKED"], "a") as file:
        file.write("".join(f"{text}\\n" for text in texts))

def score(text, truth):
    if text == "bad":
        raise RuntimeError("the judge is at lunch")
    if text == "exit":
        sys.exit(1)
    return None if text == "odd" else len(text) / 8 + (text == truth)

def one(data_source, solution_str, ground_truth, extra_info=None, **others):
    note(solution_str)
    time.sleep(PAUSE)
    return score(solution_str, ground_truth)

async def one_async(solution_str, ground_truth):
    note(solution_str)
    await asyncio.sleep(PAUSE)
    return {"score": score(solution_str, ground_truth), "why": "because"}

def many(solution_strs, ground_truths, **others):
    note(*solution_strs)
    time.sleep(PAUSE)
    return [score(*pair) for pair in zip(solution_strs, ground_truths)]

async def trl(prompts, completions, gts, **columns):
    note(*completions)
    await asyncio.sleep(PAUSE)
    return [score(*pair) for pair in zip(completions, gts)]

def lists(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def needs(completions, nowhere):
    return [0.0 for _ in completions]

number = 3
"""
KEPT = ("--version", "1")


def answer(step: int, i: int) -> str:
    """Each session's text, which no other session has."""
    return f"{step:02}{i:04}abcd"[: 6 + i % 5]


def save(root: Path, steps: int, groups: int = GROUPS, **more: list[Any]) -> Path:
    rows = groups * SESSIONS
    for step in range(1, steps + 1):
        texts = more.get("texts") or [answer(step, i) for i in range(rows)]
        columns = {
            "uid": [f"g{i // SESSIONS}" for i in range(rows)],
            "input": [f"question {step} {i // SESSIONS}" for i in range(rows)],
            "output": texts,
            "gts": [text if i % SESSIONS == 1 else "?" for i, text in enumerate(texts)],
            "score": more.get("scores") or [float(i % SESSIONS == 1) for i in range(rows)],
        }
        StepStore(root / RUN).save(step, columns)
    return root


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `judges`, which is the working directory."""
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working directory
    for name in ("judges", "dice"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "asked").touch()
    return tmp_path


def asked(folder: Path) -> Counter[str]:
    """How often each text was really judged."""
    return Counter((folder / "asked").read_text().splitlines())


def expected(step: int, i: int) -> float:
    return len(answer(step, i)) / 8 + (i % SESSIONS == 1)


@pytest.mark.parametrize("name", ["one", "one_async", "many", "trl"])
def test_each_signature_is_scored_once(judges: Path, rlskip: Any, name: str) -> None:
    save(judges / "dumps", steps=2)
    command = ("rescore", judges / "dumps" / RUN, "--reward", f"judges:{name}", *KEPT, "--json")
    first, again = rlskip(*command), rlskip(*command)
    assert (first.code, again.code) == (0, 0), first.err
    assert (first.json["asked"], again.json["asked"]) == (2 * ROWS, 0)
    assert asked(judges) == {answer(s, i): 1 for s in (1, 2) for i in range(ROWS)}
    scores = [expected(s, i) for s in (1, 2) for i in range(ROWS)]
    for found in (first.json, again.json):
        assert found["sessions"] == found["new"]["count"] == 2 * ROWS
        assert found["new"]["mean"] == pytest.approx(sum(scores) / len(scores))
        assert (found["new"]["min"], found["new"]["max"]) == (min(scores), max(scores))
        assert found["old"]["mean"] == pytest.approx(0.25)
        assert found["changed"] == 2 * ROWS
    assert first.json["most_changed"] == again.json["most_changed"]
    said = rlskip(*command[:-1]).out  # and below it the table of those that changed most
    assert said.index(f"{2 * ROWS} sessions") < said.index("group ")


def test_without_a_version_each_command_asks_anew(judges: Path, rlskip: Any) -> None:
    save(judges / "dumps", steps=1, texts=["a"] * ROWS)
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one")
    for times in (1, 2):
        assert "--version NAME" in rlskip(*command).out
        assert asked(judges)["a"] == 2 * times, "once for each ground truth"
    assert not (judges / ".rlskip").exists()


def test_a_cached_function_has_its_own_version_and_directory(judges: Path, rlskip: Any) -> None:
    (judges / "dice.py").write_text(
        "import judges, rlskip\n"
        "judge = rlskip.cached_reward(judges.one, version='x', directory='verdicts')\n"
    )
    save(judges / "dumps", steps=1)
    command = ("rescore", judges / "dumps" / RUN, "--reward", "dice:judge")
    for _ in range(2):
        assert rlskip(*command, "--json").json["version"] == "x"
        assert asked(judges).total() == ROWS
    assert list((judges / "verdicts").iterdir())
    refused = rlskip(*command, *KEPT)
    assert (refused.code, "leave --version out" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "workers"), [("one", "4"), pytest.param("trl", "1", marks=pytest.mark.slow)]
)
def test_two_at_once_and_a_kill_ask_for_each_verdict_once(
    judges: Path, python: Any, rlskip: Any, monkeypatch: pytest.MonkeyPatch,
    name: str, workers: str,
) -> None:  # fmt: skip
    save(judges / "dumps", steps=3)
    monkeypatch.setenv("PAUSE", "0.02")
    command = ("rescore", judges / "dumps" / RUN, "--reward", f"judges:{name}", *KEPT,
               "--workers", workers)  # fmt: skip
    code = "import sys; from rlskip.cli.main import main; sys.exit(main(sys.argv[1:]))"
    both = [python.start("-c", code, *command, cwd=judges) for _ in range(2)]
    assert eventually(lambda: asked(judges).total() > ROWS)
    both[0].kill()
    for one in both:
        one.communicate(timeout=60)
    assert both[1].returncode == 0
    times = Counter(asked(judges))
    chosen = {answer(s, i) for s in (1, 2, 3) for i in range(ROWS)}
    assert times.keys() == chosen
    # What the killed process was waiting for is asked again, and nothing else.
    under_way = int(workers) if name.startswith("one") else ROWS
    paid_twice = times.total() - len(chosen)
    assert 0 <= paid_twice <= under_way
    found = rlskip(*command, "--json").json
    assert (found["asked"], found["sessions"]) == (0, len(chosen))
    assert asked(judges) == times


def test_a_failing_judge_costs_its_sessions_alone(judges: Path, rlskip: Any) -> None:
    save(judges / "dumps", steps=1, texts=["a", "bad", "exit", "odd"] * GROUPS)
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one")
    found = rlskip(*command, "--json")
    assert found.code == 1
    assert (found.json["sessions"], found.json["failed"]) == (ROWS, 3 * GROUPS)
    assert found.json["new"]["count"] == ROWS - 3 * GROUPS
    failure, ended, other = found.json["failures"][:3]
    assert (failure["step"], failure["group"], failure["session"]) == (1, "g0", 1)
    assert "at lunch" in failure["error"]
    assert "exit code 1" in ended["error"]
    assert (other["session"], "None, which is not a score" in other["error"]) == (3, True)


def test_a_damaged_dump_is_listed_and_the_others_are_scored(judges: Path, rlskip: Any) -> None:
    save(judges / "dumps", steps=2)
    file = judges / "dumps" / RUN / "1" / "gen_batch.dp"
    file.write_bytes(file.read_bytes()[:-1])
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one")
    found = rlskip(*command, "--json")
    assert (found.code, found.json["sessions"], found.json["failed"]) == (1, ROWS, 0)
    assert [one["dump"] for one in found.json["unreadable"]] == ["1"]
    assert "step 1 cannot be read" in rlskip(*command).out


@pytest.mark.parametrize(
    ("reward", "word"),
    [
        ("judges", "package.module:name"),
        ("judges:nothing", "judges:nothing"),
        ("nowhere:judge", "nowhere"),
        (":judge", "cannot be imported"),
        ("broken:judge", "SyntaxError"),
        ("ends:judge", "SystemExit"),
        ("judges:number", "cannot be called"),
        ("builtins:dict", "cannot be called"),
        ("os:getcwd", "solution_str"),
        ("judges:needs", "takes nowhere"),
    ],
)
def test_a_function_that_does_not_fit_is_bad_input(
    judges: Path, rlskip: Any, reward: str, word: str
) -> None:
    save(judges / "dumps", steps=1)
    (judges / "broken.py").write_text("def (")
    (judges / "ends.py").write_text("raise SystemExit(0)")
    found = rlskip("rescore", judges / "dumps" / RUN, "--reward", reward)
    assert found.code == 2
    assert word in found.err


@pytest.mark.parametrize("takes", ["solution_str, **more", "solution_str, ground_truth=None"])
def test_the_ground_truth_may_be_missing_where_it_is_not_needed(
    judges: Path, rlskip: Any, takes: str
) -> None:
    run = judges / "dumps" / RUN
    StepStore(run).save(1, {"output": ["a", "bc"], "score": [0.0, 0.0]})
    (judges / "free.py").write_text(f"def judge({takes}):\n    return len(solution_str)\n")
    found = rlskip("rescore", run, "--reward", "free:judge", "--json")
    assert (found.code, found.json["new"]["mean"]) == (0, 1.5), found.err
    none = rlskip("rescore", run, "--reward", "free:judge", "--steps", "2-9")
    assert (none.code, "it has none of the steps 2-9" in none.err) == (2, True)


@pytest.mark.parametrize(
    "takes", ["completions", "completion_ids", "completions, completion_ids",
              "solution_str, completion_ids", "solution_strs, completion_ids"],
)  # fmt: skip
def test_a_function_of_tokens_needs_no_text(
    judges: Path, rlskip: Any, dumps: Path, takes: str
) -> None:
    where = dumps / "grpo_tiny" / "GBS4_N2_in6_out8"
    ids = takes.rpartition(" ")[2]
    score = f"float(len({ids}))" if "solution_str," in takes else f"[float(len(x)) for x in {ids}]"
    (judges / "dice.py").write_text(f"def judge({takes}, **more):\n    return {score}\n")
    found = rlskip("rescore", where, "--reward", "dice:judge", "--steps", "2", "--json")
    assert found.code == 0, found.err
    assert found.json["new"]["mean"] == 5.75
    refused = rlskip("rescore", where, "--reward", "judges:one")
    assert refused.code == 2
    assert "--tokenizer" in refused.err or "ground_truth" in refused.err
    StepStore(judges / "dumps" / RUN).save(1, {"output": ["a"], "score": [0.0]})
    of_text = rlskip("rescore", judges / "dumps" / RUN, "--reward", "dice:judge")
    assert ("and the run records text" in of_text.err) is ("completion_ids" in takes)


def test_a_typo_is_found_before_the_module_is_run(judges: Path, rlskip: Any, dumps: Path) -> None:
    (judges / "slow.py").write_text("import no_such_module\ndef judged(completions): ...\n")
    command = ("rescore", dumps / "grpo_tiny", "--reward")
    found = rlskip(*command, "slow:judge")
    assert (found.code, "it has judged" in found.err) == (2, True)
    assert "no_such_module" in rlskip(*command, "slow:judged").err
    (judges / "star.py").write_text("from judges import *\n")
    assert rlskip(*command, "star:lists").code == 0, "a star may bind any name"


def test_all_turns_of_a_session_are_its_completion(judges: Path, rlskip: Any) -> None:
    """Whatever the run calls its answers."""
    user, said = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    ids = {"uid": "p", "session": 0, "score": 0.0}
    for step, name in enumerate(("completion", "completions"), 1):
        rows = [{**ids, "turn": n, "raw_prompt": [user, said] * n + [user], name: [said]}
                for n in range(3)]  # fmt: skip
        StepStore(judges / "dumps" / RUN).save(step, rows)
    found = rlskip("rescore", judges / "dumps" / RUN, "--reward", "judges:lists", "--json").json
    assert (found["new"]["min"], found["new"]["max"]) == (5, 5)


def test_groups_beyond_the_named_ones_are_counted(judges: Path, rlskip: Any) -> None:
    (judges / "dice.py").write_text("def judge(solution_str):\n    return 1.0\n")
    save(judges / "dumps", steps=1, groups=13)
    said = rlskip("rescore", judges / "dumps" / RUN, "--reward", "dice:judge").out
    assert "1/g9, and 3 more" in " ".join(said.split())


def test_scores_are_rounded_as_the_runs_rewards_are(judges: Path, rlskip: Any) -> None:
    (judges / "dice.py").write_text("def judge(solution_str):\n    return 0.1\n")
    columns = {"output": ["a", "b"], "score": np.full(2, 0.1, np.float32)}
    StepStore(judges / "dumps" / RUN).save(1, columns)
    found = rlskip("rescore", judges / "dumps" / RUN, "--reward", "dice:judge", "--json").json
    assert found["changed"] == 0


@pytest.mark.parametrize("chat", [False, True])
def test_a_data_set_has_what_the_run_lacks(judges: Path, rlskip: Any, chat: bool) -> None:
    def prompt(text: str) -> Any:
        return [{"role": "user", "content": text}] if chat else text

    rows = [
        {"raw_prompt": prompt(text), "output": said, "score": 0.0}
        for text, said in (("2+2", "4"), ("2+3", "4"), ("9\u2028", "9"))
    ]
    StepStore(judges / "dumps" / RUN).save(1, rows)
    data = [{"prompt": prompt("2+2"), "reward_model": {"ground_truth": "4"}},
            {"prompt": prompt("2+3"), "ground_truth": "5", "extra_info": {"i": 1}}]  # fmt: skip
    lines = "".join(json.dumps(one) + "\n" for one in data)
    (judges / "data.jsonl").write_text(lines)
    command = ("rescore", judges / "dumps" / RUN, "--reward", "judges:one", "--data")
    lacks = rlskip(*command, "data.jsonl")
    assert (lacks.code, "no row of --data has the prompt" in lacks.err) == (2, True)
    (judges / "data.jsonl").write_text(
        lines + json.dumps({"prompt": prompt("9\u2028"), "gts": "9"}, ensure_ascii=False), "utf-8"
    )
    found = rlskip(*command, "data.jsonl", "--json").json
    assert found["new"]["mean"] == pytest.approx(1 / 8 + 2 / 3)
    for bad in ("{", '{"question": 1}', "[1]"):
        (judges / "data.jsonl").write_text(bad)
        refused = rlskip(*command, "data.jsonl")
        assert (refused.code, "data.jsonl" in refused.err) == (2, True)
