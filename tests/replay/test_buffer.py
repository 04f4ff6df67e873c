"""ReplayBuffer on a MemoryQueue: readiness, fail-closed policies, staleness, waiting."""

import logging
import pickle
import threading
import time

import pytest

from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import KVBatchMeta, MemoryQueue
from rlskip.queue.transfer_queue import _PollingWatch
from rlskip.replay import IncompleteRolloutError, ReplayBuffer, ReplayTimeoutError


class Rollouts:
    """Writes a queue as sessions do."""

    def __init__(self, queue, partition="train"):
        self.queue, self.partition = queue, partition

    def tag(self, key, tag):
        self.queue.put([key], self.partition, None, [tag])

    def session(self, uid, session_id, rows=1, step=1, error=None, marker=True, attempt=0):
        keys = [f"{uid}_{session_id}_{index}" for index in range(rows)]
        if keys:
            fields = [{"x": index} for index in range(rows)]
            self.queue.put(keys, self.partition, fields, [row_tag(step, attempt)] * rows)
        if marker:
            self.tag(f"{uid}_sess{session_id}", session_tag(session_id, attempt, error))

    def counted(self, uid, n=2, step=1, **session):
        self.tag(uid, prompt_tag(step, n))
        for session_id in range(n):
            self.session(uid, session_id, step=step, **session)

    def finished(self, uid, n=2, step=1, status="finished"):
        for session_id in range(n):
            self.session(uid, session_id, step=step, marker=False)
        self.tag(uid, status_tag(step, status, expected=n))


@pytest.fixture
def queue():
    return MemoryQueue()


@pytest.fixture
def rollouts(queue):
    return Rollouts(queue)


@pytest.fixture
def make_buffer(queue):
    def make(refill=None, **replay):
        config = {"replay": {"timeout_s": 0.02, **replay}}
        return ReplayBuffer(queue, config, refill=refill)

    return make


@pytest.fixture
def buffer(make_buffer):
    return make_buffer()


# -- readiness -----------------------------------------------------------------------------------
def test_a_batch_is_whole_groups_and_names_its_roots(buffer, rollouts):
    rollouts.counted("counted", rows=2)
    rollouts.finished("finished")
    batch, metrics = buffer.sample(1, "train")
    assert batch.keys == [
        *("counted_0_0", "counted_0_1", "counted_1_0", "counted_1_1"),
        *("finished_0_0", "finished_1_0"),
    ]
    assert batch.extra_info["rollout_root_keys"] == ["counted", "finished"]
    assert batch.partition_id == "train"
    assert all(tag["status"] == "success" for tag in batch.tags)
    assert not any(metrics.values())


def test_rows_come_by_session_and_index_however_they_were_written(buffer, rollouts):
    rollouts.tag("u", prompt_tag(1, 12))
    for session_id in reversed(range(12)):
        rollouts.session("u", session_id, rows=11)
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == [f"u_{s}_{i}" for s in range(12) for i in range(11)]


def test_markers_do_not_finish_a_status_prompt(buffer, rollouts):
    rollouts.tag("u", status_tag(1, "running", expected=2))
    rollouts.session("u", 0)
    rollouts.session("u", 1)
    with pytest.raises(ReplayTimeoutError, match=r"u: expected 2, got 2 .*status running"):
        buffer.sample(1, "train")


def test_a_status_does_not_finish_a_counted_prompt(buffer, rollouts):
    rollouts.tag("u", {**prompt_tag(1, 2), "status": "finished"})
    rollouts.session("u", 0)
    with pytest.raises(ReplayTimeoutError, match=r"u: expected 2, got 1 .session 1 missing"):
        buffer.sample(1, "train")


def test_a_marker_without_a_status_does_not_count(buffer, rollouts):
    rollouts.counted("u", n=1)
    rollouts.tag("u", {"n": 2})
    rollouts.tag("u_sess1", {"is_session": True, "session_id": 1})
    with pytest.raises(ReplayTimeoutError, match=r"u: expected 2, got 1 .session 1 missing"):
        buffer.sample(1, "train")


def test_a_marker_may_come_before_its_prompt(buffer, rollouts):
    rollouts.session("u", 0)
    assert buffer.get_sampleable_count(1, "train") == 0
    rollouts.tag("u", prompt_tag(1, 1))
    assert buffer.sample(1, "train")[0].keys == ["u_0_0"]


def test_uids_may_look_like_other_keys(buffer, rollouts):
    uids = ["a_1_2", "a_sess3", "a_sess3_0_1", "a"]
    for uid in uids:
        rollouts.tag(uid, {"status": "running"})  # a bare tag first: it looks like a row of `a`
        rollouts.counted(uid, n=1)
    batch, _ = buffer.sample(1, "train")
    assert sorted(batch.keys) == sorted(f"{uid}_0_0" for uid in uids)


def test_tags_without_a_kind_are_read_by_the_form_of_their_key(buffer, rollouts):
    rollouts.tag("prompt_a", {"global_steps": 1, "status": "finished", "expected_rollouts": 2})
    for key in ("prompt_a_0_0", "prompt_a_0_1", "prompt_a_1_0"):
        rollouts.tag(key, {"global_steps": 1, "status": "success"})
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == ["prompt_a_0_0", "prompt_a_0_1", "prompt_a_1_0"]
    assert batch.extra_info["rollout_root_keys"] == ["prompt_a"]


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("bare", {"status": "finished"}),
        ("bare", {"status": "failure"}),
        ("stray", {"global_steps": 1}),
        ("stray", {"global_steps": 1, "status": "success"}),
        ("odd", {"is_session": True, "status": "success", "global_steps": 1}),
        ("other_0_0", {"is_session": True, "status": "failure"}),
        ("u_0_1", {"is_session": True, "status": "failure"}),
        ("other_0_0", {}),
        ("other_sess0", {"status": "failure"}),
        ("step", {"is_prompt": True, "global_steps": "one", "status": "finished"}),
        ("step", {"is_prompt": True, "global_steps": None, "n": 1}),
        ("u_0_0", {"attempt": None}),
        ("", {"is_prompt": True}),
    ],
)
def test_keys_that_tell_nothing_neither_crash_nor_block(buffer, rollouts, key, tag):
    rollouts.counted("u")
    rollouts.tag(key, tag)
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["u"]


def test_a_count_that_is_no_number_is_never_ready_and_named(buffer, rollouts):
    rollouts.counted("u")
    rollouts.tag("u", {"n": "two"})
    with pytest.raises(ReplayTimeoutError, match="u: expected some, got 2"):
        buffer.sample(1, "train")


def test_numpy_integers_are_numbers(buffer, rollouts):
    numpy = pytest.importorskip("numpy")
    rollouts.counted("u", n=numpy.int64(2), step=numpy.int64(1))
    assert len(buffer.sample(numpy.int64(1), "train")[0]) == 2


# -- fail closed ---------------------------------------------------------------------------------
INCOMPLETE = {
    "failed status": (
        lambda r: r.finished("u", status="failure"),
        "u: expected 2, got 2 (status failure)",
    ),
    "failed status, nothing expected": (
        lambda r: (r.session("u", 0, marker=False), r.tag("u", status_tag(1, "failure"))),
        "u: expected some, got 1 (status failure)",
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
def test_an_incomplete_group_raises_and_says_why(buffer, rollouts, case, batch_size):
    write, said = INCOMPLETE[case]
    write(rollouts)
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train", batch_size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert isinstance(error.value, RuntimeError)
    assert f"partition 'train', step 1: incomplete groups:\n  {said}\n" in str(error.value)
    assert buffer.get_sampleable_count(1, "train") == 0


def test_the_error_carries_its_facts_across_processes(buffer, rollouts):
    rollouts.counted("whole")
    rollouts.counted("short", n=3, error="boom")
    with pytest.raises(IncompleteRolloutError) as caught:
        buffer.sample(1, "train")
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert (error.partition_id, error.global_steps) == ("train", 1)
    (prompt,) = error.prompts
    assert (prompt.uid, prompt.expected, prompt.actual) == ("short", 3, 0)
    assert prompt.failed == ((0, "boom"), (1, "boom"), (2, "boom"))


def test_expectations_the_tag_does_not_record_come_from_the_config(make_buffer, queue):
    buffer = make_buffer(n=2, val_n=1)
    for partition in ("train", "val"):
        rollouts = Rollouts(queue, partition)
        rollouts.session("u", 0, marker=False)
        rollouts.tag("u", status_tag(1, "finished"))
    assert buffer.sample(1, "val")[0].keys == ["u_0_0"]
    with pytest.raises(IncompleteRolloutError, match="u: expected 2, got 1"):
        buffer.sample(1, "train")


def test_a_prompt_may_expect_fewer_than_the_config(make_buffer, rollouts):
    buffer = make_buffer(n=4)
    rollouts.counted("counted", n=1)
    rollouts.finished("finished", n=1)
    assert len(buffer.sample(1, "train")[0]) == 2


def test_drop_evicts_counts_and_logs(make_buffer, rollouts, queue, caplog):
    buffer = make_buffer(on_incomplete="drop")
    rollouts.counted("whole")
    rollouts.counted("broken", error="boom")
    rollouts.counted("elsewhere", step=2, error="boom")
    with caplog.at_level(logging.WARNING):
        batch, metrics = buffer.sample(1, "train")
    assert batch.extra_info["rollout_root_keys"] == ["whole"]
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert "broken: expected 2, got 0" in caplog.text
    left = queue.list("train")
    assert not any(key.startswith("broken") for key in left)
    assert "elsewhere" in left  # another step's groups are not this call's business


def test_a_step_that_dropped_everything_raises(make_buffer, rollouts):
    buffer = make_buffer(on_incomplete="drop", timeout_s=30)
    rollouts.counted("broken", error="boom")
    with pytest.raises(IncompleteRolloutError, match="every prompt was dropped:\n  broken"):
        buffer.sample(1, "train")


def test_a_batch_that_drops_left_too_small_says_so(make_buffer, rollouts):
    buffer = make_buffer(on_incomplete="drop")
    rollouts.counted("whole")
    rollouts.counted("broken", error="boom")
    with pytest.raises(
        ReplayTimeoutError, match=r"1 of 2 prompts .* 1 were incomplete and dropped"
    ):
        buffer.sample(1, "train", 2)


def test_refill_runs_the_prompt_again_under_its_uid(make_buffer, rollouts, queue):
    evicted = []

    def refill(partition, prompts):
        evicted.append((partition, [prompt.uid for prompt in prompts], list(queue.list("train"))))
        for prompt in prompts:
            rollouts.counted(prompt.uid, error="again" if len(evicted) < 2 else None, attempt=1)

    buffer = make_buffer(refill, on_incomplete="refill")
    rollouts.counted("u", error="boom")
    batch, metrics = buffer.sample(1, "train")
    assert batch.keys == ["u_0_0", "u_1_0"]
    assert evicted == [("train", ["u"], [])] * 2  # evicted before it is refilled
    assert metrics["training/rollout_failure/refilled_samples"] == 2


class PolledQueue(MemoryQueue):
    """Watched as TransferQueue is: listing after listing."""

    def watch(self):
        return _PollingWatch(self, 0.001, 0.01)

    def kv_list(self):
        return {name: self.list(name) for name in list(self._partitions)}


def test_a_refill_with_equal_tags_is_seen_by_a_watch_that_polls():
    queue = PolledQueue()
    rollouts = Rollouts(queue)

    def refill(partition, prompts):
        rollouts.counted("u", 2)  # cleared and put again between two listings

    config = {"replay": {"on_incomplete": "refill", "timeout_s": 2}}
    rollouts.tag("u", prompt_tag(1, 2))
    rollouts.session("u", 0)
    rollouts.session("u", 1, error="oops")
    batch, _ = ReplayBuffer(queue, config, refill=refill).sample(1, "train")
    assert batch.keys == ["u_0_0", "u_1_0"]


def test_a_uid_submitted_anew_at_another_step_is_another_prompt(make_buffer, rollouts, queue):
    buffer = make_buffer()
    rollouts.counted("u", 2, step=1)
    batch, _ = buffer.sample(1, "train")
    queue.clear([*batch.keys, "u", "u_sess0", "u_sess1"], "train")  # past the buffer
    rollouts.counted("u", 2, step=2)
    assert buffer.sample(2, "train")[0].keys == ["u_0_0", "u_1_0"]
    with pytest.raises(ReplayTimeoutError):
        buffer.sample(2, "train")


def test_refill_gives_up_on_a_line_of_replacements(make_buffer, rollouts):
    fresh = iter(f"fresh{i}" for i in range(100))

    def refill(partition, prompts):
        uids = [next(fresh) for _ in prompts]
        for uid in uids:
            rollouts.counted(uid, error="always")
        return uids

    buffer = make_buffer(refill, on_incomplete="refill", max_refills=3)
    rollouts.counted("whole")
    rollouts.counted("u", error="boom")
    with pytest.raises(IncompleteRolloutError, match="after 3 refills") as error:
        buffer.sample(1, "train")
    assert [prompt.uid for prompt in error.value.prompts] == ["fresh2"]


def test_a_uid_that_was_evicted_starts_its_refills_anew(make_buffer, rollouts):
    def refill(partition, prompts):
        rollouts.counted("u", error="again")

    buffer = make_buffer(refill, on_incomplete="refill", max_refills=1)
    for _ in range(2):
        rollouts.counted("u", error="boom")
        with pytest.raises(IncompleteRolloutError, match="after 1 refills") as error:
            buffer.sample(1, "train")
        assert error.value.prompts[0].failed == ((0, "again"), (1, "again"))
        buffer.evict(["u"], "train")


def test_a_step_waits_for_refills_that_have_not_arrived(make_buffer, rollouts):
    buffer = make_buffer(lambda partition, prompts: ["later"], on_incomplete="refill")
    rollouts.counted("whole")
    rollouts.counted("u", error="boom")
    with pytest.raises(ReplayTimeoutError, match="refills that have not arrived: later"):
        buffer.sample(1, "train")
    rollouts.counted("later")
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["whole", "later"]


def test_a_refill_names_one_uid_per_prompt(make_buffer, rollouts):
    buffer = make_buffer(lambda partition, prompts: [], on_incomplete="refill")
    rollouts.counted("u", error="boom")
    with pytest.raises(RlskipError, match="returned 0 uids for 1 prompts"):
        buffer.sample(1, "train")


def test_refill_without_a_callback_is_refused(queue):
    with pytest.raises(ConfigError, match=r"replay\.on_incomplete: refill needs a callback"):
        ReplayBuffer(queue, {"replay": {"on_incomplete": "refill"}})


def test_min_viable_takes_the_sessions_that_succeeded(make_buffer, rollouts, queue, caplog):
    buffer = make_buffer(on_incomplete="min_viable", min_viable=2)
    rollouts.counted("short", n=3)
    rollouts.session(
        "short", 1, rows=0, error="boom"
    )  # its row is there and must not be trained on
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


def test_min_viable_raises_below_its_minimum(make_buffer, rollouts):
    buffer = make_buffer(on_incomplete="min_viable", min_viable=2)
    rollouts.counted("u", n=3)
    rollouts.session("u", 0, rows=0, error="boom")
    rollouts.session("u", 1, rows=0, error="boom")
    with pytest.raises(IncompleteRolloutError, match="u: expected 3, got 1"):
        buffer.sample(1, "train")


# -- no duplicates, nothing lost -----------------------------------------------------------------
def test_one_call_cleans_up_rows_roots_and_markers(buffer, rollouts, queue):
    rollouts.counted("u", rows=2)
    rollouts.counted("next", step=2)
    batch, _ = buffer.sample(1, "train")
    buffer.clear(batch)
    assert sorted(queue.list("train")) == [
        "next",
        "next_0_0",
        "next_1_0",
        "next_sess0",
        "next_sess1",
    ]


def test_clean_up_after_chunks_and_concatenation(buffer, rollouts, queue):
    batches = []
    for step in (1, 2):
        rollouts.counted(f"u{step}", step=step)
        batches.append(buffer.sample(step, "train")[0])
    joined = KVBatchMeta.concat([chunk for batch in batches for chunk in batch.chunk(2)])
    assert joined.extra_info["rollout_root_keys"] == ["u1", "u2"]
    buffer.clear(joined)
    assert queue.list("train") == {}


def test_clearing_what_was_not_sampled_is_refused(buffer):
    with pytest.raises(RlskipError, match="does not say which prompts"):
        buffer.clear(KVBatchMeta(keys=["a"], tags=[{}], partition_id="train"))


@pytest.mark.parametrize("clean_up", [True, False])
def test_two_complete_validation_batches_at_one_step(make_buffer, queue, clean_up):
    buffer, rollouts = make_buffer(), Rollouts(queue, "val")
    for uid in ("a", "b"):
        rollouts.finished(uid, n=1)
        batch, metrics = buffer.sample(1, "val")
        assert batch.keys == [f"{uid}_0_0"]
        assert "validation/rollout_failure/evicted_samples" in metrics
        if clean_up:
            buffer.clear(batch)


def test_a_cleared_uid_may_come_again(buffer, rollouts):
    for step in (1, 2):
        rollouts.counted("u", step=step)
        batch, _ = buffer.sample(step, "train")
        assert len(batch) == 2
        buffer.clear(batch)


def test_a_root_that_went_and_comes_again_is_a_new_prompt(buffer, rollouts, queue):
    rollouts.counted("u", n=1)
    buffer.sample(1, "train")
    queue.clear(["u"], "train")
    assert buffer.get_sampleable_count(2, "train") == 0
    rollouts.counted("u", n=1, step=2)
    assert buffer.sample(2, "train")[0].keys == ["u_0_0"]


def test_what_a_late_session_writes_to_a_sampled_group_changes_nothing(buffer, rollouts):
    rollouts.counted("u")
    buffer.sample(1, "train")
    rollouts.session("u", 2)
    rollouts.tag("u", {"status": "finished"})
    with pytest.raises(ReplayTimeoutError, match="1 were sampled before"):
        buffer.sample(1, "train")


def test_a_retried_session_counts_once_with_its_last_rows(buffer, rollouts):
    rollouts.tag("u", prompt_tag(1, 1))
    rollouts.session("u", 0, rows=3, marker=False)
    rollouts.session("u", 0, rows=2, attempt=1)
    assert buffer.sample(1, "train")[0].keys == ["u_0_0", "u_0_1"]


def test_an_incomplete_prompt_can_be_evicted_and_the_rest_sampled(buffer, rollouts):
    rollouts.counted("whole")
    rollouts.counted("broken", error="boom")
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train")
    buffer.evict([prompt.uid for prompt in error.value.prompts], "train")
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["whole"]


# -- oldest first, staleness ---------------------------------------------------------------------
def test_batches_of_a_size_take_the_oldest_first(buffer, rollouts):
    for uid, step in (("c", 3), ("a", 1), ("b", 2), ("a2", 1)):
        rollouts.counted(uid, step=step)
    assert buffer.get_sampleable_count(3, "train") == 4
    roots = [buffer.sample(3, "train", 2)[0].extra_info["rollout_root_keys"] for _ in range(2)]
    assert roots == [["a", "a2"], ["b", "c"]]
    with pytest.raises(ReplayTimeoutError, match="0 of 1 prompts are whole"):
        buffer.sample(3, "train", 1)


def test_batch_size_must_make_sense(buffer):
    with pytest.raises(ValueError, match="at least 1"):
        buffer.sample(1, "train", 0)


def test_stale_groups_are_dropped_counted_and_replaced(make_buffer, rollouts, queue):
    replaced = []

    def refill(partition, prompts):
        replaced.extend(prompts)
        for prompt in prompts:
            rollouts.counted(prompt.uid + "-new", step=5)
        return [prompt.uid + "-new" for prompt in prompts]

    buffer = make_buffer(refill, max_off_policy_threshold=2, max_off_policy_strategy="drop")
    for step in (3, 4, 5):
        rollouts.counted(f"u{step}", step=step)
    rollouts.counted("stale and broken", step=1, error="boom")
    assert buffer.get_sampleable_count(5, "train") == 2
    batch, metrics = buffer.sample(5, "train", 3)
    assert batch.extra_info["rollout_root_keys"][:2] == ["u4", "u5"]
    assert metrics["training/off_policy/evicted_samples"] == 2
    assert {prompt.uid for prompt in replaced} == {"u3", "stale and broken"}
    assert not any(key.startswith("u3_") for key in queue.list("train"))


def test_a_refill_that_is_stale_itself_is_not_sampled_either(make_buffer, rollouts):
    def refill(partition, prompts):
        for prompt in prompts:
            rollouts.counted(prompt.uid, step=1)

    buffer = make_buffer(refill, max_off_policy_threshold=1, max_off_policy_strategy="drop")
    rollouts.counted("u", step=1)
    with pytest.raises(ReplayTimeoutError):
        buffer.sample(5, "train", 1)


def test_wait_lets_old_prompts_finish_before_anything_is_sampled(make_buffer, rollouts):
    buffer = make_buffer(max_off_policy_threshold=2, max_off_policy_strategy="wait")
    rollouts.counted("new", step=3)
    rollouts.tag("old", prompt_tag(2, 1))
    assert len(buffer.sample(2, "train", 1)[0]) == 2  # at step 2 `old` is not yet at the threshold
    rollouts.counted("new2", step=3)
    with pytest.raises(ReplayTimeoutError, match=r"about to be stale.*\n  old: expected 1, got 0"):
        buffer.sample(3, "train", 1)
    rollouts.session("old", 0, step=2)
    assert buffer.sample(3, "train", 1)[0].extra_info["rollout_root_keys"] == ["old"]


def test_age_does_not_matter_to_validation_or_to_none(make_buffer, queue):
    for strategy, partition in (("drop", "val"), ("wait", "val"), ("none", "train")):
        buffer = make_buffer(max_off_policy_threshold=1, max_off_policy_strategy=strategy)
        rollouts = Rollouts(queue, partition)
        rollouts.counted(strategy, step=1)
        rollouts.tag("in flight", prompt_tag(1, 1))
        batch, _ = buffer.sample(9, partition, 1)
        assert batch.extra_info["rollout_root_keys"] == [strategy]
        buffer.clear(batch)


# -- waiting -------------------------------------------------------------------------------------
def test_a_timeout_names_uids_and_sessions(buffer, rollouts):
    rollouts.counted("whole")
    rollouts.tag("slow", prompt_tag(1, 4))
    rollouts.session("slow", 0)
    rollouts.session("slow", 2, rows=0, error="boom")
    rollouts.session("orphan", 0)
    start = time.monotonic()
    with pytest.raises(TimeoutError) as error:
        buffer.sample(1, "train")
    assert time.monotonic() - start < 5
    assert "1 of 2 prompts are whole, 1 are under way" in str(error.value)
    assert "slow: expected 4, got 1 (session 2 failed: boom; sessions 1, 3 missing)" in str(
        error.value
    )
    assert "without a prompt that has a step: orphan" in str(error.value)
    assert [prompt.uid for prompt in error.value.prompts] == ["slow"]
    assert pickle.loads(pickle.dumps(error.value)).prompts == error.value.prompts


def test_a_long_wait_is_told_in_the_log(make_buffer, rollouts, caplog):
    buffer = make_buffer(timeout_s=0.2, progress_interval_s=0.05)
    rollouts.tag("slow", prompt_tag(1, 2))
    with caplog.at_level(logging.INFO), pytest.raises(ReplayTimeoutError):
        buffer.sample(1, "train")
    lines = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert 2 <= len(lines) <= 4
    assert "slow: expected 2, got 0 (sessions 0, 1 missing)" in lines[0]


def test_the_last_marker_wakes_the_sampler(make_buffer, rollouts):
    buffer = make_buffer(timeout_s=30)
    rollouts.tag("u", prompt_tag(1, 1))
    returned = []

    def sample():
        buffer.sample(1, "train")
        returned.append(time.perf_counter())

    trainer = threading.Thread(target=sample)
    trainer.start()
    time.sleep(0.1)
    last = time.perf_counter()
    rollouts.session("u", 0)
    trainer.join(10)
    assert returned
    assert returned[0] - last < 0.5  # half of what a wait lasts that no change ends


def test_others_may_count_and_clear_while_one_waits(make_buffer, rollouts):
    buffer = make_buffer(timeout_s=30)
    rollouts.counted("first", step=1)
    batch, _ = buffer.sample(1, "train")
    rollouts.tag("u", prompt_tag(2, 1))
    trainer = threading.Thread(target=buffer.sample, args=(2, "train"))
    trainer.start()
    time.sleep(0.05)
    start = time.monotonic()
    buffer.clear(batch)
    assert buffer.get_sampleable_count(2, "train") == 0
    assert time.monotonic() - start < 5
    rollouts.session("u", 0, step=2)
    trainer.join(10)
    assert not trainer.is_alive()
