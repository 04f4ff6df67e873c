"""When a group is finished and complete, whatever else the queue holds."""

import pytest

from rlskip.keys import prompt_tag
from rlskip.queue import IncompleteRolloutError, ReplayTimeoutError


def missed(buffer, error):
    """The expected number, the number that succeeded and the missing sessions of the prompt `u`."""
    with pytest.raises(error) as caught:
        buffer.sample(1, "train")
    (prompt,) = caught.value.prompts
    assert prompt.uid == "u"
    return prompt.expected, prompt.actual, prompt.missing


def test_rows_come_by_session_and_index_however_they_were_written(buffer, rollouts):
    rollouts.tag("u", prompt_tag(1, 12))
    for session_id in reversed(range(12)):
        rollouts.session("u", session_id, rows=11)
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == [f"u_{s}_{i}" for s in range(12) for i in range(11)]


def test_a_marker_without_a_status_does_not_count(buffer, rollouts):
    rollouts.counted("u", n=1)
    rollouts.tag("u", {"n": 2})
    rollouts.tag("u_sess1", {"is_session": True, "session_id": 1})
    assert missed(buffer, ReplayTimeoutError) == (2, 1, (1,))


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
        ("stray", {"global_steps": 1}),
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


@pytest.mark.parametrize("policy", ["raise", "min_viable"])
@pytest.mark.parametrize("name", ["n", "expected_rollouts"])
@pytest.mark.parametrize("odd", ["two", 0, -1, 2.0, True, 10**30])
def test_an_invalid_count_is_never_complete_and_named(make_buffer, rollouts, policy, name, odd):
    buffer = make_buffer(on_incomplete=policy, min_viable=1)
    rollouts.counted("u") if name == "n" else rollouts.finished("u")
    rollouts.tag("u", {name: odd})
    with pytest.raises(IncompleteRolloutError, match=rf"u: .* got 2 .*invalid: {name}={odd!r}"):
        buffer.sample(1, "train")


def test_expected_rollouts_take_precedence_over_n(buffer, rollouts):
    rollouts.counted("u", n=2)
    rollouts.tag("u", {"expected_rollouts": 3})
    assert missed(buffer, IncompleteRolloutError) == (3, 2, (2,))
