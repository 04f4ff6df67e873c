"""SkyRL's own experiments, trainers and generator interface, from its wheel (see conftest.py).

Genuine are BasePPOExp, the config, prepare_generator_input, the trainer's generate(),
handle_dynamic_sampling() and postprocess_generator_output() with all that they call.
"""

from __future__ import annotations

import asyncio
import copy
import random
import types
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

import rlskip
from rlskip import SkipManager
from rlskip._wrap import AttachError
from rlskip.errors import ConfigError, MismatchError, NoEngineError
from rlskip.hosts import skyrl as host
from rlskip.hosts.standalone_config import CONFIG_VARIABLE


@pytest.fixture(autouse=True)
def _no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def on(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"skip": {"dump_dir": str(tmp_path / "dumps"), "rollout": {"enable": True}, **more}}


def without_times(seen: list[Any]) -> list[Any]:
    """What `train` returned, without the times that trajectories took."""
    for out, _, metrics in seen:
        out.pop("trajectory_generation_times", None)
        for found in (out.get("rollout_metrics") or {}, metrics):
            for name in [name for name in found if "_time_" in name]:
                del found[name]
    return seen


def train(trainer: Any, batch: Any, steps: tuple[int, ...] = (1, 2)) -> list[Any]:
    """What SkyRL's training loop does with each step before it makes tensors."""
    seen = []
    for step in steps:
        input_batch, uids = batch(step)
        out = asyncio.run(trainer.generate(input_batch))
        if trainer.cfg.generator.step_wise_trajectories:
            uids = [id_.instance_id for id_ in out["trajectory_ids"]]
        trainer.all_metrics["reward/before"] = sum(out["rewards"])
        out, uids = trainer.postprocess_generator_output(out, uids)
        seen.append((out, uids, dict(trainer.all_metrics)))
    return seen


# -- skip -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_wise", [False, True])
def test_the_second_run_generates_nothing_and_sees_the_same(
    make: Any, batch: Any, tmp_path: Path, step_wise: bool
) -> None:
    how = {"generator.step_wise_trajectories": step_wise}
    first = make(on(tmp_path), **how)
    seen = train(first, batch)
    assert first.generator.calls == [("train", 1), ("train", 2)]
    second = make(on(tmp_path), **how)
    replayed = train(second, batch)
    assert second.generator.calls == []
    assert "'trajectory_generation_times': [0." in str(seen)
    assert "time" not in str(replayed), "the times are those of the first run"
    assert replayed == without_times(seen)
    # The ids are SkyRL's own class again, and the metrics of the rollouts reach the trainer.
    [(out, _, metrics), _] = seen
    assert type(out["trajectory_ids"][0]) is type(batch(1)[0]["trajectory_ids"][0])
    assert "generate/mean" in metrics
    [run] = (tmp_path / "dumps").glob("*_*")
    assert run.name == "test_run_skyrl"
    assert [d.name for d in run.iterdir()] == ["GBS1024_N2_in512_out1024"]


@pytest.mark.parametrize("off", [False, True])
def test_the_tracker_shows_that_a_run_is_replayed(
    make: Any, batch: Any, tmp_path: Path, off: bool
) -> None:
    for share in (0.0, 1.0):
        trainer = make(on(tmp_path, log_metrics=not off))
        for step in (1, 2):
            train(trainer, batch, steps=(step,))
            trainer.tracker.log({"reward": 1.0}, step=step)
        assert [logged["reward"] for logged in trainer.tracker.logged] == [1.0, 1.0]
        found = [logged.get("rlskip/replayed") for logged in trainer.tracker.logged]
        assert found == ([None, None] if off else [share, share])


def test_evaluation_is_never_skipped(make: Any, batch: Any, tmp_path: Path) -> None:
    for _ in range(2):
        trainer = make(on(tmp_path))
        train(trainer, batch, steps=(1,))
        input_batch, _ = batch(1, "eval")
        asyncio.run(trainer.generator.generate(input_batch, disable_tqdm=True))
        assert ("eval", 1) in trainer.generator.calls
        assert SkipManager.bypassed == set()


JUDGE = "environment.skyrl_gym.llm_as_a_judge"  # the environment of the batches


@pytest.mark.parametrize(
    ("overrides", "sampling", "named"),
    [
        ({"generator.max_turns": 3}, {}, "identity.max_turns: 3 now, 1 in the dump"),
        ({"generator.zero_reward_on_non_stop": True}, {}, "identity.zero_reward_on_non_stop: True"),
        (
            {"generator.chat_template.name_or_path": "own"},
            {},
            "identity.chat_template.name_or_path",
        ),
        ({f"{JUDGE}.model": "other"}, {}, "identity.environment.llm_as_a_judge.model: 'other' now"),
        ({}, {"temperature": 0.5}, "identity.temperature: 0.5 now, 1.0 in the dump"),
        ({}, {"first": 2}, "prompts: "),
    ],
)
def test_what_shapes_skyrls_rollouts_is_compared(
    make: Any, batch: Any, tmp_path: Path, overrides: Any, sampling: Any, named: str
) -> None:
    train(make(on(tmp_path)), batch, steps=(1,))
    other = make(on(tmp_path), **overrides)
    with pytest.raises(MismatchError) as error:
        asyncio.run(other.generate(batch(1, **sampling)[0]))
    assert named in str(error.value)
    assert other.generator.calls == []


def test_what_a_class_of_the_users_adds_is_compared(make: Any, batch: Any, tmp_path: Path) -> None:
    def run(style: str) -> Any:
        trainer = make(on(tmp_path))
        generator, added = trainer.cfg.generator, {"style": style, "log_dir": style}
        fields = [(name, str, "") for name in added]
        generator.__class__ = make_dataclass("Own", fields, bases=(type(generator),))
        vars(generator).update(added)
        asyncio.run(trainer.generate(batch(1)[0]))
        return trainer.generator.calls

    assert (run("a"), run("a")) == ([("train", 1)], [])
    with pytest.raises(MismatchError, match=r"identity\.style: 'b' now, 'a' in the dump\n"):
        run("b")


def test_log_probs_are_needed_or_more_than_needed(make: Any, batch: Any, tmp_path: Path) -> None:
    def run(logprobs: int | None, name: str) -> Any:
        trainer = make(on(tmp_path / name))
        asyncio.run(trainer.generate(batch(1, logprobs=logprobs)[0]))
        return trainer.generator.calls

    assert run(1, "with") == run(None, "without") == [("train", 1)]
    assert run(1, "with") == run(None, "with") == run(None, "without") == []
    with pytest.raises(MismatchError, match="lacks what this run needs: rollout_logprobs"):
        run(1, "without")


def test_routes_of_experts_are_needed_in_training(make: Any, batch: Any, tmp_path: Path) -> None:
    config = on(tmp_path, validation="replay")
    train(make(config), batch, steps=(1,))
    asyncio.run(make(config).generator.generate(batch(1, "eval")[0]))
    needs = make(config, **{"trainer.policy.megatron_config.moe_enable_routing_replay": True})
    with pytest.raises(MismatchError, match="needs: rollout_expert_indices"):
        asyncio.run(needs.generate(batch(1)[0]))
    asyncio.run(needs.generator.generate(batch(1, "eval")[0]))
    assert needs.generator.calls == []


def test_a_batch_without_its_step_is_refused(make: Any, batch: Any, tmp_path: Path) -> None:
    without, _ = batch(2)
    without["batch_metadata"] = None
    with pytest.raises(AttachError, match="no batch_metadata"):
        asyncio.run(make(on(tmp_path)).generate(without))


# -- merge ------------------------------------------------------------------------------------

STEP_WISE = {"generator.step_wise_trajectories": True}
MERGE = {"merge": {"stepwise_output": True}}


def test_rlskip_merges_instead_of_skyrl(make: Any, batch: Any) -> None:
    random.seed(1)
    [(theirs, their_uids, their_metrics)] = train(
        make(None, **STEP_WISE, **{"generator.merge_stepwise_output": True}), batch, (1,)
    )
    random.seed(1)
    trainer = make(MERGE, **STEP_WISE)
    [(ours, our_uids, our_metrics)] = train(trainer, batch, (1,))
    assert our_uids == their_uids
    assert len(ours["response_ids"]) == 4
    # Everything of SkyRL's output except the metrics of the format, which are not used any more.
    for name in {name for name in theirs if theirs[name] is not None} - {"rollout_metrics"}:
        assert ours[name] == theirs[name], name
    # Rewards are counted before merging, as SkyRL counts them; and our report joins in.
    assert {name: our_metrics[name] for name in their_metrics} == their_metrics
    assert our_metrics["generate/num_seq_after_merge"] == 4
    assert our_metrics["generate/num_merge_breaks_drift"] == 0


def test_skyrls_own_flag_is_honoured(make: Any) -> None:
    trainer = make({"merge": {}}, **STEP_WISE, **{"generator.merge_stepwise_output": True})
    assert trainer.cfg.generator.merge_stepwise_output is False
    assert trainer.postprocess_generator_output.__wrapped__ is not None
    untouched = make(make_dataclass("Config", ["merge"])({}), **STEP_WISE)
    assert "postprocess_generator_output" not in vars(untouched)


def test_merging_without_turns_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"set generator\.step_wise_trajectories=true"):
        make(MERGE)


# -- without an inference engine -------------------------------------------------------------


def test_no_engine_is_started_and_no_weights_are_sent(
    skyrl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = skyrl("train.entrypoints.main_base").BasePPOExp
    started: list[int] = []
    monkeypatch.setattr(base, "get_inference_client", lambda self: started.append(1))
    skip = {"start_engine": False, "dump_dir": str(tmp_path), "rollout": {"enable": True}}
    experiment = object.__new__(host.with_rlskip(base, {"skip": skip}))
    client = experiment.get_inference_client()
    assert started == []
    asyncio.run(client.sleep())
    with pytest.raises(NoEngineError, match="SkyRL's generate is called"):
        client.generate({})

    sent: list[str] = []
    dispatch = types.SimpleNamespace(
        init_weight_sync_state=sent.append, save_weights_for_sampler=sent.append
    )
    trainer_class = skyrl("train.trainer").RayPPOTrainer
    trainer = object.__new__(trainer_class)
    trainer.tracker = types.SimpleNamespace(log=sent.append)
    monkeypatch.setattr(base, "get_trainer", lambda self: trainer)
    assert experiment.get_trainer() is trainer
    trainer.dispatch, trainer.inference_engine_client = dispatch, client
    trainer.init_weight_sync_state()
    asyncio.run(trainer.dispatch.save_weights_for_sampler())
    assert sent == []


def test_evaluation_is_replayed_as_a_role_of_its_own(make: Any, batch: Any, tmp_path: Path) -> None:
    seen = []
    for start_engine in (True, False):
        config = on(tmp_path, validation="replay", start_engine=start_engine)
        trainer = make(config, **{"trainer.eval_interval": 1})
        for step in (0, 1):
            if step:
                train(trainer, batch, steps=(step,))
            evaluate = trainer.generator.generate
            seen += [asyncio.run(evaluate(batch(step, "eval")[0])) for _ in range(2)]
        calls = [("eval", 0), ("eval", 0), ("train", 1), ("eval", 1), ("eval", 1)]
        assert trainer.generator.calls == (calls if start_engine else [])
    [first, second] = ([out["response_ids"] for out in half] for half in (seen[:4], seen[4:]))
    assert first == second
    assert first[0] != first[1], "each call has a dump of its own"
    trained, validated = rlskip.open(tmp_path / "dumps")
    assert [dump.name for dump in trained.dumps()] == ["1"]
    assert validated.directory.name == "rollout_val"
    assert [dump.name for dump in validated.dumps()] == ["0/0", "0/1", "1/0", "1/1"]


def test_steps_without_a_dump_are_named_when_the_trainer_is_made(
    make: Any, batch: Any, tmp_path: Path
) -> None:
    def refused(total: int | None, steps: str = "all", **how: Any) -> str:
        config = on(tmp_path, validation="replay", start_engine=False, steps=steps)
        trainer = make(config, **{"trainer.eval_interval": 2, **how})
        trainer.total_training_steps = total
        try:
            host.check_steps(trainer)
        except ConfigError as error:
            return str(error)
        return ""

    train(make(on(tmp_path)), batch, steps=(1, 2, 4))
    latest = tmp_path / "latest_ckpt_global_step.txt"
    resume = {"trainer.ckpt_path": str(tmp_path)}
    said = refused(5, **resume)
    assert "skip.rollout.on_miss=error: steps 3,5 have no usable dump in" in said
    assert "skip.rollout_val.on_miss=error: steps 0-4:2,5 have no usable dump in" in said
    latest.write_text("3")
    said = refused(5, **resume)
    assert "steps 5 have no usable dump" in said
    assert "skip.rollout_val.on_miss=error: steps 3-5 have" in said
    assert "skip.rollout.steps: steps 4,5 are not listed" in refused(5, "1-3", **resume)
    assert refused(None, **resume) == ""
    assert refused(5, **{"trainer.ckpt_path": "s3://bucket/run"}) == ""
    said = refused(2, **{"generator.max_turns": 3, f"{JUDGE}.base_url": "http://other"})
    assert (
        "were made for other rollouts: identity.environment.llm_as_a_judge.base_url: 'htt" in said
    )
    assert "identity.max_turns: 3 now, 1 in the dump" in said
    # With dynamic sampling the run may end with the dumps.
    said = refused(5, **{**resume, "trainer.algorithm.dynamic_sampling.type": "filter"})
    assert said.startswith("skip.rollout_val.on_miss=error: steps 3 have no usable dump")


def test_evaluation_without_an_engine_is_refused(make: Any, tmp_path: Path) -> None:
    skip = {"start_engine": False, "dump_dir": str(tmp_path), "rollout": {"enable": True}}
    with pytest.raises(ConfigError, match="validation generates") as error:
        make({"skip": skip}, **{"trainer.eval_interval": 5})
    assert error.value.where == "trainer.eval_interval"
    make({"skip": skip}, **{"trainer.eval_interval": -1})


# -- several calls a step ---------------------------------------------------------------------


def sample_dynamically(trainer: Any, batch: Any, steps: int = 2) -> list[list[Any]]:
    """SkyRL's loop with dynamic sampling: what the generator returned, by step and call."""
    seen: list[list[Any]] = []
    first = 0
    for step in range(1, steps + 1):
        seen.append([])
        sample_more = True
        while sample_more:
            input_batch, uids = batch(step, first=first)
            out = asyncio.run(trainer.generate(input_batch))
            out.pop("trajectory_generation_times", None)
            seen[-1].append(copy.deepcopy(out))
            *_, sample_more = trainer.handle_dynamic_sampling(out, uids)
            first += 2
    return seen


@pytest.fixture
def dynamic(make: Any, tmp_path: Path) -> Any:
    """``dynamic(kind, min_replace_ratio)``: a trainer that samples so; some groups have ties."""

    def dynamic(kind: str, min_replace_ratio: float = 0.5) -> Any:
        sampling = {"type": kind, "min_replace_ratio": min_replace_ratio, "max_sample_batches": 9}
        overrides = {f"trainer.algorithm.dynamic_sampling.{k}": v for k, v in sampling.items()}
        trainer = make(on(tmp_path), **overrides, **{"trainer.train_batch_size": 2})
        trainer.generator.ties = {"0", "1", "5"}
        trainer.dynamic_sampling_state = None
        return trainer

    return dynamic


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_dynamic_sampling_replays_every_call_of_a_step(dynamic: Any, batch: Any, kind: str) -> None:
    first = dynamic(kind)
    seen = sample_dynamically(first, batch)
    assert first.generator.calls == [("train", step) for step in (1, 1, 2, 2)]
    second = dynamic(kind)
    assert sample_dynamically(second, batch) == seen
    assert second.generator.calls == []


def test_the_fully_async_trainer_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.fully_async\.enabled: .*no certain step"):
        make(on(tmp_path), **{"trainer.fully_async.enabled": True})
