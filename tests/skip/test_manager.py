"""SkipManager and its decorator, over the rollout role."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rlskip import BaseSkip, RoleConfig, SkipAction, SkipManager, register_skip
from rlskip.errors import ConfigError, MismatchError, MissError, NotInstalledError
from rlskip.skip import SKIP_REGISTRY
from rlskip.skip.base import RoleError
from rlskip.skip.call import Cleanup, is_validation
from rlskip.skip.manager import StepNotSetError
from rlskip.skip.records import tally
from rlskip.store import CorruptDumpError, SingleFlight, UnsupportedTypeError, Writer


class Stage:
    """A stage that counts its calls and never returns the same twice."""

    def __init__(self) -> None:
        self.calls = 0

    @SkipManager.annotate(role="rollout")
    def generate(self, prompts: dict[str, Any], scale: int = 1) -> dict[str, Any]:
        self.calls += 1
        return {
            "tokens": torch.full((2, 3), self.calls * scale),
            "rm_scores": np.arange(2.0) + self.calls,
        }

    def at(self, step: int, prompts: Any = None, **kwargs: Any) -> int:
        """Call it at `step`; which call's result came back."""
        SkipManager.set_step(step)
        got = self.generate(
            {"ids": torch.arange(3) + step} if prompts is None else prompts, **kwargs
        )
        return int(got["tokens"][0, 0])


def steps_on_disk(dump_dir: Path) -> list[str]:
    return sorted(p.parent.name for p in dump_dir.rglob("gen_batch.dp"))


# -- off -----------------------------------------------------------------------------------


def test_before_init_the_original_runs() -> None:
    stage = Stage()
    assert [stage.at(1), stage.at(1)] == [1, 2]


def test_off_the_original_runs(init: Callable[..., Path]) -> None:
    dumps = init(enable=False)
    stage = Stage()
    assert [stage.at(1), stage.at(1)] == [1, 2]
    assert not dumps.exists()


def test_the_decorated_function_keeps_its_face() -> None:
    assert Stage.generate.__name__ == "generate"
    assert Stage.generate.__qualname__ == "Stage.generate"


# -- cache ---------------------------------------------------------------------------------


def test_cache_replays_the_listed_steps_only(init: Callable[..., Path]) -> None:
    dumps = init(steps=[1, 3])
    first = Stage()
    assert [first.at(step) for step in (1, 2, 3)] == [1, 2, 3]
    assert steps_on_disk(dumps) == ["1", "3"]
    init(steps=[1, 3])
    second = Stage()
    assert [second.at(step) for step in (1, 2, 3)] == [1, 1, 3]
    assert second.calls == 1


def test_a_missing_step_is_generated_again(init: Callable[..., Path]) -> None:
    dumps = init()
    first = Stage()
    [first.at(step) for step in (1, 2)]
    import shutil

    (gone,) = [p.parent for p in dumps.rglob("gen_batch.dp") if p.parent.name == "2"]
    shutil.rmtree(gone)
    second = Stage()
    assert [second.at(step) for step in (1, 2)] == [1, 1]
    assert steps_on_disk(dumps) == ["1", "2"]


def test_step_zero_and_numpy_steps(init: Callable[..., Path]) -> None:
    init()
    stage = Stage()
    assert [stage.at(0), stage.at(np.int64(0))] == [1, 1]


def test_no_step_set(init: Callable[..., Path]) -> None:
    init()
    with pytest.raises(StepNotSetError, match="set_step"):
        Stage().generate({"ids": [1]})


def test_a_corrupt_dump_counts_as_a_miss_and_is_kept(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init()
    Stage().at(1)
    (dump,) = dumps.rglob("gen_batch.dp")
    data = bytearray(dump.read_bytes())
    data[len(data) // 2] ^= 1
    dump.write_bytes(data)
    stage = Stage()
    stage.calls = 10
    assert stage.at(1) == 11
    assert "counts as a miss" in caplog.text
    stage.calls = 20
    assert stage.at(1) == 11, "the new dump stands in"
    assert len(list(dumps.rglob("gen_batch.dp"))) == 2, "the bad one is kept aside"


def test_what_cannot_be_dumped_still_reaches_the_trainer(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init()

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, Any]:
        return {"a": 1, "lock": threading.Lock()}

    SkipManager.set_step(1)
    assert generate([1])["a"] == 1
    assert "NOT dumped, training goes on" in caplog.text
    assert "lock" in caplog.text
    assert steps_on_disk(dumps) == []


def test_the_result_is_not_changed_by_dumping(init: Callable[..., Path]) -> None:
    init()
    result = TensorDict({"a": torch.arange(6).reshape(2, 3)}, batch_size=[2])

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> TensorDict:
        return result

    SkipManager.set_step(1)
    assert generate([1]) is result
    replayed = generate([1])
    assert replayed is not result
    assert (replayed["a"] == result["a"]).all()


# -- validation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        {"ids": [1], "validate": True},
        {"ids": [1], "meta_info": {"validate": True}},
        TensorDict({"ids": torch.ones(1, 1)}, [1]).set_non_tensor("validate", True),
        TensorDict({"ids": torch.ones(1, 1), "validate": NonTensorData(True)}, [1]),
        type("DataProto", (), {"batch": None, "meta_info": {"validate": True}})(),
        {"ids": [1], "validate": 1},
        {"ids": [1], "meta_info": {"validate": np.True_}},
        {"ids": [1, 2], "validate": torch.tensor([True, True])},
        TensorDict({"ids": torch.ones(2, 1), "validate": torch.ones(2, dtype=torch.bool)}, [2]),
        TensorDict({"ids": torch.ones(1, 1)}, [1]).set_non_tensor("meta_info", {"validate": 1}),
    ],
    ids=[
        "key", "meta_info", "non_tensor", "NonTensorData", "DataProto",
        "1", "np.True_", "tensor", "column", "wrapped meta_info",
    ],
)  # fmt: skip
def test_validation_always_bypasses(init: Callable[..., Path], prompts: Any) -> None:
    dumps = init()
    stage = Stage()
    stage.generate(prompts)  # before any step is set, as val_before_train does
    assert [stage.at(1, prompts), stage.at(1, prompts)] == [2, 3]
    assert steps_on_disk(dumps) == []


@pytest.mark.parametrize(
    "flag",
    [False, 0, None, np.False_, "true", "false", [], torch.tensor([]), torch.tensor([True, False])],
    ids=repr,
)
def test_what_is_no_validation(flag: Any) -> None:
    assert not is_validation({"validate": flag})
    assert not is_validation({"meta_info": {"validate": flag}})


# -- identity ------------------------------------------------------------------------------


def test_other_prompts_are_refused_with_three_ways_on(init: Callable[..., Path]) -> None:
    init()
    stage = Stage()
    stage.at(1)
    with pytest.raises(MismatchError) as caught:
        stage.at(1, {"ids": torch.tensor([7, 7, 7])})
    text = str(caught.value)
    assert "prompts" in text
    for way in ("on_mismatch=regenerate", "on_mismatch=ignore", "skip.dump_dir"):
        assert way in text
    assert stage.calls == 1


def test_uids_do_not_count(init: Callable[..., Path]) -> None:
    init()
    stage = Stage()
    ids = torch.arange(3)
    uids = [np.array(list("abc"), dtype=object), np.array(list("xyz"), dtype=object)]
    assert [stage.at(1, {"ids": ids, "uid": uid}) for uid in uids] == [1, 1]


def test_mismatch_regenerate_keeps_the_old_dump(init: Callable[..., Path]) -> None:
    dumps = init(on_mismatch="regenerate")
    stage = Stage()
    stage.at(1)
    other = {"ids": torch.tensor([7, 7, 7])}
    assert [stage.at(1, other), stage.at(1, other)] == [2, 2]
    assert len(list(dumps.rglob("gen_batch.dp"))) == 2


def test_mismatch_ignore(init: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    init(on_mismatch="ignore")
    stage = Stage()
    stage.at(1)
    assert stage.at(1, {"ids": torch.tensor([7, 7, 7])}) == 1
    assert "on_mismatch=ignore" in caplog.text


def test_sampling_counts_and_the_model_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(temperature: float, model: str) -> None:
        host = {
            "actor_rollout_ref": {"model": {"path": model}, "rollout": {"temperature": temperature}}
        }
        skip = {"dump_dir": str(tmp_path), "rollout": {"enable": True}}
        SkipManager.init({**host, "skip": skip})

    stage = Stage()
    start(1.0, "a")
    stage.at(1)
    start(1.0, "b")
    assert stage.at(1) == 1
    assert "model" in caplog.text
    start(0.7, "a")
    with pytest.raises(MismatchError, match=r"sampling.temperature: 0.7 now, 1.0 in the dump"):
        stage.at(1)


def test_sampling_asked_for_in_the_prompts_meta_counts(tmp_path: Path) -> None:
    """A greedy baseline is another batch; to ask for what the config says anyway is not."""
    skip = {"dump_dir": str(tmp_path), "rollout": {"enable": True}}
    SkipManager.init({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}, "skip": skip})
    stage = Stage()

    def at(**meta: Any) -> int:
        return stage.at(1, {"ids": torch.arange(3), "meta_info": meta})

    assert at(global_steps=1) == 1
    assert at(global_steps=9, temperature=np.float64(0.7), eos_token_id=2) == 1
    for meta in ({"do_sample": False}, {"temperature": 0.9}, {"top_k": torch.tensor(1)}):
        with pytest.raises(MismatchError, match=rf"extra.meta_info.{next(iter(meta))}: .* now"):
            at(**meta)
    proto = type("DataProto", (), {"batch": None, "non_tensor_batch": {"ids": torch.arange(3)}})()
    proto.meta_info = {"global_steps": 1}
    assert stage.at(1, proto) == 1
    proto.meta_info = {"do_sample": False}
    with pytest.raises(MismatchError, match=r"meta_info.do_sample: False now, absent in the dump"):
        stage.at(1, proto)


def test_uids_of_rows_do_not_count(init: Callable[..., Path]) -> None:
    init()
    stage = Stage()
    first, second, other = (
        [{"text": text, "uid": f"{run}-{text}"} for text in texts]
        for run, texts in (("a", "xy"), ("b", "xy"), ("b", "xz"))
    )
    assert [stage.at(1, first), stage.at(1, second)] == [1, 1]
    with pytest.raises(MismatchError):
        stage.at(1, other)


def test_prompts_that_cannot_be_compared_are_named(init: Callable[..., Path]) -> None:
    init()
    with pytest.raises(UnsupportedTypeError) as caught:
        Stage().at(1, {"ids": [1], "tools": [{"lock": threading.Lock()}]})
    text = str(caught.value)
    assert text.startswith("prompts['tools'][0]['lock']: cannot keep a _thread.lock")
    assert "annotate(prompts=...)" in text
    assert "the result" not in text


def test_identity_and_prompts_of_ones_own(init: Callable[..., Path]) -> None:
    init()
    calls = []

    @SkipManager.annotate(
        role="rollout",
        prompts=lambda texts, seed: sorted(texts),
        identity=lambda texts, seed: {"seed": seed},
    )
    def generate(texts: set[str], seed: int) -> int:
        calls.append(seed)
        return seed

    SkipManager.set_step(1)
    assert [generate({"a", "b"}, 1), generate({"b", "a"}, seed=1)] == [1, 1]
    assert calls == [1]
    with pytest.raises(MismatchError, match=r"extra.seed: 2 now, 1 in the dump"):
        generate({"a", "b"}, 2)


def test_prompts_named_by_argument(init: Callable[..., Path]) -> None:
    init()

    @SkipManager.annotate(role="rollout", prompts="batch")
    def generate(model: object, batch: list[int]) -> list[int]:
        return batch

    SkipManager.set_step(1)
    assert generate(object(), batch=[1]) == [1]
    assert generate(object(), [1]) == [1], "another model object is not part of the prompts"
    with pytest.raises(MismatchError):
        generate(None, [2])

    @SkipManager.annotate(role="rollout", prompts="batsch")
    def typo(model: object, batch: list[int]) -> None: ...

    with pytest.raises(ConfigError, match="has no argument 'batsch'"):
        typo(None, [1])


def test_a_stage_may_alter_its_input(init: Callable[..., Path]) -> None:
    init()

    @SkipManager.annotate(role="rollout")
    def generate(prompts: dict[str, Any]) -> int:
        prompts["priority"] = [1]
        return 5

    SkipManager.set_step(1)
    assert [generate({"ids": [1]}), generate({"ids": [1]})] == [5, 5]


# -- repeat --------------------------------------------------------------------------------


def test_repeat_picks_by_the_four_rules(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init(steps=[3, 6])
    stage = Stage()
    stage.at(3)
    stage.at(6)
    caplog.set_level(logging.INFO)
    init(action="repeat")
    assert stage.at(6) == 2, "the step itself"
    assert stage.at(5) == 1, "the largest below"
    assert stage.at(9) == 2
    assert stage.at(1) == 1, "the smallest above"
    assert stage.calls == 2
    assert "step 5 REPEATS step 3" in caplog.text


def test_repeat_without_any_dump_generates_and_dumps(init: Callable[..., Path]) -> None:
    dumps = init(action="repeat")
    stage = Stage()
    assert [stage.at(4), stage.at(5)] == [1, 1]
    assert steps_on_disk(dumps) == ["4"]


def test_repeat_looks_anew_on_every_call(init: Callable[..., Path]) -> None:
    dumps = init(action="cache")
    stage = Stage()
    stage.at(2)
    init(action="repeat")
    assert stage.at(5) == 1
    init(action="cache")
    stage.at(4)
    init(action="repeat")
    assert stage.at(5) == 2
    assert steps_on_disk(dumps) == ["2", "4"]


# -- the other keys ------------------------------------------------------------------------


def test_on_miss_error_never_calls_the_stage(init: Callable[..., Path]) -> None:
    init(on_miss="error")
    stage = Stage()
    with pytest.raises(MissError, match=r"step 1 has no usable dump"):
        stage.at(1)
    assert stage.calls == 0


def test_drop_fields(init: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    init()
    stage = Stage()
    stage.at(1)
    stage.at(1)
    stage.at(1)
    assert caplog.text.count("scores are replayed with the rollouts (rm_scores)") == 1
    init(drop_fields=["rm_scores", "nowhere"])
    SkipManager.set_step(1)
    assert set(stage.generate({"ids": torch.arange(3) + 1})) == {"tokens"}
    assert "drop_fields names nowhere" in caplog.text


def test_drop_fields_of_a_tensordict(init: Callable[..., Path]) -> None:
    init(drop_fields=["a"])

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> TensorDict:
        return TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, batch_size=[2])

    SkipManager.set_step(1)
    assert set(generate([1]).keys()) == {"a", "b"}, "only a replayed result is stripped"
    assert set(generate([1]).keys()) == {"b"}


def test_restore_rng(init: Callable[..., Path]) -> None:
    init(restore_rng=True)

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> int:
        torch.rand(100), np.random.rand(7), [random.random() for _ in range(5)]
        return 1

    def run() -> tuple[Any, ...]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        SkipManager.set_step(1)
        generate([1])
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    generated, replayed = run(), run()
    assert generated == replayed
    init(restore_rng=False)
    assert run() != generated


def test_off_policy_is_said_once(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    caplog.set_level(logging.INFO)
    stage = Stage()
    [stage.at(step) for step in (1, 2, 1, 2)]
    assert caplog.text.count("off-policy") == 1
    assert "step 2 replayed from" in caplog.text
    assert "ago by job job" in caplog.text


# -- async ---------------------------------------------------------------------------------


def test_async_stage(init: Callable[..., Path]) -> None:
    init()
    calls = []

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: list[int]) -> list[int]:
        await asyncio.sleep(0)
        calls.append(1)
        return prompts

    SkipManager.set_step(1)
    assert asyncio.iscoroutinefunction(generate)
    assert [asyncio.run(generate([3])), asyncio.run(generate([3]))] == [[3], [3]]
    assert len(calls) == 1


def test_generators_are_refused() -> None:
    with pytest.raises(TypeError, match="generator"):

        @SkipManager.annotate(role="rollout")
        def generate(prompts: list[int]) -> Any:
            yield prompts


# -- roles of one's own --------------------------------------------------------------------


@dataclass
class DoublingConfig(RoleConfig):
    factor: int = 2


@pytest.fixture
def doubling() -> Any:
    @register_skip("doubling", config=DoublingConfig)
    class DoublingSkip(BaseSkip):
        support_actions = (SkipAction.CACHE,)

        def __init__(self, local_config: DoublingConfig, global_config: Any) -> None:
            super().__init__(local_config, global_config)
            self.kept: dict[int, Any] = {}

        def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
            return step in self.kept

        def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kept[step] == "bad":
                raise CorruptDumpError("bad")
            return self.kept[step] * self.local_config.factor

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            self.kept[step] = result

    yield DoublingSkip
    del SKIP_REGISTRY["doubling"]


def test_a_role_of_ones_own(doubling: Any, init: Callable[..., Path]) -> None:
    init("doubling", own={"factor": 5})

    @SkipManager.annotate(role="doubling")
    def stage(x: int) -> int:
        return x

    SkipManager.set_step(1)
    assert [stage(3), stage(3)] == [3, 15]
    SkipManager.skip_instances["doubling"].kept[1] = "bad"
    assert stage(4) == 4, "found unusable while loading: a miss"
    assert stage(4) == 20
    with pytest.raises(ConfigError, match="does not support 'repeat'"):
        init("doubling", action="repeat")


def test_registering_badly() -> None:
    class Other(BaseSkip): ...

    with pytest.raises(RoleError, match="already is this role"):
        register_skip("rollout")(Other)
    known = SKIP_REGISTRY["rollout"]
    with pytest.raises(RoleError, match=r"already is role 'rollout'.*\n.*register a subclass"):
        register_skip("second")(known)
    assert known.role == "rollout"
    assert "second" not in SKIP_REGISTRY
    with pytest.raises(RoleError, match="no identifier"):
        register_skip("my role")
    with pytest.raises(RoleError, match=r"derive it from rlskip\.config\.RoleConfig"):
        register_skip("other", config=dict)  # type: ignore[arg-type]


# -- the table -----------------------------------------------------------------------------


def test_after_a_failed_init_nothing_runs_in_silence(init: Callable[..., Path]) -> None:
    init()
    with pytest.raises(ConfigError):
        init(stepz=1)
    with pytest.raises(NotInstalledError):
        Stage().at(1)


def test_init_replaces_what_was_on(init: Callable[..., Path]) -> None:
    init()
    SkipManager.set_step(3)
    SkipManager.init({})
    assert SkipManager.step is None
    assert SkipManager.skip_instances == {}


# -- records -------------------------------------------------------------------------------


def test_records_count_what_happened(init: Callable[..., Path]) -> None:
    dumps = init(steps="1-2")
    stage = Stage()
    [stage.at(step) for step in (1, 2, 1, 1, 9)]
    counts = tally({"rollout": str(dumps)}, "job")["rollout"]
    assert counts.consulted
    assert (counts.hits, counts.misses) == (2, 2)
    assert counts.bytes_read > 0
    assert counts.bytes_written > 0
    assert not tally({"rollout": str(dumps)}, "another job")["rollout"].consulted


def test_an_unlisted_step_is_consulted_too(init: Callable[..., Path]) -> None:
    dumps = init(steps=[5])
    Stage().at(1)
    counts = tally({"rollout": str(dumps)}, "job")["rollout"]
    assert (counts.consulted, counts.hits, counts.misses) == (True, 0, 0)


def test_a_torn_record_is_passed_over(init: Callable[..., Path]) -> None:
    dumps = init()
    Stage().at(1)
    (file,) = dumps.glob("records/job/*.jsonl")
    with open(file, "a") as out:
        out.write(json.dumps({"role": "rollout", "event": "hit"}) + '\n{"role": "rol')
    assert tally({"rollout": str(dumps)}, "job")["rollout"].hits == 1


# -- writing in the background -------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "promised", "background"),
    [
        ("auto", False, False),
        ("auto", True, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_background_writes_only_where_a_flush_is_certain(
    tmp_path: Path, said: Any, promised: bool, background: bool
) -> None:
    skip = {"dump_dir": str(tmp_path), "background_write": said, "rollout": {"enable": True}}
    SkipManager.init({"skip": skip}, flush_at_end=promised)
    role: Any = SkipManager.skip_instances["rollout"]
    held = threading.Event()
    write = role.store.write
    role.store.write = lambda *args: (held.wait(5), write(*args))[1]
    if not background:
        held.set()
    stage = Stage()
    assert stage.at(1) == 1
    assert steps_on_disk(tmp_path) == ([] if background else ["1"])
    held.set()
    SkipManager.flush()
    assert steps_on_disk(tmp_path) == ["1"]
    assert stage.at(1) == 1
    counts = tally({"rollout": str(tmp_path)}, "job")["rollout"]
    assert (counts.hits, counts.misses) == (1, 1)
    assert counts.bytes_written > 0


def test_repeat_sees_what_is_still_being_written(init: Callable[..., Path]) -> None:
    init(action="repeat", background_write=True)
    stage = Stage()
    assert [stage.at(step) for step in (1, 2, 3)] == [1, 1, 1]


def test_a_background_dump_that_fails_warns(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init(background_write=True)
    role: Any = SkipManager.skip_instances["rollout"]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    role.store.write = full
    stage = Stage()
    assert stage.at(1) == 1
    SkipManager.flush()
    assert "No space left on device" in caplog.text
    assert steps_on_disk(dumps) == []


def test_a_disk_too_slow_for_the_writer_does_not_end_training(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init(background_write=True)
    role: Any = SkipManager.skip_instances["rollout"]
    role.writer = Writer(role.store, timeout_s=0.1)
    held, write = threading.Event(), role.store.write
    role.store.write = lambda *args: (held.wait(20), write(*args))[1]
    stage = Stage()
    assert [stage.at(1), stage.at(2)] == [1, 2]
    assert "the dumps of steps 1 were not written within 0.1 s" in caplog.text
    held.set()
    SkipManager.flush()
    assert steps_on_disk(dumps) == ["1", "2"]
    assert [stage.at(1), stage.at(2)] == [1, 2]
    assert stage.calls == 2


_FULL = """
    import json, resource, sys
    import torch
    from rlskip import SkipManager
    background = sys.argv[2] == "background"
    SkipManager.init(
        {"skip": {"dump_dir": sys.argv[1], "background_write": background,
                  "rollout": {"enable": True}}}
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    @SkipManager.annotate(role="rollout")
    def generate(prompts):
        return torch.rand(1_000_000) if prompts[0] < 3 else torch.rand(10)

    for step in (1, 2, 3):
        SkipManager.set_step(step)
        assert len(generate([step])) == (10 if step == 3 else 1_000_000)
    SkipManager.flush()
"""


@pytest.mark.parametrize("writing", ["foreground", "background"])
def test_a_full_disk_does_not_end_training(tmp_path: Path, writing: str) -> None:
    """Really: no file may grow past 100 KB."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FULL), str(tmp_path), writing],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert steps_on_disk(tmp_path) == ["3"]
    for step in (1, 2):
        assert re.search(rf"step {step} .*NOT dumped.*File too large", done.stderr)
    assert not leases(tmp_path)
    assert not list(tmp_path.rglob(".work/*"))


# -- retention -----------------------------------------------------------------------------


def test_keep_last(init: Callable[..., Path]) -> None:
    dumps = init(keep_last=2)
    [Stage().at(step) for step in (1, 2, 3)]
    assert steps_on_disk(dumps) == ["2", "3"]


@pytest.mark.parametrize(("text", "size"), [(5, 5), ("2KB", 2000), ("1.5 KiB", 1536), ("7", 7)])
def test_max_size(init: Callable[..., Path], text: Any, size: int) -> None:
    dumps = init(max_size=text)
    assert SkipManager.skip_instances["rollout"].local_config.max_size == size
    [Stage().at(step) for step in (1, 2)]
    assert steps_on_disk(dumps) == ["2"], "the step just written always stays"
    with pytest.raises(ConfigError, match=r"skip.max_size: '5 apples' is no size"):
        init(max_size="5 apples")


# -- single flight -------------------------------------------------------------------------


def _job(folder: str, index: int, steps: list[int]) -> None:
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "rollout": {"enable": True}}})
    generated = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, int]:
        import time

        time.sleep(0.3)
        generated.append(prompts[0])
        return {"step": prompts[0]}

    for step in steps:
        SkipManager.set_step(step)
        assert generate([step]) == {"step": step}
    Path(folder, f"generated-{index}").write_text(" ".join(map(str, generated)))


def test_parallel_jobs_generate_each_step_once(tmp_path: Path) -> None:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    jobs = [
        context.Process(target=_job, args=(str(tmp_path), index, [1, 2, 3])) for index in range(3)
    ]
    [job.start() for job in jobs]
    [job.join(60) for job in jobs]
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    generated = " ".join((tmp_path / f"generated-{index}").read_text() for index in range(3))
    assert sorted(generated.split()) == ["1", "2", "3"]


def test_a_stage_that_fails_gives_the_lease_back(init: Callable[..., Path]) -> None:
    dumps = init()

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> int:
        if prompts == [0]:
            raise RuntimeError("out of memory")
        return 5

    SkipManager.set_step(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate([0])
    assert not [p for p in dumps.rglob(".leases/*") if p.is_file()]
    assert generate([1]) == 5
    assert not [p for p in dumps.rglob(".leases/*") if p.is_file()]


def leases(dumps: Path) -> list[Path]:
    return [p for p in dumps.rglob(".leases/*") if p.is_file()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_fails_before_the_stage_gives_the_lease_back(
    init: Callable[..., Path], asynchronous: bool
) -> None:
    dumps = init()

    def fail(*args: Any, **kwargs: Any) -> None:
        assert leases(dumps)
        raise RuntimeError("no memory")

    SkipManager.skip_instances["rollout"].before_stage = fail  # type: ignore[method-assign]

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> None: ...

    @SkipManager.annotate(role="rollout")
    async def generate_async(prompts: list[int]) -> None: ...

    SkipManager.set_step(1)
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(generate_async([1])) if asynchronous else generate([1])
    assert not leases(dumps)


def test_a_task_cancelled_while_it_waits_for_a_lease_leaves_none(
    init: Callable[..., Path],
) -> None:
    dumps = init()
    role: Any = SkipManager.skip_instances["rollout"]
    role.flight = SingleFlight(role.directory, role.ranks, wait_s=60, poll_s=0.05)
    other = role.flight.enter(1, lambda: False)

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: list[int]) -> None: ...

    async def main() -> None:
        SkipManager.set_step(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate([1]), 0.3)

    began = time.monotonic()
    releasing = threading.Timer(5, other.release)
    releasing.start()
    asyncio.run(main())  # waits for the thread
    assert time.monotonic() - began < 4, "the thread stops waiting, too"
    releasing.cancel()
    other.release()
    time.sleep(0.2)
    assert not leases(dumps)


def test_what_a_thread_acquires_after_its_call_is_given_back_at_once() -> None:
    cleanup, given_back = Cleanup(), []
    with cleanup:
        cleanup.add(lambda: given_back.append(1))
        handed_over = cleanup.pop_all()
        cleanup.add(lambda: given_back.append(2))
        assert given_back == []
    assert given_back == [2]
    cleanup.add(lambda: given_back.append(3))
    assert given_back == [2, 3]
    handed_over.close()
    assert given_back == [2, 3, 1]
