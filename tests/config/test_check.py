"""Reading a mapping into a dataclass: every problem at once, each with its full key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlskip.config.check import Problem, raise_all, read
from rlskip.errors import ConfigError


@dataclass
class Inner:
    deep: int = 1


@dataclass
class Schema:
    flag: bool = False
    count: int = field(default=1, metadata={"min": 1})
    rate: float = 0.5
    name: str | None = None
    mode: str = field(default="a", metadata={"choices": ("abacus", "banana")})
    names: list[str] = field(default_factory=list)
    anything: Any = None
    table: dict[str, int] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def problems_of(node: dict[str, Any]) -> list[str]:
    problems: list[Problem] = []
    read(Schema, node, "root", problems)
    return list(map(str, problems))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"flag": "yes"}, "root.flag: expected bool, got 'yes' (str)"),
        ({"flag": 1}, "root.flag: expected bool, got 1 (int)"),
        ({"count": True}, "root.count: expected int, got True (bool)"),
        ({"count": 1.0}, "root.count: expected int, got 1.0 (float)"),
        ({"count": 0}, "root.count: must be at least 1, got 0"),
        ({"rate": "x"}, "root.rate: expected float, got 'x' (str)"),
        ({"name": 3}, "root.name: expected str or null, got 3 (int)"),
        ({"mode": "bananna"}, "did you mean 'banana'?"),
        ({"names": ["a", 1]}, "root.names: expected a list of str, got ['a', 1] (list)"),
        ({"names": "a"}, "root.names: expected a list of str, got 'a' (str)"),
        ({"table": {"k": "v"}}, "root.table: expected a mapping"),
        ({"inner": 3}, "root.inner: expected a mapping, got 3 (int)"),
        ({"inner": {"deep": "x"}}, "root.inner.deep: expected int"),
        ({"inner": {"depp": 1}}, "root.inner.depp: unknown key; did you mean root.inner.deep?"),
        ({"zzz": 1}, "root.zzz: unknown key; known: flag, count"),
    ],
)
def test_each_invalid_value_is_named(node: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(node)
    assert message in problem


def test_a_single_problem_is_not_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        raise_all([Problem("root.coutn", "unknown key", "did you mean root.count?")])
    assert (caught.value.where, caught.value.remedy) == ("root.coutn", "did you mean root.count?")
    raise_all([])
