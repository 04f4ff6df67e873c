"""`rlskip compare RUN`: the engine's log-probs against the trainer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlskip as package
from rlskip.compare.mismatch import mismatch
from rlskip.compare.sides import Side
from tests.compare.test_compare import PROMPT, RESPONSE, N, log_probs, rows


def test_one_run_tells_how_far_the_engine_is_from_the_trainer(
    job: Callable[..., Side], rlskip: Any, tmp_path: Path
) -> None:
    gap = torch.zeros(N, RESPONSE)
    gap[:, 0] = 0.25
    gap[4, 3] = -2.0  # row 4 has five tokens

    def body(step: int) -> None:
        package.record("engine_log_probs", log_probs(), rows=rows())
        order = torch.arange(N).flip(0)
        moved = {name: column[order] for name, column in rows().items()}
        package.record("old_log_probs", (log_probs() + gap)[order], rows=moved)

    job("run", body)
    data = rlskip("compare", "run", "-d", tmp_path, "--json").json
    assert [one["step"] for one in data["steps"]] == [1, 2]
    found = data["steps"][0]
    tokens = int(rows()["response_mask"].sum())
    figures = found["all"]
    assert figures["tokens"] == tokens
    assert figures["largest"] == pytest.approx(2.0, abs=1e-6)
    assert figures["mean"] == pytest.approx((0.25 * N + 2.0) / tokens, rel=1e-5)
    kl = (N * (math.expm1(0.25) - 0.25) + math.expm1(-2.0) + 2.0) / tokens
    assert figures["kl"] == pytest.approx(kl, rel=1e-5)
    assert figures["beyond"] == pytest.approx(1 / tokens)
    worst = found["worst"][0]
    assert (worst["token"], worst["row"]["session"]) == (PROMPT + 3, 1)
    around, at = worst["around"]
    assert around[at] == rows()["responses"][4, 3].item()

    shown = rlskip("compare", "run", "-d", tmp_path)
    assert shown.code == 0
    assert "old_log_probs minus engine_log_probs" in shown.out


@pytest.mark.parametrize("form", ["a mean", "a row", "digest"])
def test_log_probs_that_are_not_one_a_token_are_not_compared(
    job: Callable[..., Side], rlskip: Any, tmp_path: Path, form: str
) -> None:
    def body(step: int) -> None:
        package.record("engine_log_probs", log_probs(), rows=rows())
        if form == "a mean":
            package.record("old_log_probs", log_probs().mean())
        else:
            value = log_probs().sum(1) if form == "a row" else log_probs()
            package.record("old_log_probs", value, rows=rows())

    side = job("run", body, values="digest" if form == "digest" else "all")
    assert mismatch(1, side.records(1)) is None
    said = rlskip("compare", "run", "-d", tmp_path)
    assert (said.code, "a value for each token" in said.err) == (2, True)
