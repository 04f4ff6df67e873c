"""How far the engine's log-probs are from the trainer's, as the page has it by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rlskip as package
from rlskip.compare.sides import Side
from rlskip.report.curves import mean_gap
from tests.compare.test_compare import RESPONSE, N, log_probs, rows


def test_sampled_tokens_are_compared_wherever_their_rows_are(job: Callable[..., Side]) -> None:
    gap = torch.zeros(N, RESPONSE)
    gap[:, 0] = 0.25
    gap[4, 3] = -2.0  # row 4 has five tokens
    gap[0, 5] = 9.0  # row 0 has one

    def body(step: int) -> None:
        package.record("engine_log_probs", log_probs(), rows=rows())
        order = torch.arange(N).flip(0)
        moved = {name: column[order] for name, column in rows().items()}
        package.record("old_log_probs", (log_probs() + gap)[order], rows=moved)

    tokens = int(rows()["response_mask"].sum())
    found = mean_gap(job("run", body).records(1))
    assert found == pytest.approx((0.25 * N + 2.0) / tokens, rel=1e-5)


@pytest.mark.parametrize("form", ["a mean", "a row", "digest"])
def test_log_probs_that_are_not_one_a_token_are_not_compared(
    job: Callable[..., Side], form: str
) -> None:
    def body(step: int) -> None:
        package.record("engine_log_probs", log_probs(), rows=rows())
        if form == "a mean":
            package.record("old_log_probs", log_probs().mean())
        else:
            value = log_probs().sum(1) if form == "a row" else log_probs()
            package.record("old_log_probs", value, rows=rows())

    side = job("run", body, values="digest" if form == "digest" else "all")
    assert mean_gap(side.records(1)) is None
