"""What counts as the same call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlskip.store import Identity, UnsupportedTypeError


def _identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "prompts_hash": "ab",
        "n": 8,
        "prompt_len": 1024,
        "response_len": 4096,
        "sampling": {"temperature": 1.0, "top_p": 0.9, "stop": ("a", "b")},
        "extra": {"tools": {"search": True}},
        "model": "some/model",
        "versions": {"torch": "2.13.0"},
    }
    return Identity(**{**values, **changes})


def test_equal_identities_have_no_differences() -> None:
    assert _identity().differences(_identity()) == ([], [])
    through_json = Identity.from_json(json.loads(json.dumps(_identity().as_json())))
    assert through_json == _identity()
    assert _identity().differences(through_json) == ([], [])


@pytest.mark.parametrize(
    ("changes", "must", "warn"),
    [
        ({"n": 4}, ["n: 4 now, 8 in the dump"], []),
        ({"prompts_hash": "cd"}, ["prompts: 'cd' now, 'ab' in the dump"], []),
        (
            {"sampling": {"temperature": 0.7, "stop": ["a", "b"], "min_p": 0.1}},
            [
                "sampling.min_p: 0.1 now, absent in the dump",
                "sampling.temperature: 0.7 now, 1.0 in the dump",
                "sampling.top_p: absent now, 0.9 in the dump",
            ],
            [],
        ),
        (
            {"extra": {"tools": {"search": False}}},
            ["extra.tools.search: False now, True in the dump"],
            [],
        ),
        ({"model": "another"}, [], ["model: 'another' now, 'some/model' in the dump"]),
        ({"versions": {"torch": "3"}}, [], ["versions.torch: '3' now, '2.13.0' in the dump"]),
        ({"response_len": None}, ["response_len: None now, 4096 in the dump"], []),
    ],
)
def test_differences_are_named(changes: dict, must: list[str], warn: list[str]) -> None:
    assert _identity(**changes).differences(_identity()) == (must, warn)


@pytest.mark.parametrize("where", ["sampling", "extra", "arguments", "defaults"])
def test_a_long_value_is_recorded_as_a_hash(where: str) -> None:
    """Else each dump's meta.json would hold a critic's weights, for example."""
    rows = [[float(i), float("nan")] for i in range(10_000)]
    for long in (rows, "word " * 20_000):
        made = Identity(**{where: {"x": {"y": long, "z": [1]}}})
        plain = getattr(made, where)["x"]
        assert plain["y"].startswith(f"<{type(long).__name__} of {len(long)}: ")
        assert plain["z"] == [1]
    same, other = ([[kind(i), float("nan")] for i in range(10_000)] for kind in (int, str))
    made, equal, differs = (Identity(extra={"x": value}) for value in (rows, same, other))
    assert made.differences(equal) == ([], [])
    ((line,), _) = made.differences(differs)
    assert line.startswith("extra.x: ")


@pytest.mark.parametrize(
    ("now", "then", "must", "warn"),
    [
        (({"n": 2}, {}), ({}, {"n": 4}), ["arguments.n: 2 now, 4 in the dump"], []),
        (({}, {"n": 4}), ({}, {}), [], []),
        (({}, {}), ({}, {"n": 4}), [], []),
        (({"n": 4}, {}), ({}, {}), ["arguments.n: 4 now, absent in the dump"], []),
        (({"n": 4}, {}), ({}, {"n": 4}), [], []),
        (({}, {"n": 2}), ({}, {"n": 4}), ["arguments.n: 2 now, 4 in the dump"], []),
        (({"n": 2}, {}), (None, {}), [], ["the dump does not record arguments.n"]),
        (({}, {"n": 2}), (None, {}), [], []),
        ((None, {}), ({"n": 2}, {}), [], []),
        (
            ({"x": {"seed": 1}}, {}),
            ({"x": {"a": 1, "seed": 2}}, {}),
            ["arguments.x.a: absent now, 1 in the dump"],
            [],
        ),
    ],
)
def test_an_argument_at_its_default_equals_an_absent_one(
    now: Any, then: Any, must: list[str], warn: list[str]
) -> None:
    ours, theirs = (_identity(arguments=given, defaults=usual) for given, usual in (now, then))
    differs, noteworthy = ours.differences(_again(theirs))
    assert differs == must
    assert [line[: len(start)] for line, start in zip(noteworthy, warn, strict=True)] == warn


def test_numbers_are_compared_by_value_and_flags_are_not_numbers() -> None:
    def sampling(value: Any) -> Identity:
        return _identity(sampling={"x": value})

    assert sampling(1).differences(sampling(1.0)) == ([], [])
    assert sampling(np.float64(1)).differences(sampling(1.0)) == ([], [])
    assert sampling(True).differences(sampling(1))[0] == ["sampling.x: True now, 1 in the dump"]
    assert sampling(1).differences(sampling(True))[0] == ["sampling.x: 1 now, True in the dump"]


# -- equal values -------------------------------------------------------------------------


def _again(identity: Identity) -> Identity:
    return Identity.from_json(json.loads(json.dumps(identity.as_json())))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.int64(8), 8),
        (np.float32(0.5), torch.tensor(0.5)),
        (np.array(3), 3),
        (np.bool_(True), True),
        (float("nan"), np.float32("nan")),
        ([float("nan")], (float("nan"),)),
        (np.arange(3), torch.arange(3)),
        (np.array([1, 2], ">i8"), np.array([1, 2], "<i8")),
        ({"b", "a", "c"}, frozenset(["c", "a", "b"])),
        ({1: 2, "x": [None]}, {"x": (None,), np.int64(1): 2}),
        (OmegaConf.create({"a": [1, {"b": 2}]}), {"a": [1, {"b": 2}]}),
        ("\ud83d\ude00", "\U0001f600"),  # JSON makes one of two surrogates
        (b"ab", bytearray(b"ab")),
        (2**80, 2**80),
        (Path("a"), Path("a")),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_make_equal_identities(a: Any, b: Any) -> None:
    one, other = Identity(extra={"x": a}), Identity(extra={"x": b})
    assert one == other
    assert one.differences(other) == ([], [])
    assert _again(one) == other
    assert _again(one).differences(other) == ([], [])
    assert attrs.evolve(one, n=None) == other


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.arange(5000), np.where(np.arange(5000) == 2500, 7, np.arange(5000))),
        (torch.zeros(5000), torch.zeros(5000).index_fill(0, torch.tensor([2500]), 1)),
        (np.array([1, 2]), np.array([1, 2], np.int32)),
        (np.array([1, 2]), [1, 2]),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        ({1: "a", "1": "b"}, {"1": "b"}),
        ({1: "a", "1": "b"}, {1: "b", "1": "a"}),
        ({1: "a"}, {True: "a"}),
        ({None: 1}, {"None": 1}),
        ({(1, "a"): 1}, {"(1, 'a')": 1}),
        ({"a", "b"}, ["a", "b"]),
        (True, 1),
        ([True], [1]),
        ([{"x": True}], [{"x": 1}]),
        (float("nan"), float("inf")),
        (float("nan"), None),
        (b"a", "b'a'"),
        (2**80, 2**80 + 1),
        (torch.bfloat16, torch.float16),
        ("a" * 100 + "b" + "a" * 100, "a" * 100 + "c" + "a" * 100),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_make_different_identities(a: Any, b: Any) -> None:
    one, other = Identity(extra={"x": a}), Identity(extra={"x": b})
    for old in (other, _again(other)):
        must, warn = one.differences(old)
        assert warn == []
        assert must
        for line in must:
            now, then = line.removesuffix(" in the dump").split(": ", 1)[1].split(" now, ")
            assert now != then, "the line shows what differs"
            assert len(line) < 200


def test_an_incomparable_value_names_its_field(incomparable: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"^extra\.tool") as caught:
        Identity(extra={"tool": [incomparable]})
    assert caught.value.where.startswith("extra.tool[0]")
    for name in ("sampling", "versions"):
        with pytest.raises(UnsupportedTypeError, match=rf"^{name}\.x"):
            Identity(**{name: {"x": object()}})


# -- role and stage, and what is no identity ----------------------------------------------------


def test_role_and_stage_are_compared() -> None:
    now = _identity(role="critic", stage="Trainer.score")
    assert now.differences(_identity(role="rollout", stage="Trainer.generate")) == (
        [
            "role: 'critic' now, 'rollout' in the dump",
            "stage: 'Trainer.score' now, 'Trainer.generate' in the dump",
        ],
        [],
    )
    assert now.differences(_again(now)) == ([], [])
    # A role used by hand does not record whose call it was.
    assert now.differences(_identity()) == ([], [])


@pytest.mark.parametrize(
    "data",
    [5, None, [], "x", {}, {"prompts": None, "sampling": [1]}, {"prompts": None, "extra": None},
     {"prompts": None, "nonsense": 1}],
)  # fmt: skip
def test_a_mapping_that_is_not_an_identity_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Identity.from_json(data)
