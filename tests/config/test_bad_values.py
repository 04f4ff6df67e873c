"""Every kind of bad value at every key is a ConfigError that names the key, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.config.settings import read_skip
from rlskip.config.skip import BUILT_IN_ROLES, AttachConfig, RoleConfig
from rlskip.errors import RlskipError
from tests import readers

READERS: dict[str, tuple[Callable[[Any], Any], type]] = {
    **{node: (readers.READERS[node], readers.SCHEMAS[node]) for node in readers.READERS},
    "skip.rollout": (read_skip, RoleConfig),
    "skip.attach.rollout": (read_skip, AttachConfig),
}
KEYS = [
    (at, field.name) for at, (_, schema) in READERS.items() for field in dataclasses.fields(schema)
]


def nested(at: str, key: str, value: Any) -> dict[str, Any]:
    """``{"skip": {"rollout": {key: value}}}`` for ``skip.rollout``."""
    config: dict[str, Any] = {key: value}
    if at == "skip.attach.rollout" and key != "target":
        config["target"] = "m:f"
    for name in reversed(at.split(".")):
        config = {name: config}
    return config


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 2**63]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["???", "all", "~nobody/x", "s3://b", "-1", "1-", "9" * 400 + "GB", "\0"]),
    st.binary(max_size=3),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=30)
@pytest.mark.parametrize("at", READERS)
@given(data=st.data())
def test_a_value_is_read_or_refused_by_its_key(at: str, data: st.DataObject) -> None:
    reader, schema = READERS[at]
    key = data.draw(st.sampled_from([field.name for field in dataclasses.fields(schema)]))
    refused = None
    try:
        reader(nested(at, key, data.draw(values)))
    except RlskipError as error:
        refused = error
    assert refused is None or f"{at}.{key}" in str(refused)


# Where any mapping or any name below is right.
FREE = {
    "skip.attach",
    "dispatch.sampling",
    "dispatch.val_sampling",
    *map("skip.{}".format, BUILT_IN_ROLES),
}
FLAT = [(at, key) for at, key in KEYS if at != "skip.attach.rollout" and f"{at}.{key}" not in FREE]


@settings(max_examples=30)
@given(
    bad=st.sampled_from([b"x", {"no": 1}, [[0]]]),
    chosen=st.sets(st.sampled_from(FLAT), min_size=2, max_size=6),
)
def test_all_bad_keys_are_named_at_once(bad: Any, chosen: set[tuple[str, str]]) -> None:
    for root in {at.split(".")[0] for at, _ in chosen}:
        config: dict[str, Any] = {root: {}}
        for at, key in chosen:
            if at == root:
                config[root][key] = bad
            elif at.startswith(f"{root}."):
                config[root].setdefault(at.split(".")[1], {})[key] = bad
        with pytest.raises(RlskipError) as caught:
            READERS[root][0](config)
        for at, key in chosen:
            if at.split(".")[0] == root:
                assert f"{at}.{key}:" in str(caught.value)
