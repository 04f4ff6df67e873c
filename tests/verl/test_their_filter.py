"""verl's own tests of its group filter, run against rlskip's buffer: real TransferQueue, no verl.

Skipped without ``RLSKIP_VERL_SOURCE``, a checkout of verl 0.9 or later. Its test module is loaded
with rlskip's buffer in place of verl's two classes. Left out are the tests of private methods, and
those of decisions that differ: rlskip drops a failed prompt of validation, counts a group that is
both stale and without variance as stale only, and replaces a failed group even if others suffice.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlskip.config.replay import ReplayConfig

pytestmark = [pytest.mark.ray, pytest.mark.verl, pytest.mark.timeout(300)]

THEIR_TESTS = "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py"
THEIR_MODULE = "verl.trainer.ppo.v1.replay_buffer"
TESTS = (
    "test_async_dapo_refills_exact_missing_count",
    "test_dapo_reports_filtered_reward_value_breakdown",
    "test_sync_dapo_refills_twice_and_clears_surplus",
    "test_sync_dapo_and_failure_refill_credits_are_combined",
    "test_sync_dapo_streams_refill_credit_with_bounded_inflight",
    "test_sync_dapo_discards_unsent_credit_when_batch_fills",
    "test_sync_dapo_does_not_refill_when_filtered_surplus_leaves_a_full_batch",
    "test_async_failure_refills_exact_missing_count",
    "test_sync_failure_refill_replaces_empty_failed_groups",
    "test_sync_failure_refill_replaces_multiple_empty_failed_groups",
    "test_drop_refills_stale_groups_and_reports_metrics",
    "test_get_sampleable_count_excludes_stale_groups_without_consuming",
    "test_sample_prioritizes_smallest_global_steps",
)


def ours(
    *, trainer_mode: str, refill_fn: Any, filter_groups_metric: str | None,
    max_off_policy_threshold: int, max_off_policy_strategy: str,
    sync_refill_failed_groups: bool, train_batch_size: int | None, max_inflight_gen_batches: int,
    **_: Any,
) -> Any:  # fmt: skip
    """rlskip's buffer, made of what verl's tests pass to verl's."""
    from rlskip.hosts.verl.buffer import FailClosedReplayBuffer

    n = 1 if filter_groups_metric is None else 2  # as its tests finish groups
    refills = sync_refill_failed_groups or trainer_mode != "sync"
    settings = ReplayConfig(
        n=n, val_n=n, timeout_s=20.0, on_incomplete="refill" if refills else "raise"
    )
    if trainer_mode != "sync":
        settings.max_off_policy_threshold = max_off_policy_threshold
        settings.max_off_policy_strategy = max_off_policy_strategy
    kwargs = dataclasses.asdict(settings)
    if filter_groups_metric is not None:
        most = (train_batch_size or 0) * max_inflight_gen_batches
        kwargs["filter_groups"] = {"metric": filter_groups_metric, "max_inflight": most}
    # Its tests refill where they expect it, and only there.
    return FailClosedReplayBuffer(
        trainer_mode, {}, max_off_policy_threshold, max_off_policy_strategy, kwargs,
        refill_fn or (lambda n: pytest.fail("refilled")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    file = Path(os.environ.get("RLSKIP_VERL_SOURCE", "")) / THEIR_TESTS
    if not file.is_file():
        pytest.skip(f"RLSKIP_VERL_SOURCE has no {THEIR_TESTS}")
    ray = pytest.importorskip("ray")
    transfer_queue = pytest.importorskip("transfer_queue")
    from rlskip.hosts.verl.run_queue import run_queue

    parts = THEIR_MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    stubs = {name: ModuleType(name) for name in names}
    stubs[THEIR_MODULE].__dict__.update(
        ReplayBuffer=ours,
        ReplayBufferAsync=ours,
        DAPO_FILTERED_REWARD_COUNTS_KEY="_dapo_filtered_reward_counts",
    )
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    run_queue.cache_clear()
    run_queue()
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec = importlib.util.spec_from_file_location("their_tests", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "their_tests", module)
        spec.loader.exec_module(module)
        module.tq = SimpleNamespace(**{**vars(transfer_queue), "kv_put": _kv_put})
        yield module
    run_queue.cache_clear()
    transfer_queue.close()
    ray.shutdown()


def _kv_put(*, tag: dict[str, Any], **more: Any) -> Any:
    """Its tests leave out a row's status, which verl's workers write."""
    import transfer_queue

    status = {} if tag["is_prompt"] else {"status": "success"}
    return transfer_queue.kv_put(tag={**tag, **status}, **more)


@pytest.mark.parametrize("name", TESTS)
def test_theirs(theirs: Any, name: str) -> None:
    getattr(theirs, name)(None, f"test-{name}")
