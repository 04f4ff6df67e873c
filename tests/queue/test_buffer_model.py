"""No interleaving of puts, failures, retries, deletions and samples yields a short group, a
duplicate or a lost row: a buffer against a model that reads all tags each time."""

import itertools
import uuid
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlskip.keys import (
    TrajectoryKey,
    prompt_tag,
    row_tag,
    session_key,
    session_tag,
    status_tag,
    uid_of,
)
from rlskip.queue import IncompleteRolloutError, MemoryQueue, ReplayBuffer, ReplayTimeoutError

UIDS = st.integers(0, 4)  # a place among the uids, which refills add to
SESSIONS = st.integers(0, 2)
STEPS = st.integers(1, 2)
VIABLE = 2


class BufferAgainstModel(RuleBasedStateMachine):
    make_queue = MemoryQueue

    def __init__(self):
        super().__init__()
        # Ten looks at this clock: a busy machine does not decide when a call times out.
        clock = map((0.0001).__mul__, itertools.count()).__next__
        self.clock = mock.patch("rlskip.queue.buffer.monotonic", clock)
        self.clock.start()
        self.queue = self.make_queue()
        self.partition = uuid.uuid4().hex
        self.tags = {}  # what the queue must hold
        self.attempts = {}  # (uid, session) -> its attempt now
        self.sampled = set()
        self.uids = ["a", "b_1_2", "c_sess1"]
        self.replacing = {}  # uid -> that of the prompt that replaces it
        self.batches = []  # sampled and not deleted
        self.delivered = set()  # their keys

    @initialize(
        policy=st.sampled_from(["raise", "drop", "refill", "min_viable"]), states_rows=st.booleans()
    )
    def configure(self, policy, states_rows):
        self.policy = policy
        self.states_rows = states_rows  # whether a marker says how many rows its attempt wrote
        replay = {"on_incomplete": policy, "min_viable": VIABLE, "timeout_s": 0.001}
        self.buffer = ReplayBuffer(self.queue, {"replay": replay}, refill=self.refill)

    def teardown(self):
        self.clock.stop()

    # -- what writers do ---------------------------------------------------------------------
    def put(self, key, tag):
        self.queue.put([key], self.partition, [{"x": key}], [tag])
        self.tags[key] = {**self.tags.get(key, {}), **tag}

    def forget(self, uid):
        for key in self.keys_of(uid):
            del self.tags[key]
        self.sampled.discard(uid)

    def refill(self, partition, prompts):
        assert partition == self.partition
        uids = [self.replacing.pop(prompt.uid) for prompt in prompts]
        for uid in uids:
            self.queue.put([uid], partition, [{"x": 0}], [self.tags[uid]])
        return uids

    def uid(self, place):
        return self.uids[-1 - place % len(self.uids)]

    @rule(uid=UIDS, step=STEPS, n=st.integers(1, 3), counted=st.booleans())
    def submit(self, uid, step, n, counted):
        uid = self.uid(uid)
        if "is_prompt" not in self.tags.get(uid, {}):
            self.put(uid, prompt_tag(step, n) if counted else status_tag(step, "pending", n))

    @rule(
        uid=UIDS,
        session=SESSIONS,
        rows=st.integers(0, 2),
        ends=st.sampled_from([True, True, False]),
        error=st.sampled_from([None, None, "boom"]),
        other=st.integers(0, 2),
    )
    def run_session(self, uid, session, rows, error, ends=True, other=0):
        """A session that ran; with a marker already there, as the next attempt, which ends.

        So does an `other` attempt that was given up, and writes early or late.
        """
        uid = self.uid(uid)
        marker = session_key(uid, session)
        attempt = self.tags[marker]["attempt"] + 1 if marker in self.tags else 0
        for its, index in itertools.product({attempt, other}, range(rows)):
            key = TrajectoryKey.of_attempt(uid, session, index, its)
            self.put(str(key), row_tag(1, its))
        if ends or attempt:
            counted = rows if self.states_rows else None
            self.put(marker, session_tag(session, attempt, error, counted))

    @rule(uid=UIDS, step=STEPS, n=st.integers(1, 3), counted=st.booleans(), rows=st.integers(1, 2))
    def run_what_is_missing(self, uid, step, n, counted, rows):
        """All missing sessions of one prompt succeed."""
        self.submit(uid, step, n, counted)
        name = self.uid(uid)
        root = self.tags[name]
        for session in range(root["n"] if "n" in root else root["expected_rollouts"]):
            if not self.session_rows(name, session):
                self.run_session(uid, session, rows, None)
        if "n" not in root:
            self.put(name, {"status": "finished"})

    @rule(uid=UIDS, status=st.sampled_from(["running", "finished", "finished", "failure"]))
    def set_status(self, uid, status):
        """A worker's bare tag, sometimes before its prompt."""
        uid = self.uid(uid)
        # Without `is_prompt` the other uids read as a row and a marker.
        if uid in self.tags or uid == "a":
            self.put(uid, {"status": status})

    # -- what the trainer does -----------------------------------------------------------------
    @rule(step=STEPS, size=st.sampled_from([None, 1, 2]))
    def sample(self, step, size):
        refused, expected = self.expect(step, size)
        if expected is None:
            with pytest.raises(IncompleteRolloutError) as error:
                self.buffer.sample(step, self.partition, size)
            timed_out = isinstance(error.value, ReplayTimeoutError)
            missing = {uid for uid in self.prompts(step, size) if not self.finished(uid)}
            assert timed_out == (refused is None)
            assert {p.uid for p in error.value.prompts} == (missing if timed_out else refused)
            return
        batch, _ = self.buffer.sample(step, self.partition, size)
        roots = batch.extra_info["rollout_root_keys"]
        assert len(roots) == len(expected) if size else set(roots) == set(expected)
        assert [self.step(uid) for uid in roots] == [self.step(uid) for uid in expected]
        assert batch.keys == [key for uid in roots for key in self.rows(uid)]
        assert batch.partition_id == self.partition
        assert batch.tags == [self.tags[key] for key in batch.keys]
        assert not self.delivered & set(batch.keys), "a row was sampled twice"
        assert all(self.enough(uid) for uid in roots), "a short group"
        self.sampled.update(roots)
        self.delivered |= set(batch.keys)
        self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule()
    def clear_a_batch(self):
        batch = self.batches.pop(0)
        self.buffer.clear(batch)
        for uid in batch.extra_info["rollout_root_keys"]:
            self.forget(uid)
        self.delivered -= set(batch.keys)

    @rule(uid=UIDS)
    def evict(self, uid):
        uid = self.uid(uid)
        if uid not in self.sampled:
            with mock.patch.object(self.queue, "delete", None), pytest.raises(TypeError):
                self.buffer.evict([uid], self.partition)
            self.buffer.evict(uid, self.partition)
            self.forget(uid)

    # -- the model: reads all tags each time -----------------------------------------------------
    def expect(self, step, size):
        """(uids an error names, uids of a batch); both are None when the call must time out."""
        dropped = set()
        while True:
            scope = self.prompts(step, size)
            incomplete = {uid for uid in scope if self.finished(uid) and not self.enough(uid)}
            if incomplete and self.policy in ("raise", "min_viable"):
                return incomplete, None
            for uid in incomplete:
                at = self.step(uid)
                self.forget(uid)
                if self.policy == "refill":
                    new = f"{uid}-{len(self.uids)}"
                    self.uids.append(new)
                    self.replacing[uid], self.tags[new] = new, prompt_tag(at, 1)
                else:
                    dropped.add(uid)
            if incomplete:
                continue
            complete = sorted((uid for uid in scope if self.finished(uid)), key=self.step)
            if size is not None:
                return None, complete[:size] if len(complete) >= size else None
            if len(complete) < len(scope):
                return None, None
            if not complete and dropped:
                return dropped, None
            return None, complete or None

    def keys_of(self, uid):
        return [k for k in self.tags if k == uid or (uid_of(k) == uid and k not in self.uids)]

    def step(self, uid):
        return self.tags[uid]["global_steps"]

    def prompts(self, step, size):
        return [
            uid
            for uid, tag in self.tags.items()
            if "is_prompt" in tag
            and uid not in self.sampled
            and (size is not None or self.step(uid) == step)
        ]

    def finished(self, uid):
        root = self.tags[uid]
        if "n" not in root:
            return root["status"] in ("finished", "failure")
        return sum(session_key(uid, s) in self.tags for s in range(3)) >= root["n"]

    def session_rows(self, uid, session):
        """The rows of a session that succeeded, in order."""
        marker = self.tags.get(session_key(uid, session))
        if (marker is None and "n" in self.tags[uid]) or self.session_failed(uid, session):
            return []
        return self.rows_of_last_attempt(uid, session)

    def session_failed(self, uid, session):
        """Whether its marker says so, or states another number of rows than there are."""
        marker = self.tags.get(session_key(uid, session), {})
        there = len(self.rows_of_last_attempt(uid, session))
        return marker.get("status") == "failure" or marker.get("rows", there) != there

    def rows_of_last_attempt(self, uid, session):
        attempt = self.tags.get(session_key(uid, session), {}).get("attempt", 0)
        keys = [str(TrajectoryKey.of_attempt(uid, session, i, attempt)) for i in range(2)]
        return [key for key in keys if key in self.tags]

    def rows(self, uid):
        return [key for session in range(3) for key in self.session_rows(uid, session)]

    def enough(self, uid):
        root = self.tags[uid]
        expected = root["n"] if "n" in root else root["expected_rollouts"]
        succeeded = sum(bool(self.session_rows(uid, session)) for session in range(3))
        if self.policy == "min_viable" and min(VIABLE, expected) <= succeeded <= expected:
            return True
        failed = any(self.session_failed(uid, session) for session in range(3))
        failed = failed or ("n" not in root and root["status"] == "failure")
        return not failed and succeeded == expected

    @invariant()
    def nothing_is_lost(self):
        assert self.queue.list(self.partition) == self.tags

    @invariant()
    def the_count_is_right(self):
        if hasattr(self, "buffer"):
            prompts = self.prompts(1, size=1)
            ready = sum(self.finished(uid) and self.enough(uid) for uid in prompts)
            assert self.buffer.get_sampleable_count(1, self.partition) == ready


TestBufferAgainstModel = BufferAgainstModel.TestCase
TestBufferAgainstModel.settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.slow
def test_the_same_for_longer():
    many = settings(max_examples=80, stateful_step_count=40)
    run_state_machine_as_test(BufferAgainstModel, settings=many)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_same_on_a_real_transfer_queue(adapter):
    class OnTransferQueue(BufferAgainstModel):
        make_queue = staticmethod(lambda: adapter)

    few = settings(max_examples=12, stateful_step_count=25)
    run_state_machine_as_test(OnTransferQueue, settings=few)
