"""Reading a mapping into a dataclass: every problem at once, each with its full key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlskip.config.check import Problem, raise_all, read
from rlskip.errors import ConfigError


@dataclass
class Schema:
    flag: bool = False
    count: int = field(default=1, metadata={"min": 1})
    rate: float = field(default=0.5, metadata={"min": 0})
    mode: str = field(default="a", metadata={"choices": ("abacus", "banana")})
    names: list[str] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)


def problems_of(node: dict[str, Any]) -> list[str]:
    problems: list[Problem] = []
    read(Schema, node, "root", problems)
    return list(map(str, problems))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"flag": "ja"}, "root.flag: Value 'ja' is not a valid bool"),
        ({"count": 1.5}, "root.count: Value '1.5' of type 'float' could not be converted"),
        ({"count": 0}, "root.count: must be at least 1, got 0"),
        ({"count": None}, "root.count: field 'count' is not Optional"),
        ({"rate": float("nan")}, "root.rate: must be at least 0, got nan"),
        ({"mode": "bananna"}, "did you mean 'banana'?"),
        ({"names": "a"}, "root.names: Invalid value assigned: str is not a ListConfig"),
        ({"names": [["a"]]}, "root.names: Cannot convert 'list' to string"),
        ({"table": {"k": "v"}}, "root.table: Value 'v' of type 'str' could not be converted"),
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
