"""Which sessions a report shows: the best, the worst and some at random, each once."""

from __future__ import annotations

from rlskip.report.sample import Sampled, Sampler
from rlskip.runs.counts import Counts
from rlskip.runs.trajectories import rollout_columns


def sample(rows: int, *dumps: list[float | None]) -> dict[str, list[Sampled]]:
    sampler = Sampler(rows, None)
    for number, rewards in enumerate(dumps):
        given = [
            {"prompt_ids": [1], "completion_ids": [5 + i], **({} if r is None else {"reward": r})}
            for i, r in enumerate(rewards)
        ]
        columns = rollout_columns(given)
        sampler.offer(str(number), columns, Counts.of(columns))
    return sampler.result()


def rewards(some: list[Sampled]) -> list[float | None]:
    return [one.reward for one in some]


def test_the_best_and_the_worst_of_all_dumps_and_some_others() -> None:
    found = sample(6, [0.1 * i for i in range(10)], [5.0, -5.0, 0.5], [0.5] * 10)
    assert rewards(found["best"]) == [5.0, 0.9]
    assert rewards(found["worst"]) == [-5.0, 0.0]
    assert len(found["random"]) == 2
    every = [one for some in found.values() for one in some]
    assert len({(one.dump, one.row.index) for one in every}) == 6
    again = sample(6, [0.1 * i for i in range(10)], [5.0, -5.0, 0.5], [0.5] * 10)
    assert [(o.dump, o.row) for o in again["random"]] == [(o.dump, o.row) for o in found["random"]]


def test_of_equal_rewards_some_are_drawn_from_all_dumps() -> None:
    found = sample(30, *[[1.0] * 20 + [0.0] * 20 for _ in range(8)])
    assert rewards(found["best"]) == [1.0] * 10
    assert rewards(found["worst"]) == [0.0] * 10
    assert len({one.dump for one in found["best"]}) > 3
    assert len({one.dump for one in found["random"]}) > 3


def test_without_different_rewards_all_are_drawn() -> None:
    for given in (None, 1.0):
        found = sample(6, [given] * 20)
        assert (found["best"], found["worst"], len(found["random"])) == ([], [], 6)


def test_of_few_sessions_each_is_shown_once() -> None:
    for n in range(1, 8):
        found = sample(50, [float(i) for i in range(n)])
        every = [one.row.index for some in found.values() for one in some]
        assert sorted(every) == list(range(n))
    assert sample(0, [1.0, 2.0]) == {"best": [], "worst": [], "random": []}


def test_few_sessions_are_shared_out_in_thirds() -> None:
    found = sample(50, [float(i) for i in range(7)])
    assert (rewards(found["best"]), rewards(found["worst"])) == ([6.0, 5.0], [0.0, 1.0])
    assert sorted(one.reward or 0.0 for one in found["random"]) == [2.0, 3.0, 4.0]


def test_the_best_of_two_rewards_is_not_the_worst_as_well() -> None:
    found = sample(9, [1.0, 2.0, *[None] * 7])
    assert (rewards(found["best"]), found["worst"]) == ([2.0, 1.0], [])
    assert rewards(found["random"]) == [None] * 7


def test_a_session_is_shown_by_its_last_turn() -> None:
    turns = [
        {"prompt": 0, "session": s, "turn": t, "prompt_ids": [1], "completion_ids": [10 * s + t]}
        for s in range(2)
        for t in range(3)
    ]
    columns = rollout_columns(turns)
    sampler = Sampler(2, None)
    sampler.offer("1", columns, Counts.of(columns))
    assert [one.row.response for one in sampler.result()["random"]] == [[2], [12]]
