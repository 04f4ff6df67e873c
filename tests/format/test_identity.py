"""What counts as the same call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlskip.store import Identity

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


@pytest.mark.parametrize(
    ("code", "is_told"),
    [("f, cpython-311 aa", False), ("f, cpython-311 bb", True), ("f, cpython-312 bb", False)],
)
def test_code_is_compared_within_a_version_of_python(code: str, is_told: bool) -> None:
    now, then = (Identity.of(MADE, {"code": one}) for one in ("f, cpython-311 aa", code))
    must, warn = now.differences(then)
    assert must == []
    assert any(line.startswith("code: ") for line in warn) == is_told


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


@pytest.mark.parametrize(
    "data",
    [5, None, [], "x", {}, {"compared": {}}, {"compared": {}, "noted": []},
     {"compared": {"prompts": 5}, "noted": {}}, {"compared": {}, "noted": {"defaults": "x"}},
     {"compared": {}, "noted": {"defaults": [5]}}, {"compared": {}, "noted": {}, "more": 1}],
)  # fmt: skip
def test_a_mapping_that_is_not_an_identity_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Identity.from_json(data)
