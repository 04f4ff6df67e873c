"""A mismatch says how prompts differ, a miss where the dump is, and both name this host's keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from rlskip import SkipManager
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import MismatchError, RlskipError
from tests.skip.trainers import visit


@SkipManager.annotate(role="rollout")
def generate(prompts: Any) -> list[int]:
    return [1]


def questions(*texts: str) -> list[dict[str, Any]]:
    return [{"uid": object.__repr__(text), "question": text} for text in texts]


def ids(*rows: int) -> TensorDict:
    return TensorDict({"input_ids": torch.tensor([[row, row] for row in rows])}, [len(rows)])


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def proto(*texts: str) -> DataProtoParts:
    column = np.array([conversation(text) for text in texts] + [None], object)[:-1]
    return DataProtoParts(None, {"raw_prompt": column})


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (["a", "b"], ["b", "a"], "the same prompts in another order"),
        (["a", "b"] * 2, ["a", "b"], "2 prompts now, 4 in the dump"),
        (["a", "b", "c"], ["a", "x", "c"], "row 1 is 'x' now, 'b' in the dump"),
        (["a", "b", "c", "d"], ["w", "x", "y", "z"], "'x' now, 'b' in the dump, 2 more rows"),
        (["a", "b"], ["x", "b", "c"], "3 prompts now, 2 in the dump, row 0 is 'x' now, 'a' in"),
        (questions("a", "b"), questions("b", "a"), "the same prompts in another order"),
        (questions("a"), questions("x"), "row 0 is 'x' now, 'a' in the dump"),
        (proto("a", "b"), proto("a", "x"), "row 1 is 'x' now, 'b' in the dump"),
        (ids(1, 2), ids(1, 7), "row 1 is [7, 7] now, [2, 2] in the dump"),
        (ids(*range(300)), ids(*range(299), 5), "prompts: row 299 differs"),
        (ids(1, 2), ids(1, 2).int(), "prompts: input_ids is int32 now, int64 in the dump"),
        (["x" * 99 + "a"], ["x" * 99 + "b"], "row 0 differs, but both begin with 'xxx"),
        ("a text", "another text", "row 0 is 'another text' now, 'a text' in the dump"),
    ],
)
def test_a_mismatch_of_prompts_says_how_they_differ(
    init: Callable[..., Path], then: Any, now: Any, said: str
) -> None:
    init()
    visit(1)
    generate(then)
    visit(1)
    with pytest.raises(MismatchError) as caught:
        generate(now)
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("host", "key"),
    [({}, "skip.experiment_name"), ({"trainer": {"x": 1}}, "trainer.experiment_name")],
)
def test_the_advice_names_keys_that_this_host_has(tmp_path: Path, host: Any, key: str) -> None:
    def run(prompt: str) -> None:
        SkipManager.init({**host, "skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}})
        SkipManager.set_step(1)
        generate([prompt])

    run("a")
    with pytest.raises(MismatchError) as caught:
        run("b")
    for way in ("on_mismatch=regenerate", "another skip.dump_dir or ", f"or {key} starts from"):
        assert way in caught.value.remedy


@pytest.mark.parametrize(
    ("step", "prompt", "total"), [(2, "a", None), (2, "a", 2), (1, "b", None), (1, "b", 1)]
)
@pytest.mark.parametrize(
    "given",
    [
        {"on_miss": "error"},
        {"start_engine": False},
        {"rollout": {"on_miss": "error"}},
        {"start_engine": False, "rollout": {"on_miss": "error", "on_mismatch": "error"}},
    ],
)
def test_the_advice_works_as_it_is_typed(
    tmp_path: Path, given: dict[str, Any], step: int, prompt: str, total: int | None
) -> None:
    def run(config: Any, step: int, prompt: str) -> None:
        SkipManager.init(config)
        SkipManager.set_step(step)
        generate([prompt])

    skip = {"rollout": {"enable": True}, "dump_dir": str(tmp_path)}
    run({"skip": skip}, 1, "a")
    config = OmegaConf.merge({"skip": skip}, {"skip": given}, {"trainer": {}})
    config.trainer.total_training_steps = total
    with pytest.raises(RlskipError) as caught:
        run(config, step, prompt)
    (advice,) = re.findall(r"(?:^|once with )((?:skip\S+=\w+ ?)+)", caught.value.remedy)
    for override in advice.split():
        config.merge_with_dotlist([override])
    run(config, step, prompt)


# -- dumps that another number in the directory's name hides -------------------------------


def test_a_miss_names_the_dumps_of_another_batch_size(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def job(gbs: int, *steps: int) -> list[str]:
        init(gbs=gbs, n=2)
        caplog.clear()
        for step in steps:
            SkipManager.set_step(step)
            generate([step])
        return [record.message for record in caplog.records if "not found" in record.message]

    job(4, 1, 2)
    (line,) = job(8, 1, 2, 1)
    assert "GBS4_N2_inany_outany has dumps of 2 steps, which are not found: gbs is 8 now" in line
    assert "n is" not in line
    assert job(8, 1) == [], "a hit"
