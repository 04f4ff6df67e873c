"""What a call may ask for, how long it waits, and what others may do meanwhile."""

import logging
import threading

import pytest
import torch

from rlskip.errors import RlskipError
from rlskip.keys import prompt_tag
from rlskip.queue import ReplayBuffer, UnequalFieldsError


@pytest.mark.parametrize("step", [1, 2])
def test_a_root_deleted_and_put_again_is_a_new_prompt(buffer, rollouts, queue, step):
    rollouts.counted("u", n=1)
    buffer.sample(1, "train")
    queue.delete(["u"], "train")
    assert buffer.get_sampleable_count(step, "train") == 0
    rollouts.tag("u", prompt_tag(step, 1))
    assert buffer.sample(step, "train")[0].keys == ["u_0_0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"batch_size": size}, f"at least 1, or None, got {size!r}") for size in (0, 1.5, True)),
        ({"step": "1"}, "whole number, got '1'"),
    ],
)
def test_arguments_that_name_no_groups_are_refused(buffer, rollouts, arguments, message):
    rollouts.counted("u")
    with pytest.raises(ValueError, match=message):
        buffer.sample(**{"step": 1, "partition": "train", **arguments})
    assert len(buffer.sample(torch.tensor(1), "train")[0]) == 2


def test_a_buffer_is_superseded_by_a_later_one(buffer, rollouts, queue):
    rollouts.counted("u")
    later = ReplayBuffer(queue)
    for call in (buffer.sample, buffer.get_sampleable_count):
        with pytest.raises(RlskipError, match="another ReplayBuffer was made"):
            call(1, "train")
    assert len(later.sample(1, "train")[0]) == 2


@pytest.mark.parametrize("fill", [False, True])
def test_rows_of_unequal_fields_are_read_as_collect_returns_them(queue, rollouts, fill):
    rollouts.counted("u")
    queue.put(["u_1_0"], "train", [{"note": "a"}])
    buffer = ReplayBuffer(queue, {"replay": {}, "dispatch": {"fill_missing": fill}})
    batch, _ = buffer.sample(1, "train")
    if fill:
        assert list(buffer.get(batch)["note"]) == [None, "a"]
        return
    with pytest.raises(UnequalFieldsError, match=r"session 0 of prompt 'u'.* lacks 'note'"):
        buffer.get(batch)


# -- waiting -----------------------------------------------------------------------------------


def test_a_timeout_names_uids_and_sessions(make_buffer, rollouts, clock, caplog):
    caplog.set_level(logging.INFO)
    buffer = make_buffer(timeout_s=100, progress_interval_s=30)
    rollouts.counted("complete")
    rollouts.tag("slow", prompt_tag(1, 4))
    rollouts.session("slow", 0)
    rollouts.session("slow", 2, rows=0, error="boom")
    rollouts.finished("open", status="running")
    with pytest.raises(TimeoutError) as error:
        buffer.sample(1, "train")
    assert clock.now == 100
    said = (
        "1 of 3 prompts are complete, 2 are running\n"
        "  slow: expected 4, got 1 (session 2 failed: boom; sessions 1, 3 missing)\n"
        "  open: expected 2, got 2 (status running)"
    )
    assert str(error.value) == (
        f"partition 'train', step 1: no batch after 100.0 s; {said}\n"
        "  -> find out why the sessions are missing; raise replay.timeout_s if they are only slow"
    )
    assert [prompt.uid for prompt in error.value.prompts] == ["slow", "open"]
    assert [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()] == [
        f"rlskip: partition 'train', step 1: waiting for {seconds} of 100 s; {said}"
        for seconds in (30, 60, 90)
    ]


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

    clock.at(40.5, meanwhile)
    assert buffer.sample(2, "train")[0].keys == ["u_0_0"]
    assert (counts, clock.now) == ([0], 40.5), "a change ends the wait"
    assert max(clock.waits) <= 1, "the other thread may have taken the change"
