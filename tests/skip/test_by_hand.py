"""A role used by hand, outside a decorated function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError


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


def test_by_hand_each_step_has_its_own_dumps(init: Callable[..., Path]) -> None:
    init()
    skip: Any = SkipManager.skip_instances["rollout"]
    skip.prepare_data(3, {"made": 3}, PROMPTS)
    init(wait_s=0)
    skip = SkipManager.skip_instances["rollout"]
    assert not skip.meet_precondition(4, plain, PROMPTS)
    assert skip.meet_precondition(3, plain, PROMPTS)
