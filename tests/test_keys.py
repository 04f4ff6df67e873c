"""The key grammar: what is printed is parsed back, and no key is of two kinds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.keys import (
    KeyFormatError,
    SessionKey,
    TrajectoryKey,
    prompt_tag,
    row_tag,
    session_tag,
    split_session,
    split_trajectory,
    status_tag,
)

# Uids made of the very pieces that the grammar is made of, besides arbitrary text.
uids = st.one_of(
    st.text(min_size=1),
    st.lists(st.sampled_from(["_", "_sess", "0", "12", "a", "sess"]), min_size=1).map("".join),
)
ids = st.integers(0, 10**18 - 1)
keys = st.one_of(st.text(), st.lists(st.sampled_from(["_", "_sess", "0", "7", "a"])).map("".join))


@given(uids, ids, ids)
def test_a_trajectory_key_is_parsed_back(uid, session_id, index):
    key = TrajectoryKey(uid, session_id, index)
    assert TrajectoryKey.parse(str(key)) == key
    assert split_session(str(key)) is None


@given(uids, ids)
def test_a_session_marker_is_parsed_back(uid, session_id):
    key = SessionKey(uid, session_id)
    assert SessionKey.parse(str(key)) == key
    assert split_trajectory(str(key)) is None


@given(keys)
def test_whatever_parses_prints_as_it_was(key):
    for form in (TrajectoryKey, SessionKey):
        try:
            parsed = form.parse(key)
        except KeyFormatError:
            continue
        assert str(parsed) == key


def test_a_uid_may_hold_underscores_and_markers():
    assert TrajectoryKey.parse("math_7_b_3_0") == TrajectoryKey("math_7_b", 3, 0)
    assert SessionKey.parse("x_sess1_sess2") == SessionKey("x_sess1", 2)


@pytest.mark.parametrize(
    "key", ["", "u", "_0_0", "u_0", "u_0_", "u_00_1", "u_-1_0", "u_1_²", "u_0_" + "9" * 5000]
)
def test_what_is_no_trajectory_key_is_refused(key):
    with pytest.raises(KeyFormatError, match=r"expected \{uid\}_\{session_id\}_\{index\}"):
        TrajectoryKey.parse(key)


@pytest.mark.parametrize("key", ["", "_sess1", "u_sess", "u_sess01", "u_sess-1", "u_Sess1"])
def test_what_is_no_session_marker_is_refused(key):
    with pytest.raises(KeyFormatError, match=r"expected \{uid\}_sess\{session_id\}"):
        SessionKey.parse(key)


@pytest.mark.parametrize("bad", [-1, 1.0, "1", 10**18])
def test_ids_are_small_non_negative_integers(bad):
    with pytest.raises((TypeError, ValueError)):
        SessionKey("u", bad)


def test_tags_are_spelled_once():
    assert prompt_tag(3, n=8) == {"is_prompt": True, "global_steps": 3, "n": 8}
    assert status_tag(3, "pending") == {"is_prompt": True, "global_steps": 3, "status": "pending"}
    assert status_tag(3, "running", expected=8)["expected_rollouts"] == 8
    assert row_tag(3, attempt=1, reward=0.5) == {
        "status": "success",
        "global_steps": 3,
        "attempt": 1,
        "reward": 0.5,
    }
    marker = {"is_session": True, "session_id": 2, "attempt": 0}
    assert session_tag(2) == {**marker, "status": "success"}
    assert session_tag(2, error="boom") == {**marker, "status": "failure", "error": "boom"}
