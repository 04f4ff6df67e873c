"""Incomplete groups: raise, drop, min_viable."""

import logging
import pickle

import pytest

from rlskip.keys import prompt_tag, status_tag
from rlskip.queue import IncompleteRolloutError, ReplayTimeoutError

INCOMPLETE = {
    "failed status": (
        lambda r: r.finished("u", status="failure"),
        "u: expected 2, got 2 (status failure)",
    ),
    "failed marker": (
        lambda r: (r.counted("u"), r.session("u", 1, rows=0, error="out of memory")),
        "u: expected 2, got 1 (session 1 failed: out of memory)",
    ),
    "failed marker of a status prompt": (
        lambda r: (r.finished("u"), r.session("u", 0, rows=0, error="late")),
        "u: expected 2, got 1 (session 0 failed: late; status finished)",
    ),
    "a session without a row": (
        lambda r: (r.tag("u", prompt_tag(1, 2)), r.session("u", 0), r.session("u", 1, rows=0)),
        "u: expected 2, got 1 (session 1 missing)",
    ),
    "two rows of one session": (
        lambda r: (
            r.session("u", 0, rows=2, marker=False),
            r.tag("u", status_tag(1, "finished", expected=2)),
        ),
        "u: expected 2, got 1 (session 1 missing; status finished)",
    ),
    "a row without a status": (
        lambda r: (r.finished("u"), r.tag("u_1_1", {})),
        "u: expected 2, got 1 (session 1 missing; status finished)",
    ),
    "more sessions than its lowered n": (
        lambda r: (r.counted("u", n=3), r.tag("u", {"n": 2})),
        "u: expected 2, got 3",
    ),
    "nothing at all": (
        lambda r: r.tag("u", status_tag(1, "finished")),
        "u: expected some, got 0 (status finished)",
    ),
    "only rows of an earlier attempt": (
        lambda r: (r.counted("u", n=1), r.session("u", 0, rows=0, attempt=1)),
        "u: expected 1, got 0 (session 0 missing)",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_an_incomplete_group_raises_and_names_the_cause(buffer, rollouts, case, batch_size):
    write, said = INCOMPLETE[case]
    write(rollouts)
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train", batch_size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert isinstance(error.value, RuntimeError)
    assert error.value.where == "partition 'train', step 1"
    assert error.value.what == f"incomplete groups:\n  {said}"
    assert buffer.get_sampleable_count(1, "train") == 0


def test_the_error_names_twenty_prompts_and_carries_all_across_processes(buffer, rollouts):
    rollouts.counted("complete")
    for i in range(21):
        rollouts.counted(f"p{i}", error="boom")
    with pytest.raises(IncompleteRolloutError) as caught:
        buffer.sample(1, "train")
    lines = str(caught.value).splitlines()
    assert sum("expected 2, got 0" in line for line in lines) == 20
    assert "  and 1 more" in lines
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert (error.partition, error.step, len(error.prompts)) == ("train", 1, 21)
    prompt = error.prompts[0]
    assert (prompt.uid, prompt.expected, prompt.actual) == ("p0", 2, 0)
    assert prompt.failed == ((0, "boom"), (1, "boom"))


def test_expectations_missing_from_the_tag_come_from_the_config(make_buffer, queue, make_rollouts):
    buffer = make_buffer(n=2, val_n=1)
    for partition in ("train", "val"):
        rollouts = make_rollouts(partition)
        rollouts.session("u", 0, marker=False)
        rollouts.tag("u", status_tag(1, "finished"))
    assert buffer.sample(1, "val")[0].keys == ["u_0_0"]
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train")
    assert [(prompt.expected, prompt.actual) for prompt in error.value.prompts] == [(2, 1)]


def test_drop_evicts_counts_and_logs(make_buffer, rollouts, queue, caplog):
    buffer = make_buffer(on_incomplete="drop")
    rollouts.counted("complete")
    rollouts.counted("incomplete", error="boom")
    rollouts.counted("elsewhere", step=2, error="boom")
    with caplog.at_level(logging.WARNING):
        batch, metrics = buffer.sample(1, "train")
    assert batch.extra_info["rollout_root_keys"] == ["complete"]
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert "incomplete: expected 2, got 0" in caplog.text
    left = queue.list("train")
    assert not any(key.startswith("incomplete") for key in left)
    assert "elsewhere" in left  # another step's groups are not this call's business


@pytest.mark.parametrize(("partition", "size"), [("train", None), ("val", None), ("val", 1)])
def test_a_batch_that_dropped_everything_raises(make_buffer, make_rollouts, partition, size):
    buffer = make_buffer(on_incomplete="drop")
    make_rollouts(partition).counted("incomplete", error="boom")
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, partition, size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert [prompt.uid for prompt in error.value.prompts] == ["incomplete"]


def test_a_batch_of_validation_is_smaller_by_what_was_dropped(make_buffer, make_rollouts, clock):
    buffer, rollouts = make_buffer(on_incomplete="drop"), make_rollouts("val")
    for uid in ("a", "b", "c"):
        rollouts.counted(uid)
    rollouts.counted("incomplete", error="boom")
    batch, metrics = buffer.sample(1, "val", 3)
    assert clock.waits == []
    assert batch.extra_info["rollout_root_keys"] == ["a", "b"]
    assert metrics["validation/rollout_failure/evicted_samples"] == 1
    assert buffer.sample(1, "val", 1)[0].extra_info["rollout_root_keys"] == ["c"]


def test_min_viable_takes_the_sessions_that_succeeded(make_buffer, rollouts, queue, caplog):
    buffer = make_buffer(on_incomplete="min_viable", min_viable=2)
    rollouts.counted("short", n=3)
    rollouts.session("short", 1, rows=0, error="boom")  # its row exists and must not be trained on
    rollouts.finished("greedy", n=1, status="failure")
    rollouts.finished("failed", n=3, status="failure")
    batch, metrics = buffer.sample(1, "train")
    assert batch.keys == [
        *("short_0_0", "short_2_0"),
        "greedy_0_0",
        *("failed_0_0", "failed_1_0", "failed_2_0"),
    ]
    assert metrics["training/rollout_failure/short_samples"] == 3
    assert "short: expected 3, got 2" in caplog.text
    buffer.clear(batch)
    assert queue.list("train") == {}
