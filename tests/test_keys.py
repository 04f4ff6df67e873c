"""The key grammar: what is printed is parsed back, and no key is of two kinds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.keys import (
    KeyFormatError,
    TrajectoryKey,
    integer,
    prompt_tag,
    row_tag,
    session_key,
    session_tag,
    split_session,
    split_trajectory,
    status_tag,
    uid_of,
)

# Arbitrary text, and uids built from the parts of the grammar itself.
uids = st.one_of(
    st.text(min_size=1),
    st.lists(st.sampled_from(["_", "_sess", "0", "12", "a", "sess"]), min_size=1).map("".join),
)
ids = st.integers(0, 10**18 - 1)
keys = st.one_of(st.text(), st.lists(st.sampled_from(["_", "_sess", "0", "7", "a"])).map("".join))


@given(uids, ids, ids)
def test_a_key_is_parsed_back_as_what_it_is(uid, session_id, index):
    row, marker = TrajectoryKey(uid, session_id, index), session_key(uid, session_id)
    assert TrajectoryKey.parse(str(row)) == row
    assert split_session(marker) == (uid, session_id)
    assert split_session(str(row)) is split_trajectory(marker) is None
    assert uid_of(str(row)) == uid_of(marker) == uid


@given(keys)
def test_a_parsed_key_prints_unchanged(key):
    row, marker = split_trajectory(key), split_session(key)
    assert row is None or str(TrajectoryKey(*row)) == key
    assert marker is None or session_key(*marker) == key


rows = ["", "u", "_0_0", "u_0", "u_0_", "u_00_1", "u_-1_0", "u_1_²", "u_0_" + "9" * 19]
markers = ["_sess1", "u_sess", "u_sess01", "u_sess-1", "u_Sess1"]


@pytest.mark.parametrize("key", rows + markers)
def test_other_keys_are_refused(key):
    assert split_trajectory(key) is split_session(key) is None
    with pytest.raises(KeyFormatError):
        TrajectoryKey.parse(key)


@pytest.mark.parametrize(
    ("session", "index"), [(-1, 0), (1.0, 0), ("1", 0), (10**18, 0), (0, -1), (0, 10**6)]
)
def test_a_row_of_an_attempt_has_small_numbers_and_never_the_key_of_the_next(session, index):
    with pytest.raises(KeyFormatError):
        TrajectoryKey.of_attempt("u", session, index, 1)


def test_a_number_in_a_tag_is_an_integer():
    values = [3, np.int32(3), None, True, 3.0, "3"]
    assert [integer(value) for value in values] == [3, 3, None, None, None, None]


def test_tags_are_spelled_once():
    assert prompt_tag(3, n=8) == {"is_prompt": True, "global_steps": 3, "n": 8}
    assert status_tag(3, "pending") == {"is_prompt": True, "global_steps": 3, "status": "pending"}
    assert status_tag(3, "running", expected=8)["expected_rollouts"] == 8
    row = {"status": "success", "global_steps": 3, "attempt": 1, "reward": 0.5}
    assert row_tag(3, attempt=1, reward=0.5) == row
    marker = {"is_session": True, "session_id": 2, "attempt": 0}
    assert session_tag(2) == {**marker, "status": "success"}
    assert session_tag(2, attempt=1, rows=3)["rows"] == 3
    assert session_tag(2, error="boom") == {**marker, "status": "failure", "error": "boom"}
