"""Waiting for groups: timeouts, progress lines, wake-ups, other threads."""

import logging
import pickle
import threading
import time

import pytest

from rlskip.keys import prompt_tag
from rlskip.replay import ReplayTimeoutError


def test_a_timeout_names_uids_and_sessions(buffer, rollouts):
    rollouts.counted("complete")
    rollouts.tag("slow", prompt_tag(1, 4))
    rollouts.session("slow", 0)
    rollouts.session("slow", 2, rows=0, error="boom")
    rollouts.session("orphan", 0)
    start = time.monotonic()
    with pytest.raises(TimeoutError) as error:
        buffer.sample(1, "train")
    assert time.monotonic() - start < 50
    assert "1 of 2 prompts are complete, 1 are running" in str(error.value)
    assert "slow: expected 4, got 1 (session 2 failed: boom; sessions 1, 3 missing)" in str(
        error.value
    )
    assert "keys without a prompt that has a step: orphan" in str(error.value)
    assert [prompt.uid for prompt in error.value.prompts] == ["slow"]
    assert pickle.loads(pickle.dumps(error.value)).prompts == error.value.prompts


def test_a_long_wait_is_logged(make_buffer, rollouts, caplog):
    buffer = make_buffer(timeout_s=1.0, progress_interval_s=0.25)
    rollouts.tag("slow", prompt_tag(1, 2))
    with caplog.at_level(logging.INFO), pytest.raises(ReplayTimeoutError):
        buffer.sample(1, "train")
    lines = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert 2 <= len(lines) <= 4
    assert "slow: expected 2, got 0 (sessions 0, 1 missing)" in lines[0]


def test_the_last_marker_wakes_the_sampler(make_buffer, rollouts, monkeypatch):
    monkeypatch.setattr("rlskip.replay.buffer._LONGEST_WAIT_S", 100)  # which no change ends
    buffer = make_buffer(timeout_s=100)
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
    trainer.join(60)
    assert returned
    assert returned[0] - last < 50


def test_others_may_count_and_clear_while_one_waits(make_buffer, rollouts):
    buffer = make_buffer(timeout_s=100)
    rollouts.counted("first", step=1)
    batch, _ = buffer.sample(1, "train")
    rollouts.tag("u", prompt_tag(2, 1))
    trainer = threading.Thread(target=buffer.sample, args=(2, "train"))
    trainer.start()
    time.sleep(0.05)
    start = time.monotonic()
    buffer.clear(batch)
    assert buffer.get_sampleable_count(2, "train") == 0
    assert time.monotonic() - start < 50
    rollouts.session("u", 0, step=2)
    trainer.join(60)
    assert not trainer.is_alive()
