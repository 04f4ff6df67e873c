"""Digests of values, and which values count as equal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import rlskip as package
from rlskip.compare.sides import Side
from tests.compare.test_compare import compared

VECTOR = torch.randn(200, generator=torch.Generator().manual_seed(1))
CANCELS = torch.cat([VECTOR, -VECTOR])
LEAST = torch.finfo(torch.float32).min


def filled(fill: float, at: slice, values: torch.Tensor = VECTOR) -> torch.Tensor:
    values = values.clone()
    values[at] = fill
    return values


OFF = VECTOR + (torch.arange(200) == 199) * 1e-2


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "state"),
    [
        *(
            (filled(fill, at), filled(fill, at, OFF), {}, "differs")
            for fill in (-1e9, LEAST, math.nan)
            for at in (slice(1), slice(0, 198))
        ),
        (filled(-1e9, slice(9)), filled(-2e9, slice(9)), {}, "differs"),
        (filled(-1e9, slice(9)), filled(-1e9, slice(9)) * (1 + 2**-23), {}, "within rounding"),
        (filled(1e6, slice(1)), filled(1e6 + 1, slice(1), OFF), {}, "differs"),
        (VECTOR, VECTOR.roll(1) * (1 + 2**-23), {}, "differs"),
        (VECTOR, VECTOR.roll(1), {"rtol": 1e-3}, "differs"),
        (CANCELS, CANCELS * (1 + 1e-4 * CANCELS.roll(1)), {"rtol": 1e-3}, "within rounding"),
        (torch.ones(99), torch.ones(98), {"rtol": 0.1}, "differs"),
        (torch.zeros(9), -torch.zeros(9), {}, "within rounding"),
        (torch.zeros(9), -torch.zeros(9), {"rtol": 0.0}, "within rounding"),
        (VECTOR * math.nan, -(VECTOR * math.nan), {}, "equal"),
        (VECTOR.bfloat16(), VECTOR.bfloat16().float(), {}, "equal"),
        (VECTOR.bfloat16(), VECTOR, {"rtol": 0.0}, "differs"),
        (torch.arange(9), torch.arange(9.0), {}, "equal"),
        (torch.arange(9) + 2**60, torch.arange(9) + 2**60 + 1, {}, "differs"),
    ],
)
@pytest.mark.parametrize("values", ["all", "digest"])
def test_digests_judge_as_whole_values_do(
    job_of: Callable[..., Side],
    values: str,
    a: torch.Tensor,
    b: torch.Tensor,
    tolerance: dict[str, float],
    state: str,
) -> None:
    sides = (
        job_of(name, lambda step, x=x: package.record("of", x), steps=[1], values=values)
        for name, x in (("a", a), ("b", b))
    )
    (found,) = compared(*sides, **tolerance).stages
    assert found.state == state
    assert ("two dtypes" in found.note) is (state == "equal" and a.dtype != b.dtype)


@pytest.mark.parametrize(("values", "by"), [("all", 1e-5), ("digest", 1e-3)])
def test_one_large_value_hides_no_other(
    job_of: Callable[..., Side], values: str, by: float
) -> None:
    off = VECTOR + (torch.arange(200) == 199) * by
    sides = (
        job_of(name, lambda step, x=x: package.record("of", x), steps=[1], values=values)
        for name, x in (("a", filled(900.0, slice(1))), ("b", filled(900.0, slice(1), off)))
    )
    (found,) = compared(*sides).stages
    assert found.state == "differs"
