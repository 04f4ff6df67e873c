"""Rows with equal tokens: which of them belong together, and how many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rlskip as package
from rlskip.compare.sides import Side
from tests.compare.test_compare import N, compared, log_probs, rows


def test_rows_with_equal_tokens_are_told_by_their_sessions(job_of: Callable[..., Side]) -> None:
    def twins(order: list[int]) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {k: v[:1].repeat(3, 1) if v.dim() > 1 else v[:3] for k, v in rows().items()}
            some = {k: v[order] for k, v in batch.items()}
            package.record("advantages", torch.tensor([1.0, 2.0, 3.0])[order], rows=some)

        return body

    assert compared(job_of("a", twins([0, 1, 2])), job_of("b", twins([2, 0, 1]))).is_equal


def test_sessions_may_have_other_numbers_in_the_other_run(job_of: Callable[..., Side]) -> None:
    """As where they are numbered through the batch, and prompts are drawn in another order."""

    def numbered(order: list[int]) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {k: v[order] for k, v in rows().items()} | {"session": torch.arange(N)}
            package.record("advantages", log_probs()[order], rows=batch)

        return body

    order = [*range(2, N), 0, 1]
    assert compared(job_of("a", numbered([*range(N)])), job_of("b", numbered(order))).is_equal


@pytest.mark.parametrize(
    ("a", "b", "epochs", "only"),
    [
        ([1, 1, 0, 0], [1, 0, 0, 0], 1, (1, 1)),
        ([1, 1, 1, 1], [1, 1, 1, 2], 1, (1, 1)),
        ([1, 1, 0], [1, 0], 1, (1, 0)),
        ([1, 1, 0, 2], [1, 0, 2, 1], 1, (0, 0)),
        ([1, 1, 0, 0], [1, 1, 0, 0], 2, (0, 0)),
        ([1, 1, 0, 0], [1, 0, 0, 0], 2, (1, 1)),
    ],
)
def test_how_often_a_response_was_sampled_is_of_the_rollouts(
    job_of: Callable[..., Side], a: list[int], b: list[int], epochs: int, only: tuple[int, int]
) -> None:
    """B trains for `epochs`: that is no difference of its rollouts."""

    def train_on(responses: list[int], epochs: int) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {
                "prompts": torch.full((len(responses), 3), 7),
                "responses": torch.tensor(responses)[:, None],
            }
            rewards = (batch["responses"] == 1).float()
            package.record("advantages", rewards - rewards.mean(), rows=batch)
            for _ in range(epochs):
                package.record("log_probs", torch.zeros(len(responses), 1), rows=batch)

        return body

    found = compared(job_of("a", train_on(a, 1)), job_of("b", train_on(b, epochs)))
    first = found.stages[0]
    note = "{} rows only in A, {} only in B".format(*only) if only[0] != only[1] else ""
    assert (first.stage, first.note, first.off) == ("rollouts", note, max(only))
    assert first.compared == max(len(a), len(b))
    assert (found.first == first) is any(only)
