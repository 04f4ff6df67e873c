"""`rlskip bundle`: one step in one file, and its stages computed again elsewhere."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rlskip as package
from rlskip.exchange.bundle import open_bundle
from rlskip.exchange.recompute import clipped, grpo, rloo
from rlskip.jobs.records import Recorder
from rlskip.store import StepStore

NAMES = {"experiment_name": "e", "project_name": "p"}
GROUPS, N, TOKENS = 3, 4, 5
OWN = """
def none(*given): return None
def first(rewards, groups): return rewards[:1]
def changes(rewards, groups): return rewards.zero_()
def judge(completion_ids, **more): raise ValueError("at lunch")
async def later(completion_ids, **more): return [1.0] * len(completion_ids)
def wrong(completion_ids, **more): return [0.5] * len(completion_ids)
"""


def rewards() -> torch.Tensor:
    return torch.rand(GROUPS * N, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def run(tmp_path: Path, job_of: Any) -> Path:
    """A step of 3 groups, with the records of a job that trained on it as verl's GRPO does."""
    earned, made = rewards(), torch.Generator().manual_seed(2)
    old = -torch.rand(GROUPS * N, TOKENS, generator=made)
    new = old + 0.3 * torch.randn(GROUPS * N, TOKENS, generator=made)
    mask = torch.tensor([1, 1, 0, 1, 1])  # a tool said one of the tokens
    rows = [
        {"prompt": f"what /home/me/secret is {i // N}?", "prompt_ids": [i // N, 1],
         "completion_ids": [i, *range(1, TOKENS)], "logprobs": old[i].tolist(),
         "completion_mask": mask.tolist(), "reward": earned[i].item()}
        for i in range(GROUPS * N)
    ]  # fmt: skip
    step = package.write(tmp_path / "dumps", rows, step=2, **NAMES)
    by_group = earned.view(GROUPS, N)
    scale = by_group.std(1, keepdim=True) + 1e-6
    gain = ((by_group - by_group.mean(1, keepdim=True)) / scale).view(-1, 1)
    ratio = torch.exp(new - old)
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))[:, mask > 0].mean()
    batch = {name: [row[name] for row in rows] for name in ("prompt_ids", "completion_ids")}
    order = torch.randperm(len(rows), generator=made)
    moved = {name: [column[i] for i in order.tolist()] for name, column in batch.items()}

    def body(step: int) -> None:
        package.record("advantages", (gain * mask)[order], rows=moved)
        package.record("old_log_probs", old, rows=batch)
        package.record("log_probs", new, rows=batch)
        package.record("loss", loss)

    job_of("trained", body, steps=[2], root=tmp_path / "dumps")
    Recorder(tmp_path / "dumps", "rollout").write("hit", run=step.run.name, step=2)
    return step.run.directory


@pytest.fixture
def bundled(rlskip: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle of that step, beside functions that compute its stages again."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "step.bundle"
    said = rlskip("bundle", run, 2, "-o", out)
    assert said.code == 0, said.err
    assert "12 rows of step 2, with the records of job trained" in " ".join(said.out.split())
    return out


def test_a_step_is_computed_again(rlskip: Any, bundled: Path, tmp_path: Path) -> None:
    command = ("bundle", "--replay", bundled, "--advantages", "grpo", "--loss", "grpo")
    found = rlskip(*command, "--json").json
    states = [(one["stage"], one["state"]) for one in found["stages"]]
    assert states[0] == ("advantages", "equal"), "to the bit"
    assert states[1][0] == "loss"
    assert states[1][1] in ("equal", "within rounding")
    assert rlskip(*command).code == 0


def test_records_of_other_rollouts_of_the_step_equal_nothing(
    rlskip: Any, run: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run / "2")
    rows = [{"prompt_ids": [9], "completion_ids": [i], "reward": float(i)} for i in range(N)]
    package.write(run, rows, step=2)
    assert rlskip("bundle", run, 2, "-o", tmp_path / "step.bundle").code == 0
    said = rlskip("bundle", "--replay", tmp_path / "step.bundle", "--advantages", "grpo")
    assert (said.code, said.out.startswith("Advantages not recorded")) == (1, True), said.out


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--advantages", "rloo", "--loss", "ppo"], "Advantages differs first, in group"),
        (["--advantages", "grpo,eps=0.1"], "Advantages differs first, in group"),
        (["--advantages", "grpo", "--loss", "ppo,clip=0.01"], "Loss differs first, in the step"),
        (["--reward", "own:wrong", "--advantages", "grpo"], "Reward differs first, in group"),
    ],
)
def test_the_first_stage_that_differs_is_named(
    rlskip: Any, bundled: Path, options: list[str], first: str
) -> None:
    said = rlskip("bundle", "--replay", bundled, *options)
    assert (said.code, said.out.startswith(first)) == (1, True), said.out


def test_rewards_are_those_that_a_job_recorded(
    rlskip: Any, run: Path, tmp_path: Path, job_of: Any
) -> None:
    """As of TRL, whose rollouts have none; the records may be anywhere."""
    rows = [{"prompt_ids": r["prompt"], "completion_ids": r["response"]}
            for r in package.open(run)[2].iter_rows()]  # fmt: skip
    step = package.write(tmp_path / "bare", rows, step=1, **NAMES)
    earned = torch.arange(GROUPS * N) ** 2 % 7 / 4
    by_group = earned.view(GROUPS, N)
    scale = by_group.std(1, keepdim=True) + 1e-4
    batch = {name: [row[name] for row in rows] for name in rows[0]}
    gaps = (by_group - by_group.mean(1, keepdim=True)) / scale

    def body(step: int) -> None:
        package.record("rewards", earned, rows=batch)
        package.record("advantages", gaps.view(-1), rows=batch)

    job_of("far", body, steps=[1], root=tmp_path / "far")
    out = tmp_path / "far.bundle"
    command = ("bundle", step.run.directory, 1, "-o", out)
    assert "without records" in " ".join(rlskip(*command).out.split())
    assert rlskip(*command, "--records", tmp_path / "far" / "stages" / "far").code == 0
    replay = ("bundle", "--replay", out, "--advantages")
    assert rlskip(*replay, "grpo,eps=1e-4", "--json").json["stages"][0]["state"] == "equal"
    assert rlskip(*replay, "grpo").code == 1


TEXTS = {"prompt": "what is it? /home/me/x", "note": {"/home/me/key": ["file:///home/me/my dir/f"]}}


@pytest.mark.parametrize("redact", [False, True])
def test_neither_groups_nor_records_have_texts_or_paths(
    rlskip: Any, tmp_path: Path, job_of: Any, redact: bool
) -> None:
    """A group may be named by its prompt, as in TRL."""
    columns = {"prompt": [TEXTS["prompt"], "what is it? /home/you/x"], "completion_ids": [[1], [2]],
               "note": [TEXTS["note"]] * 2}  # fmt: skip
    run = tmp_path / "e_p" / "GBSany_Nany_inany_outany"
    for call in ("", "part-1"):
        StepStore(run).save(1, columns, call=call)
    job_of("texts", lambda step: package.record("said", "what was asked: /home/me/x"), steps=[1])
    options = ["--redact"] * redact
    command = ("bundle", run, 1, "--records", "texts", "-d", tmp_path)
    assert rlskip(*command, "-o", tmp_path / "all", *options).code == 0
    group = next(package.open(run)[1].groups()).name
    alone = rlskip(*command, "-o", tmp_path / "one", "--group", group, *options, "--json").json
    assert alone["sessions"] == 2
    for name in ("all", "one"):
        opened = open_bundle(tmp_path / name)
        assert opened.records is not None
        found = repr((opened.manifest, list(opened.rollouts), opened.records.stages["said"]))
        assert ("/home" in found, "my dir" in found, str(tmp_path) in found) == (False,) * 3
        assert ("what" in found) is not redact
    assert len(open_bundle(tmp_path / "all").rollouts.groups) == 4
    said = rlskip(
        "bundle", "--replay", tmp_path / "all", "--reward", "tests.messages.rescore:of_trl"
    ).err
    assert ("hashes for texts" in said) is redact, said


def test_a_group_is_taken_alone(rlskip: Any, run: Path, tmp_path: Path) -> None:
    group = next(package.open(run)[2].groups()).name
    out = tmp_path / "group"
    made = rlskip("bundle", run, 2, "--group", group, "-o", out, "--json").json
    assert made["sessions"] == N
    assert rlskip("bundle", "--replay", out, "--advantages", "grpo").code == 0
    refused = rlskip("bundle", run, 2, "--group", "nobody", "-o", tmp_path / "none")
    assert (refused.code, "its groups are" in refused.err) == (2, True)
    StepStore(run).save(9, [])
    refused = rlskip("bundle", run, 9, "--out", tmp_path / "other")
    assert (refused.code, "/9: it has no rows; " in refused.err) == (2, True), refused.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("how", ["cut", "changed", "other", "text", "later"])
def test_what_is_no_sound_bundle_is_refused(
    rlskip: Any, run: Path, bundled: Path, tmp_path: Path, how: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("rlskip.exchange.bundle._FORMAT", 3 if how == "later" else 2)
    whole = bundled.read_bytes()
    bad = tmp_path / "bad"
    bad.write_bytes(
        {
            "cut": whole[:-100],
            "changed": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            "other": (run / "2" / "gen_batch.dp").read_bytes(),
            "text": b"no bundle",
            "later": whole,
        }[how]
    )
    said = rlskip("bundle", "--replay", bad, "--advantages", "grpo")
    assert (said.code, "bad: " in said.err) == (2, True), said.err
    assert how != "other" or "it is a dump, not a bundle" in said.err
    absent = rlskip("bundle", "--replay", tmp_path / "absent", "--loss", "ppo")
    assert (absent.code, "absent: it cannot be read" in absent.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replay", "B"], "add --advantages grpo"),
        (["--replay", "B", "--loss", "dpo"], "rlskip has: grpo, rloo, ppo"),
        (["--replay", "B", "--loss", "ppo,clip=x"], "is not a number"),
        (["--replay", "B", "--loss", "nowhere:f"], "cannot be imported"),
        (["--replay", "B", "--loss", "ppo,foo=1"], "--loss: ppo,foo=1: it raised TypeError"),
        (["--replay", "B", "--loss", "own:none"], "--loss: own:none: it returned None"),
        (["--replay", "B", "--advantages", "own:first"], "it returned 1 number for 12"),
        (["--replay", "B", "--reward", "own:judge"], "own:judge: it raised ValueError: at lunch"),
        ([], "rlskip bundle RUN STEP --out FILE"),
    ],
)
def test_what_is_missing_or_fails_is_named(
    rlskip: Any, bundled: Path, arguments: list[str], message: str
) -> None:
    said = rlskip("bundle", *[str(bundled) if one == "B" else one for one in arguments])
    assert (said.code, message in said.err) == (2, True), said.err


def test_a_function_may_be_async_and_change_what_it_is_given(rlskip: Any, bundled: Path) -> None:
    command = ("bundle", "--replay", bundled, "--reward", "own:later", "--loss", "grpo")
    said = rlskip(*command, "--advantages", "own:changes", "--json").json["stages"]
    assert [one["state"] for one in said[:2]] == ["differs"] * 2
    assert said[2]["state"] in ("equal", "within rounding")


def test_the_formulas() -> None:
    earned, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0]), ["a", "a", "a", "b", "c"]
    found = rloo(earned, groups).tolist()
    assert found == pytest.approx([1.0, -0.5, -0.5, 1.0, 5.0])
    assert grpo(earned, groups, scale=False)[:3].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


# As verl's compute_policy_loss: log-ratios within 20, padding of any value, a bound for losses.
@pytest.mark.parametrize(
    ("gap", "gain", "clips", "loss"),
    [
        (0.5, 1.0, {}, -1.2),
        (0.5, 1.0, {"clip_high": 0.28}, -1.28),
        (0.5, -1.0, {}, math.exp(0.5)),
        (2.0, -1.0, {"clip_c": 3.0}, 3.0),
        (-2.0, -1.0, {"clip_c": 3.0}, 0.8),
        (500.0, -1.0, {}, math.exp(20.0)),
    ],
)
def test_the_clipped_loss(gap: float, gain: float, clips: dict[str, float], loss: float) -> None:
    new, old, mask = (torch.tensor(one) for one in ([gap, 1e6], [0.0, 0.0], [1.0, 0.0]))
    found = clipped(new, old, torch.tensor([gain, 5.0]), mask, **clips)
    assert found.item() == pytest.approx(loss)
    assert clipped(new, old, new, 0 * mask).item() == 0.0
