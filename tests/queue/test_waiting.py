"""Waiting for groups: timeouts, progress lines, wake-ups, other threads."""

import logging
import threading

import pytest

from rlskip.keys import prompt_tag
from rlskip.queue import ReplayTimeoutError


def test_a_timeout_names_uids_and_sessions(make_buffer, rollouts, clock):
    buffer = make_buffer(timeout_s=20)
    rollouts.counted("complete")
    rollouts.tag("slow", prompt_tag(1, 4))
    rollouts.session("slow", 0)
    rollouts.session("slow", 2, rows=0, error="boom")
    with pytest.raises(TimeoutError) as error:
        buffer.sample(1, "train")
    assert clock.now == 20
    assert str(error.value) == (
        "partition 'train', step 1: no batch after 20.0 s; 1 of 2 prompts are complete, 1 are "
        "running\n"
        "  slow: expected 4, got 1 (session 2 failed: boom; sessions 1, 3 missing)\n"
        "  -> find out why the sessions are missing; raise replay.timeout_s if they are only slow"
    )
    assert [prompt.uid for prompt in error.value.prompts] == ["slow"]


def test_a_long_wait_is_logged(make_buffer, rollouts, clock, caplog):
    buffer = make_buffer(timeout_s=100, progress_interval_s=30)
    rollouts.tag("slow", prompt_tag(1, 2))
    with caplog.at_level(logging.INFO), pytest.raises(ReplayTimeoutError):
        buffer.sample(1, "train")
    lines = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert [line.split("waiting for ")[1].split(";")[0] for line in lines] == [
        f"{seconds} of 100 s" for seconds in (30, 60, 90)
    ]
    assert all("slow: expected 2, got 0 (sessions 0, 1 missing)" in line for line in lines)


def test_a_change_ends_the_wait(make_buffer, rollouts, clock):
    buffer = make_buffer(timeout_s=100)
    rollouts.tag("u", prompt_tag(1, 1))
    clock.at(40.5, lambda: rollouts.session("u", 0))
    assert buffer.sample(1, "train")[0].keys == ["u_0_0"]
    assert clock.now == 40.5
    # Another thread may have taken the change for which this one waits.
    assert max(clock.waits) <= 1


def test_others_may_count_and_clear_while_one_waits(make_buffer, rollouts, clock):
    buffer = make_buffer(timeout_s=100)
    rollouts.counted("first", step=1)
    batch, _ = buffer.sample(1, "train")
    rollouts.tag("u", prompt_tag(2, 1))
    counts = []

    def clear_and_count():
        buffer.clear(batch)
        counts.append(buffer.get_sampleable_count(2, "train"))

    def meanwhile():
        other = threading.Thread(target=clear_and_count, daemon=True)
        other.start()
        other.join(20)
        rollouts.session("u", 0, step=2)

    clock.at(0, meanwhile)
    assert buffer.sample(2, "train")[0].keys == ["u_0_0"]
    assert counts == [0]
