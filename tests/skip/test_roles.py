"""A role used by hand, outside a decorated function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError
from tests.skip.trainers import leases


def plain(prompts: dict[str, Any], scale: int = 1) -> dict[str, Any]:
    return {"made": prompts["ids"]}


class Trainer:
    def method(self, prompts: dict[str, Any]) -> dict[str, Any]:
        return {"made": prompts["ids"]}

    @SkipManager.annotate(role="rollout")
    def stage(self, prompts: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError


PROMPTS = {"ids": [1, 2]}
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "positional": (plain, (PROMPTS,), {}),
    "keyword": (plain, (), {"prompts": PROMPTS}),
    "more arguments": (plain, (PROMPTS, 3), {}),
    "method": (Trainer.method, (Trainer(), PROMPTS), {}),
    "method by keyword": (Trainer.method, (Trainer(),), {"prompts": PROMPTS}),
    "bound method": (Trainer().method, (PROMPTS,), {}),
}


@pytest.mark.parametrize("role", ["rollout", "async_rollout"])
@pytest.mark.parametrize("how", CALLS)
def test_prepared_by_hand_it_is_replayed_by_hand(
    init: Callable[..., Path], how: str, role: str
) -> None:
    func, args, kwargs = CALLS[how]
    for fresh in (True, False):
        init(role, wait_s=0)
        skip: Any = SkipManager.skip_instances[role]
        if not fresh:
            assert skip.meet_precondition(3, func, *args, **kwargs)
            assert skip.warp_function(3, func, *args, **kwargs) == {"made": [1, 2]}
            skip.begin_visit()
            with pytest.raises(MismatchError, match="prompts"):
                skip.meet_precondition(3, plain, {"ids": [7]})
        skip.prepare_data(3, {"made": [1, 2]}, *args, **kwargs)


def test_what_was_prepared_by_hand_serves_a_decorated_function(init: Callable[..., Path]) -> None:
    init()
    skip: Any = SkipManager.skip_instances["rollout"]
    assert not skip.meet_precondition(3, plain, PROMPTS)
    skip.prepare_data(3, {"made": "by hand"}, PROMPTS)
    init()
    SkipManager.set_step(3)
    assert Trainer().stage(PROMPTS) == {"made": "by hand"}
    SkipManager.skip_instances["rollout"].begin_visit()
    with pytest.raises(MismatchError):
        Trainer().stage({"ids": [3]})


def by_hand(role: str = "rollout") -> Any:
    return SkipManager.skip_instances[role]


def test_by_hand_nothing_is_held_between_the_methods(init: Callable[..., Path]) -> None:
    dumps = init()
    for _ in range(2):
        assert not by_hand().meet_precondition(3, plain, PROMPTS)
        assert not leases(dumps)
    by_hand().prepare_data(3, {"made": 3}, PROMPTS)
    assert by_hand().meet_precondition(3, plain, PROMPTS), "what this process wrote, too"


def test_by_hand_the_first_of_equal_calls_is_meant(init: Callable[..., Path]) -> None:
    init(wait_s=0)
    for value in (3, 4):
        by_hand().prepare_data(3, {"made": value}, PROMPTS)
    init(wait_s=0, match="run")
    for step in (3, 4, 3):
        assert by_hand().meet_precondition(step, plain, PROMPTS)
        assert by_hand().warp_function(step, plain, PROMPTS) == {"made": 3}
