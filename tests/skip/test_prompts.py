"""Validation bypasses; prompts and a stage's own identity are compared, and a mismatch says how."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from rlskip import SkipManager
from rlskip.batch.meta import is_validation
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import ConfigError, MismatchError, RlskipError
from rlskip.skip.names import NEUTRAL_META
from rlskip.store import UnsupportedTypeError
from tests.skip.trainers import Stage, steps_on_disk, visit


@pytest.mark.parametrize(
    "prompts",
    [
        {"ids": [1], "validate": True},
        {"ids": [1], "meta_info": {"validate": np.True_}},
        {"ids": [1, 2], "validate": torch.tensor([True, True])},
        TensorDict({"ids": torch.ones(1, 1)}, [1]).set_non_tensor("validate", True),
        TensorDict({"ids": torch.ones(1, 1)}, [1]).set_non_tensor("meta_info", {"validate": 1}),
        type("DataProto", (), {"batch": None, "meta_info": {"validate": True}})(),
    ],
    ids=["key", "meta_info", "tensor", "non_tensor", "wrapped meta_info", "DataProto"],
)
def test_validation_always_bypasses(init: Callable[..., Path], prompts: Any) -> None:
    dumps = init()
    stage = Stage()
    stage.generate(prompts)  # before any step is set, as val_before_train does
    assert [stage.at(1, prompts), stage.at(1, prompts)] == [2, 3]
    assert steps_on_disk(dumps) == []


def test_what_is_no_validation() -> None:
    mixed = torch.tensor([True, False])
    for flag in (False, 0, None, np.False_, "true", "false", [], torch.tensor([]), mixed):
        assert not is_validation({"validate": flag})
        assert not is_validation({"meta_info": {"validate": flag}})


def test_sampling_asked_for_in_the_prompts_meta_counts(init: Callable[..., Path]) -> None:
    """A greedy baseline is another batch; to ask for what the config says anyway is not."""
    init(host={"actor_rollout_ref": {"rollout": {"temperature": 0.7}}})
    stage = Stage()

    def at(**meta: Any) -> int:
        return stage.at(1, {"ids": torch.arange(3), "meta_info": meta})

    assert at(global_steps=1) == 1
    assert at(global_steps=9, temperature=np.float64(0.7), eos_token_id=2) == 1
    for meta in ({"do_sample": False}, {"temperature": 0.9}, {"top_k": torch.tensor(1)}):
        with pytest.raises(MismatchError, match=rf"meta_info.{next(iter(meta))}: .* now"):
            at(**meta)
    proto = type("DataProto", (), {"batch": None, "non_tensor_batch": {"ids": torch.arange(3)}})()
    proto.meta_info = {"global_steps": 1}
    assert stage.at(1, proto) == 1
    proto.meta_info = {"do_sample": False}
    with pytest.raises(MismatchError, match=r"meta_info.do_sample: False now, absent in the dump"):
        stage.at(1, proto)


def test_whatever_the_prompts_meta_holds_counts(init: Callable[..., Path]) -> None:
    init()
    stage, ids = Stage(), torch.arange(3)
    neutral = {name: 1 for name in NEUTRAL_META if name != "validate"}
    assert stage.at(1, {"ids": ids, "meta_info": {"tokenizer": object(), "stop": None}}) == 1
    assert stage.at(1, {"ids": ids, "meta_info": {**neutral, "tokenizer": print}}) == 1
    for name, value in {
        "n": 4, "max_tokens": 7, "stop": ["###"], "logit_bias": {"5": -1}, "lora_name": "a",
        "sampling_params": {"temperature": 0.1}, "whatever": True,
    }.items():  # fmt: skip
        with pytest.raises(MismatchError, match=rf"meta_info\.{name}.* now, absent"):
            stage.at(1, {"ids": ids, "meta_info": {name: value}})


@pytest.mark.parametrize(
    ("prompts", "only"),
    [
        ({"uid": ["math-1"]}, "uid"),
        ([{"uid": "math-1", "sample_id": 3}], "uid, sample_id"),
        ({"uid": np.array(["a", "b"], object), "ids": None}, "uid, ids"),
        ({"uid": ["a"], "extra_info": [{"uid": "a"}]}, "uid, extra_info"),
        (TensorDict({"uid": torch.arange(2)}, [2]), "uid"),
        ({}, None),
        ([None, {"uid": "a"}], None),
        (DataProtoParts(None, {}, {"global_steps": 1}), None),
    ],
    ids=str,
)
def test_prompts_that_nothing_tells_apart_are_refused(
    init: Callable[..., Path], prompts: Any, only: str | None
) -> None:
    init()
    with pytest.raises(UnsupportedTypeError) as caught:
        Stage().at(1, prompts)
    assert (f"they have only {only}, which" if only else "they have no fields") in caught.value.what
    assert "annotate(prompts=" in caught.value.remedy


def test_a_stage_with_none_but_ignored_arguments_is_refused(init: Callable[..., Path]) -> None:
    init(at=1)

    annotate = functools.partial(SkipManager.annotate, "rollout")
    generate = annotate()(lambda sample_id: sample_id)
    named = annotate("sample_id")(lambda sample_id: sample_id)
    alone = annotate()(lambda **names: str(names))
    behind = annotate()(lambda step=1, **names: str(names))
    computed = annotate(lambda text: None)(lambda text: text)
    with pytest.raises(UnsupportedTypeError, match=r"annotate\(prompts='sample_id'\)"):
        generate("math-1")
    for names in ({"uid": "math-1", "seed": 1}, {"step": 1, "uid": "math-1"}):
        for keywords in (alone, behind):
            with pytest.raises(UnsupportedTypeError, match=r"prompts='uid'\)$"):
                keywords(**names)
    with pytest.raises(UnsupportedTypeError, match="they have no fields"):
        computed("math-1")
    assert named("math-1") == "math-1"
    visit(1)
    with pytest.raises(MismatchError):
        named("code-7")


def test_an_argument_that_nobody_named_the_prompts_is_said_to_be_taken(
    init: Callable[..., Path],
) -> None:
    init(at=1)
    generate = SkipManager.annotate("rollout")(lambda policy, *args, batch, **rest: None)
    with pytest.raises(UnsupportedTypeError) as caught:
        generate(threading.Lock(), batch=[1])
    assert "'policy', the first argument, was taken for the prompts" in caught.value.what
    assert "annotate(prompts='batch')" in caught.value.remedy
    typo = SkipManager.annotate("rollout", "batsch")(lambda model, batch: None)
    with pytest.raises(ConfigError, match="has no argument 'batsch'"):
        typo(None, [1])


def test_a_stage_may_alter_its_input(init: Callable[..., Path]) -> None:
    init()
    made = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: dict[str, Any]) -> int:
        made.append(prompts["ids"])
        prompts["priority"] = [1]
        return 5

    for _ in range(2):
        visit(1)
        assert generate({"ids": [1]}) == 5
    assert made == [[1]]


# -- what is said: how prompts differ, where the dump is, which of this host's keys help ------


@SkipManager.annotate(role="rollout")
def generate(prompts: Any) -> list[int]:
    if isinstance(prompts, list):  # a stage may alter its input: what it was given is recorded
        prompts[:] = ["altered"] * len(prompts)
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
        (["a", "b"] * 2, ["a"], "1 prompt now, 4 in the dump"),
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
    init(at=1)
    generate(then)
    visit(1)
    with pytest.raises(MismatchError) as caught:
        generate(now)
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ({}, "skip.experiment_name"),
        ({"trainer": {"x": 1}}, "skip.experiment_name"),
        ({"trainer": {"experiment_name": "x"}}, "trainer.experiment_name"),
    ],
)
def test_the_advice_names_keys_that_this_host_has(
    init: Callable[..., Path], host: Any, key: str
) -> None:
    def run(prompt: str) -> None:
        init(host=host, at=1)
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
