"""What counts as the same call."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlskip.store import Identity, UnsupportedTypeError
from rlskip.store.identity import comparable

MADE = {
    "prompts": "ab",
    "n": 8,
    "response_len": 4096,
    "sampling.temperature": 1.0,
    "sampling.stop": ("a", "b"),
    "identity.tools": {"search": True},
}
NOTED = {"model": "some/model", "versions.torch": "2.13.0"}


def _identity(**changes: Any) -> Identity:
    return Identity.of({**MADE, **changes}, NOTED)


def _again(identity: Identity) -> Identity:
    return Identity.from_json(json.loads(json.dumps(identity.as_json())))


def test_equal_identities_have_no_differences() -> None:
    assert _identity().differences(_identity()) == ([], [])
    assert _again(_identity()) == _identity()
    assert _identity().differences(_again(_identity())) == ([], [])


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ({"n": 4}, ["n: 4 now, 8 in the dump"]),
        ({"prompts": "cd"}, ["prompts: 'cd' now, 'ab' in the dump"]),
        (
            {"sampling.temperature": 0.7, "sampling.min_p": 0.1},
            [
                "sampling.min_p: 0.1 now, absent in the dump",
                "sampling.temperature: 0.7 now, 1.0 in the dump",
            ],
        ),
        ({"identity.tools": {}}, ["identity.tools.search: absent now, True in the dump"]),
        ({"response_len": None}, ["response_len: None now, 4096 in the dump"]),
    ],
)
def test_differences_are_named(changes: dict, must: list[str]) -> None:
    assert _identity(**changes).differences(_identity()) == (must, [])


def test_what_is_noted_is_only_logged() -> None:
    then = Identity.of(MADE, {"model": "another", "versions.torch": "2.13.0"})
    warn = ["model: 'some/model' now, 'another' in the dump"]
    assert _identity().differences(then) == ([], warn)


def test_what_has_no_role_or_stage_was_made_by_hand() -> None:
    now = _identity(role="critic", stage="Trainer.score")
    assert now.differences(_identity(role="rollout", stage="Trainer.generate"))[0] == [
        "role: 'critic' now, 'rollout' in the dump",
        "stage: 'Trainer.score' now, 'Trainer.generate' in the dump",
    ]
    assert now.differences(_again(now)) == ([], [])
    assert now.differences(_identity()) == _identity().differences(now) == ([], [])


@pytest.mark.parametrize(
    ("now", "then", "must"),
    [
        (({"n": 2}, []), ({"n": 4}, ["n"]), ["arguments.n: 2 now, 4 in the dump"]),
        (({"n": 4}, ["n"]), ({}, []), []),
        (({}, []), ({"n": 4}, ["n"]), []),
        (({"n": 4}, []), ({}, []), ["arguments.n: 4 now, absent in the dump"]),
        (({}, []), ({"n": 4}, []), ["arguments.n: absent now, 4 in the dump"]),
        (({"n": 4}, []), ({"n": 4}, ["n"]), []),
        (({"n": 2}, ["n"]), ({"n": 4}, ["n"]), ["arguments.n: 2 now, 4 in the dump"]),
        (({"n": 2}, []), None, []),  # not known
        (None, ({"n": 2}, []), []),
    ],
)
def test_an_argument_at_its_default_equals_an_absent_one(now: Any, then: Any, must: Any) -> None:
    def made(arguments: Any) -> Identity:
        if arguments is None:
            return _identity()
        given, usual = arguments
        values = {f"arguments.{name}": value for name, value in given.items()}
        return Identity.of({**MADE, **values}, {**NOTED, "defaults": usual})

    assert made(now).differences(_again(made(then)))[0] == must
    assert bool(made(then).differences(made(now))[0]) == bool(must), "both ways"


def test_arguments_that_are_ignored_now_are_not_compared() -> None:
    noted = {"defaults": []}
    then = Identity.of({"arguments.a.top_p": 1, "arguments.b": 2}, noted)
    for ignored, left in (((), 2), (("a",), 1), (("a", "b"), 0), (("*",), 0)):
        now = Identity.of({}, noted, ignored)
        assert len(now.differences(then)[0]) == left


def test_the_digest_is_of_role_stage_and_prompts_alone() -> None:
    """It says where to look; whatever else differs, a replay judges and names."""
    now = _identity(role="rollout", stage="generate")
    assert now.digest() == _identity(role="rollout", stage="generate", n=1).digest()
    others = [_identity(role=role, stage="generate") for role in ("rollout", "other")]
    others += [now.for_prompts("other"), now.for_prompts(None), _identity()]
    assert len({now.digest(), *(other.digest() for other in others)}) == 5


@pytest.mark.parametrize("kind", [list, tuple, dict, str])
def test_how_long_a_value_is_changes_no_rule(kind: Any) -> None:
    """A long value is recorded as a hash: each dump's meta.json would hold it else."""

    def of(n: int, as_: Any = int, last: Any = 0) -> Any:
        if kind is str:
            return "a" * n + str(last)
        items = [as_(i) for i in range(n)] + [last]
        return {f"k{i}": item for i, item in enumerate(items)} if kind is dict else kind(items)

    for n in (3, 300, 5_000):
        now, equal, other = of(n), of(n, float), of(n, last=1)
        recorded = Identity.of({"x": now}).compared["x"]
        assert (n < 3000) or recorded.startswith(f"<{'list' if kind is tuple else kind.__name__}")
        assert not Identity.of({"x": now}).differences(Identity.of({"x": equal}))[0]
        assert Identity.of({"x": now}).differences(Identity.of({"x": other}))[0]
        if kind is not str:
            assert Identity.of({"x": now}).differences(Identity.of({"x": of(n, str)}))[0]


# -- equal values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.int64(8), 8),
        (1, 1.0),
        ([1, [2.0]], (1.0, [2])),
        (0.0, -0.0),
        (2**40, float(2**40)),
        (np.array(3), 3),
        (float("nan"), np.float32("nan")),
        (np.arange(3), torch.arange(3)),
        (np.array([1, 2], ">i8"), np.array([1, 2], "<i8")),
        ({"b", "a", "c"}, frozenset(["c", "a", "b"])),
        ({1: 2, "x": [None]}, {"x": (None,), np.int64(1): 2}),
        (OmegaConf.create({"a": [1, {"b": 2}]}), {"a": [1, {"b": 2}]}),
        ("\ud83d\ude00", "\U0001f600"),  # JSON makes one of two surrogates
        (b"ab", bytearray(b"ab")),
        (2**80, float(2**80)),
        ({1: 2, 0.0: 3}, {1.0: 2, -0.0: 3}),
        (Path("a"), Path("a")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_make_equal_identities(a: Any, b: Any) -> None:
    one, other = Identity.of({"x": a}), Identity.of({"x": b})
    for now, then in ((one, other), (other, one), (one, _again(other)), (other, _again(one))):
        assert now.differences(then) == ([], [])
    assert one.compared_digest() == _again(other).compared_digest()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1: 2}, {"<int 1>": 2}),
        ({"a"}, {"<set>": ["a"]}),
        (np.array([1, 2]), comparable(np.array([1, 2]), "x")),
        (b"ab", comparable(b"ab", "x")),
        (1, "1"),
        (None, "None"),
        ([], {}),
        ([1], [1, 1]),
        ({"a": None}, {}),
        (np.arange(5000), np.where(np.arange(5000) == 2500, 7, np.arange(5000))),
        (np.array([1, 2]), np.array([1, 2], np.int32)),
        (np.array([1, 2]), [1, 2]),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        ({1: "a", "1": "b"}, {"1": "b"}),
        ({1: "a", "1": "b"}, {1: "b", "1": "a"}),
        ({1: "a"}, {True: "a"}),
        ({(1, "a"): 1}, {"(1, 'a')": 1}),
        ({"a", "b"}, ["a", "b"]),
        (True, 1),
        (float("nan"), float("inf")),
        (float("nan"), None),
        (2**80, 2**80 + 1),
        (torch.bfloat16, torch.float16),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (Path("a"), Path("b")),
        (b"a", b"b"),
        ({1, 2}, {1, 3}),
        ("a" * 100 + "b" + "a" * 100, "a" * 100 + "c" + "a" * 100),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_make_different_identities(a: Any, b: Any) -> None:
    one, other = Identity.of({"x": a}), Identity.of({"x": b})
    for now, then in ((one, other), (other, one), (one, _again(other))):
        must, warn = now.differences(then)
        assert warn == []
        assert must
        for line in must:
            shown = line.removesuffix(" in the dump").split(": ", 1)[1].split(" now, ")
            assert shown[0] != shown[1], "the line shows what differs"
            assert len(line) < 200


def test_an_incomparable_value_names_its_field(incomparable: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"^identity\.tool") as caught:
        Identity.of({"identity.tool": [incomparable]})
    assert caught.value.where.startswith("identity.tool[0]")
    with pytest.raises(UnsupportedTypeError, match=r"^versions\.x"):
        Identity.of({}, {"versions.x": object()})


@pytest.mark.parametrize(
    "data",
    [5, None, [], "x", {}, {"compared": {}}, {"compared": {}, "noted": []},
     {"compared": {"prompts": 5}, "noted": {}}, {"compared": {}, "noted": {"defaults": "x"}},
     {"compared": {}, "noted": {"defaults": [5]}}, {"compared": {}, "noted": {}, "more": 1}],
)  # fmt: skip
def test_a_mapping_that_is_not_an_identity_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Identity.from_json(data)
