from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.dispatch import SLOTS, WORKERS, draw, makespan
from rlskip.dispatch import POLICIES, Placement
from rlskip.dispatch.scheduler import (
    Scheduler,
    SessionGroup,
    find_policy,
    longest_first,
    round_robin,
)
from rlskip.errors import ConfigError

ticks = itertools.count()


class AnyOrder(RuleBasedStateMachine):
    """Whatever is added, ends, fails, dies or is cancelled: no session is lost or run twice."""

    @initialize(
        workers=st.integers(1, 4),
        policy=st.sampled_from([*POLICIES.values(), lambda _: Placement(rank=next(ticks))]),
        per_worker=st.none() | st.integers(1, 3),
    )
    def start(self, workers, policy, per_worker):
        self.scheduler = Scheduler(workers, policy, per_worker)
        self.cap = per_worker or 10**9
        self.expected: dict[SessionGroup, set[int]] = {}  # not ended yet
        self.away: set[int] = set()
        self.failed_on: dict[tuple[SessionGroup, int], int] = {}

    @rule(
        n=st.integers(1, 4),
        prompts=st.integers(1, 3),
        known=st.sampled_from([(0, 0.0), (2, 9.0), (3, 1.0)]),
    )
    def add(self, n, prompts, known):
        for i in range(prompts):
            group = SessionGroup(i, prompts, n, [*known])
            self.expected[group] = set(range(n))
            self.scheduler.add(group, dict.fromkeys(range(n), 0))

    @rule()
    def hand_out(self):
        if (job := self.scheduler.next()) is not None:
            assert job.worker not in self.away
            if self.failed_on.get((job.group, job.session_id)) == job.worker:
                assert self.scheduler.there == {job.worker}

    @rule(data=st.data(), length=st.none() | st.floats(0, 9))
    def end(self, data, length):
        if running := [*self.scheduler.running]:
            job = data.draw(st.sampled_from(running))
            self.scheduler.done(job, length)
            self.expected[job.group].discard(job.session_id)

    @rule(data=st.data())
    def fail(self, data):
        if running := [*self.scheduler.running]:
            job = data.draw(st.sampled_from(running))
            self.scheduler.retry(job)
            self.failed_on[job.group, job.session_id] = job.worker

    @rule(data=st.data())
    def cancel(self, data):
        if self.expected:
            group = data.draw(st.sampled_from(list(self.expected)))
            self.scheduler.cancel({group})
            for job in [job for job in self.scheduler.running if job.group is group]:
                self.scheduler.done(job)
            del self.expected[group]

    @rule(data=st.data())
    def leave_or_come_back(self, data):
        worker = data.draw(st.integers(0, self.scheduler.workers - 1))
        if worker in self.away or len(self.scheduler.there) > 1:
            self.scheduler.change(worker, worker in self.away)
            self.away ^= {worker}

    @invariant()
    def the_cap_holds(self):
        loads = Counter(job.worker for job in self.scheduler.running)
        assert all(load <= self.cap for load in loads.values())
        assert loads == Counter(self.scheduler._load)

    @invariant()
    def each_session_is_in_one_place(self):
        state = self.scheduler
        waiting = [job for heap in state._waiting.values() for *_, job in heap]
        jobs = [*waiting, *state._again, *state.running]
        places = [(job.group, job.session_id) for job in jobs]
        assert Counter(places) == Counter((g, s) for g, left in self.expected.items() for s in left)

    def teardown(self):
        for worker in getattr(self, "away", ()):
            self.scheduler.change(worker, True)
        while hasattr(self, "scheduler"):
            if not (started := [*iter(self.scheduler.next, None), *self.scheduler.running]):
                break
            self.scheduler.done(started[0], 1.0)
            self.expected[started[0].group].remove(started[0].session_id)
        assert not any(getattr(self, "expected", {}).values())


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


def test_round_robin_goes_on_where_the_last_batch_ended():
    scheduler = Scheduler(4, round_robin)
    for expected in ([0, 1, 2], [0, 1, 3]):
        scheduler.add(SessionGroup(0, 1, 3), dict.fromkeys(range(3), 0))
        assert sorted(job.worker for job in iter(scheduler.next, None)) == expected


@pytest.mark.parametrize("name", ["longest", "no.such.module:f", "json:nothing", "json:__name__"])
def test_a_policy_that_is_not_there_is_refused_by_key(name):
    with pytest.raises(ConfigError, match=r"dispatch\.policy"):
        find_policy(name)


def test_a_placement_has_the_number_of_a_worker_and_a_rank() -> None:
    for odd in ({"worker": 1.5}, {"worker": "0"}, {"rank": "first"}):
        with pytest.raises((TypeError, ValueError)):
            Placement(**odd)


def test_policies_shorten_the_long_tail():
    figures = dict.fromkeys(["chunk", "least_loaded", "longest_first", "history"], 0.0)
    for seed in range(3):
        lengths, earlier = draw(1.2, seed)
        bound = max(lengths.max(), lengths.sum() / (WORKERS * SLOTS))
        for name in figures:
            history = earlier.mean(axis=1) if name == "history" else None
            policy = POLICIES.get(name, longest_first)
            figures[name] += makespan(lengths, policy, history) / bound / 3
    assert figures["chunk"] > figures["least_loaded"] > figures["longest_first"]
    assert 1.0 <= figures["history"] < figures["longest_first"] < 1.25
