"""When a group is finished and complete, what an error says of one that is not, and attempts."""

import pickle
import threading

import pytest

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.keys import prompt_tag, status_tag
from rlskip.queue import IncompleteRolloutError, ReplayBuffer, ReplayTimeoutError, to_rows
from tests.queue.conftest import Rollouts

INCOMPLETE = [
    (lambda r: r.finished("u", status="failure"), "2, got 2 (status failure)"),
    (
        lambda r: (r.counted("u"), r.session("u", 1, rows=0, error="out of memory")),
        "2, got 1 (session 1 failed: out of memory)",
    ),
    (
        lambda r: (r.finished("u"), r.session("u", 0, rows=0, error="late")),
        "2, got 1 (session 0 failed: late; status finished)",
    ),
    (  # a session without a row
        lambda r: (r.tag("u", prompt_tag(1, 2)), r.session("u", 0), r.session("u", 1, rows=0)),
        "2, got 1 (session 1 missing)",
    ),
    (  # two rows of one session
        lambda r: (
            r.session("u", 0, rows=2, marker=False),
            r.tag("u", status_tag(1, "finished", expected=2)),
        ),
        "2, got 1 (session 1 missing; status finished)",
    ),
    (  # a row without a status
        lambda r: (r.finished("u"), r.tag("u_1_1", {})),
        "2, got 1 (session 1 missing; status finished)",
    ),
    (lambda r: (r.counted("u", n=3), r.tag("u", {"n": 2})), "2, got 3"),
    (lambda r: (r.counted("u", 3), r.tag("u", {"expected_rollouts": 3, "n": 2})), "2, got 3"),
    (
        lambda r: (r.counted("u"), r.tag("u", {"expected_rollouts": 3})),
        "3, got 2 (session 2 missing)",
    ),
    (lambda r: r.tag("u", status_tag(1, "finished")), "some, got 0 (status finished)"),
    (  # only rows of an earlier attempt
        lambda r: (r.counted("u", n=1), r.session("u", 0, rows=0, attempt=1)),
        "1, got 0 (session 0 missing)",
    ),
    *(
        (
            lambda r, rows=rows: (r.counted("u", 1, rows=rows), r.tag("u_sess0", {"rows": 2})),
            f"1, got 0 (session 0 failed: found {rows} of its 2 rows)",
        )
        for rows in (1, 3)
    ),
]


@pytest.mark.parametrize(("write", "said"), INCOMPLETE, ids=[said for _, said in INCOMPLETE])
@pytest.mark.parametrize("batch_size", [None, 1])
def test_an_incomplete_group_raises_and_names_the_cause(buffer, rollouts, write, said, batch_size):
    write(rollouts)
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train", batch_size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert error.value.where == "partition 'train', step 1"
    assert error.value.what == f"incomplete groups:\n  u: expected {said}"
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


@pytest.mark.parametrize("policy", ["raise", "min_viable"])
@pytest.mark.parametrize("name", ["n", "expected_rollouts"])
@pytest.mark.parametrize("odd", ["two", 0, 2.0, True, 10**30])
def test_an_invalid_count_is_never_complete_and_named(make_buffer, rollouts, policy, name, odd):
    buffer = make_buffer(on_incomplete=policy, min_viable=1)
    rollouts.counted("u") if name == "n" else rollouts.finished("u")
    rollouts.tag("u", {name: odd})
    rollouts.counted("v", n=3, step=2)
    rollouts.tag("v", {"n": 2})
    for step, said in ((1, "u: expected 0, got 2"), (2, "v: expected 2, got 3")):
        with pytest.raises(IncompleteRolloutError, match=said):
            buffer.sample(step, "train")


def test_expectations_missing_from_the_tag_come_from_the_config(make_buffer, queue):
    buffer = make_buffer(n=2, val_n=1)
    for partition in ("train", "val"):
        rollouts = Rollouts(queue, partition)
        rollouts.session("u", 0, marker=False)
        rollouts.tag("u", status_tag(1, "finished"))
    assert buffer.sample(1, "val")[0].keys == ["u_0_0"]
    with pytest.raises(IncompleteRolloutError, match="expected 2, got 1"):
        buffer.sample(1, "train")


# -- whose a key is --------------------------------------------------------------------------


def test_rows_come_by_session_and_index_however_they_were_written(buffer, rollouts):
    rollouts.tag("u", prompt_tag(1, 12))
    for session_id in reversed(range(12)):
        rollouts.session("u", session_id, rows=11)
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == [f"u_{s}_{i}" for s in range(12) for i in range(11)]
    rollouts.counted("u", 12, step=2)  # submitted again, it is another prompt
    assert len(buffer.sample(2, "train")[0]) == 12 * 11


def test_uids_may_look_like_other_keys(buffer, rollouts):
    uids = ["a_1_2", "a_sess3", "a_sess3_0_1", "a"]
    for uid in uids:
        rollouts.tag(uid, {"status": "running"})  # the key looks like a row of `a`
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
        ("other_0_0", {"is_session": True, "status": "failure"}),
        ("other_sess0", {"status": "failure"}),
        ("step", {"is_prompt": True, "global_steps": "one", "status": "finished"}),
        ("u_0_0", {"attempt": None}),
        ("", {"is_prompt": True}),
    ],
)
def test_keys_without_information_neither_crash_nor_block(buffer, rollouts, key, tag):
    rollouts.counted("u")
    rollouts.tag(key, tag)
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["u"]


# -- attempts --------------------------------------------------------------------------------


def test_a_late_row_of_an_earlier_submission_is_not_of_the_later(queue):
    """The first submission's only attempt is given up, and writes after the second has."""
    given_up, wrote, attempts = threading.Event(), threading.Event(), []

    def worker(prompt, sampling, session):
        attempts.append(session.attempt)
        if len(attempts) == 1:
            given_up.wait(20)
        x = "second" if session.attempt else "first"
        queue.put([session.key(0)], session.partition, [{"x": x}], [session.tag()])
        if x == "first":
            wrote.set()

    dispatch = {"session_timeout_s": 0.3, "max_retries": 0, "n": 1, "rollout_level": True}
    buffer = ReplayBuffer(queue)
    with RolloutDispatcher(LocalPool(worker, 1), queue, {"dispatch": dispatch}) as dispatcher:
        dispatcher.submit([{"uid": "u"}], step=1).result(20)
        buffer.evict(["u"], "train")
        dispatcher.submit([{"uid": "u"}], step=1).result(20)
        given_up.set()
        assert wrote.wait(20)
        batch, _ = buffer.sample(1, "train")
        assert to_rows(buffer.get(batch)) == [{"x": "second"}]
    assert attempts == [0, 1]
