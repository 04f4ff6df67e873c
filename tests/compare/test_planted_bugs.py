"""Bugs planted in train.py: `rlskip compare` names the stage at which each one enters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlskip.testing import assert_same_training

ROOT = Path(__file__).parents[2]
TINY = (
    "trainer.total_training_steps=3",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "+merge=prefix",
    "+skip=rollout_cache",
    "skip.dump_dir=dumps",
    "+record=stages",
)
SCORED = "log_prob = scores.gather(1, tokens[:, 1:][sampled][:, None])[:, 0]\n"


@attrs.frozen
class Bug:
    """What is replaced in train.py, or an override; and the stage and step that it shows at."""

    stage: str
    step: int = 1
    old: str = ""
    new: str = ""
    override: str = ""
    has_token: bool = False


BUGS = {
    "the response mask is shifted by one": Bug(
        "log_probs",
        old='batch["input_ids"], batch["response_mask"][:, 1:]\n',
        new='batch["input_ids"], batch["response_mask"].roll(-1, 1)[:, 1:]\n',
        has_token=True,
    ),
    "another clip ratio": Bug("loss", override="actor_rollout_ref.actor.clip_ratio=0.001"),
    "one NaN in one row": Bug(
        "log_probs",
        step=2,
        old=SCORED,
        new=SCORED + " " * 12 + "if step == 2 and len(figures) == 1:\n" + " " * 16
        + "log_prob = log_prob.where(torch.arange(len(log_prob)) != 5, torch.nan)\n",
        has_token=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def train(python: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Run train.py, with a bug or without; returns Hydra's output directory."""
    folder = tmp_path_factory.mktemp("planted")
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    (folder / "conf").symlink_to(ROOT / "conf")

    def run(name: str, bug: Bug | None = None) -> Path:
        changed, overrides = source, []
        if bug is not None and bug.old:
            assert source.count(bug.old) == 1, "train.py has changed"
            changed = source.replace(bug.old, bug.new)
        elif bug is not None:
            overrides = [bug.override]
        (folder / "train.py").write_text(changed, encoding="utf-8")
        command = (folder / "train.py", f"hydra.run.dir={folder / name}", *TINY, *overrides)
        done = python.run(*command, cwd=folder, timeout=600)
        assert done.returncode == 0, done.stderr
        return folder / name

    return run


@pytest.fixture(scope="module")
def golden(train: Callable[..., Path]) -> Path:
    return train("golden")


def test_a_repetition_is_equal_to_the_bit(
    train: Callable[..., Path], golden: Path, rlskip: Any
) -> None:
    again = train("again")
    answer = rlskip("compare", golden, again)
    assert answer.code == 0
    assert "Equal to the bit: 4 stages of steps 1-3" in answer.out
    assert_same_training(golden, again, rtol=0)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_at_its_stage(
    train: Callable[..., Path], golden: Path, rlskip: Any, name: str
) -> None:
    bug = BUGS[name]
    answer = rlskip("compare", golden, train(f"bug{list(BUGS).index(name)}", bug), "--json")
    assert answer.code == 1
    first = answer.json["first"]
    assert (first["stage"], first["step"]) == (bug.stage, bug.step), answer.json["verdict"]
    at = first["at"]
    if bug.stage != "loss":
        assert at["row"]["session"] is not None
    if bug.has_token:
        around, place = at["around"]
        assert at["token"] >= 3, "a token that was sampled"
        assert around[place] is not None
    if "NaN" in name:
        assert (first["off"], at["b"]) == (1, None)
        assert "nan in B" in answer.json["verdict"]
    rollouts = [one for one in answer.json["steps"][0]["stages"] if one["order"] < 0]
    assert all(one["state"] == "equal" for one in rollouts)
