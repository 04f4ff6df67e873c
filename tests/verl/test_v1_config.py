"""V1's config: what is refused, and what is plugged in before the trainer is made. No verl."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from omegaconf import DictConfig

from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError
from rlskip.hosts.verl.queue import StatusQueue
from rlskip.hosts.verl.trainer_config import OUR_MANAGER, OUR_SAMPLER, judge
from rlskip.keys import prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import TransferQueueAdapter
from tests.hosts import verl_config

JOURNAL = ("skip.rollout_tq.enable=true", "dispatch.rollout_level=true", "dispatch.journal=true")
SAMPLER = "trainer.v1.sampler.custom_sampler"
verl = functools.partial(verl_config.verl, "trainer.use_v1=true")


def prepare(config: DictConfig) -> None:
    judge(config, read_skip(config))


def sampler(config: DictConfig) -> Any:
    return config.trainer.v1.sampler


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("skip.rollout_tq.enable=true", "algorithm.filter_groups.enable=true"),
        (f"{SAMPLER}.path=mine.py", f"{SAMPLER}.name={OUR_SAMPLER['name']}"),
        ("dispatch.rollout_level=false", "trainer.use_v1=false"),
        ("merge.stepwise_output=false",),
    ],
)
def test_nothing_is_plugged_in_without_dispatch_and_replay(more: tuple[str, ...]) -> None:
    config = verl(*more)
    prepare(config)
    assert config == verl(*more)


@pytest.mark.parametrize(
    ("more", "manager", "on_incomplete"),
    [
        (["trainer.v1.rollout_level_dispatch=true"], OUR_MANAGER, "raise"),
        (["dispatch.rollout_level=true"], OUR_MANAGER, "raise"),
        (["replay.on_incomplete=min_viable", "replay.min_viable=3"], None, "min_viable"),
    ],
)
def test_what_is_plugged_in(more: list[str], manager: str | None, on_incomplete: str) -> None:
    config = verl(*more)
    prepare(config)
    prepare(config)  # again: the launcher and the trainer do
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == manager
    assert sampler(config).custom_sampler == OUR_SAMPLER
    settings = sampler(config).sampler_kwargs
    assert (settings.n, settings.val_n, settings.on_incomplete) == (4, 2, on_incomplete)
    assert manager or settings.min_viable == 3


@pytest.mark.parametrize(
    ("mode", "more", "span"),
    [
        ("sync", (), ("none", 3)),
        ("colocate_async", (), ("drop", 8)),
        ("colocate_async", ("replay.max_off_policy_strategy=wait",), ("wait", 3)),
        ("colocate_async", ("trainer.v1.sampler.max_off_policy_threshold=null",), ("none", 3)),
    ],
)
def test_verls_staleness_counts_in_async_modes_only(
    mode: str, more: tuple[str, ...], span: tuple[str, int]
) -> None:
    config = verl(f"trainer.v1.trainer_mode={mode}", "replay.max_off_policy_threshold=3", *more)
    prepare(config)
    settings = sampler(config).sampler_kwargs
    assert (settings.max_off_policy_strategy, settings.max_off_policy_threshold) == span


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["skip.async_rollout.enable=true"], "use skip.rollout_tq (+skip=rollout_tq_cache)"),
        (
            ["skip.rollout_tq.enable=true", "async_training.staleness_threshold=1"],
            "the fully async application never calls a stage 'rollout_tq'",
        ),
        (
            [
                "trainer.v1.rollout_level_dispatch=true",
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager",
            ],
            "agent_loop_manager_class: it is 'my.Manager', and rlskip needs its own",
        ),
        (
            ["replay.on_incomplete=raise", "trainer.v1.sampler.custom_sampler.name=Mine"],
            "trainer.v1.sampler.custom_sampler.name: it is 'Mine', and rlskip needs its own",
        ),
        (
            ["replay.on_incomplete=raise", "trainer.v1.sampler.sampler_kwargs.x=1"],
            "trainer.v1.sampler.sampler_kwargs: rlskip's buffer takes its settings from `replay`",
        ),
        (
            ["replay.timeout_s=9", "trainer.v1.sampler.sync_refill_failed_groups=true"],
            "sync_refill_failed_groups=false, and replay.on_incomplete=refill",
        ),
        (
            ["replay.on_incomplete=raise", "algorithm.filter_groups.enable=true"],
            "algorithm.filter_groups.enable: rlskip's buffer keeps every complete group",
        ),
        (["replay.on_incomplete=refill"], "data.gen_batch_size"),
        ([*JOURNAL, "dispatch.rollout_level=false"], "-> add +dispatch=rollout_level; or set"),
        (["skip.rollout.enable=true", "replay.on_incomplete=refill"], "2 problems"),
        (
            [*JOURNAL, "skip.rollout_tq.enable=false", "trainer.v1.trainer_mode=separate_async"],
            "add +skip=rollout_tq_cache, set trainer.v1.trainer_mode=colocate_async or sync; or",
        ),
        # What the trainer does nothing with.
        (["merge.stepwise_output=true"], "merge.stepwise_output: verl trains on the rows"),
        (["merge.stepwise_output=true", "trainer.use_v1=false"], "leave out +merge=..."),
        (["dispatch.rollout_level=true", "trainer.use_v1=false"], "dispatch: verl's V1 trainer"),
        (["replay.timeout_s=5", "trainer.use_v1=false"], "set trainer.use_v1=True"),
        (["dispatch.journal=true", "trainer.use_v1=false"], "dispatch.rollout_level: it is not"),
        (["dispatch.rollout_level=true", "async_training.x=1"], "leave out +dispatch=..."),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(verl(*more))
    assert message in str(refused.value)


def test_a_replayed_group_that_was_counted_is_finished_by_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put: list[Any] = []
    monkeypatch.setattr(TransferQueueAdapter, "put", lambda _, *given: put.append(given))
    queue = object.__new__(StatusQueue)
    queue.put(["u_sess0", "u_2_0"], "train", None, [session_tag(0), row_tag(1)])
    assert put == []
    counted = {**prompt_tag(1, 2), "status": "pending", "replayed": 1}
    queue.put(["u", "v"], "train", None, [counted, status_tag(1, "finished")])
    [(keys, _, _, tags)] = put
    assert keys == ["u", "v"]
    by_status = {**status_tag(1, "finished", expected=2), "replayed": 1}
    assert tags == [by_status, status_tag(1, "finished")]
