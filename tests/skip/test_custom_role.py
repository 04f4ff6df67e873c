"""Roles that are registered by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlskip import BaseSkip, RoleConfig, SkipAction, SkipManager, register_skip
from rlskip.errors import ConfigError
from rlskip.skip import SKIP_REGISTRY
from rlskip.store import CorruptDumpError


@dataclass
class DoublingConfig(RoleConfig):
    factor: int = 2


@pytest.fixture
def doubling() -> Any:
    @register_skip("doubling", config=DoublingConfig)
    class DoublingSkip(BaseSkip):
        support_actions = (SkipAction.CACHE,)

        def __init__(self, local_config: DoublingConfig, global_config: Any) -> None:
            super().__init__(local_config, global_config)
            self.kept: dict[int, Any] = {}

        def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
            return step in self.kept

        def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kept[step] == "bad":
                raise CorruptDumpError("bad")
            return self.kept[step] * self.local_config.factor

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            self.kept[step] = result

    yield DoublingSkip
    del SKIP_REGISTRY["doubling"]


def test_a_role_of_ones_own(doubling: Any, init: Callable[..., Path]) -> None:
    init("doubling", own={"factor": 5})

    @SkipManager.annotate(role="doubling")
    def stage(x: int) -> int:
        return x

    SkipManager.set_step(1)
    assert [stage(3), stage(3)] == [3, 15]
    SkipManager.skip_instances["doubling"].kept[1] = "bad"
    assert stage(4) == 4, "found unusable while loading: a miss"
    assert stage(4) == 20
    with pytest.raises(ConfigError, match=r"did you mean skip\.doubling\.factor"):
        init("doubling", own={"factr": 5})
    with pytest.raises(ConfigError, match="does not support 'repeat'"):
        init("doubling", action="repeat")


def test_a_role_of_ones_own_can_say_that_it_is_off(
    doubling: Any, init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubling, "is_enabled", lambda self: self.local_config.factor > 0)
    for factor in (5, 0):
        init("doubling", own={"factor": factor})
        assert ("doubling" in SkipManager.skip_instances) == (factor > 0)


def test_registering_badly(doubling: Any) -> None:
    class Other(BaseSkip): ...

    for taken in ("rollout", "doubling"):
        with pytest.raises(ConfigError) as caught:
            register_skip(taken)(Other)
        assert caught.value.where == f"register_skip({taken!r})"
    with pytest.raises(ConfigError, match="not an identifier"):
        register_skip("my role")
    with pytest.raises(ConfigError, match=r"derive it from rlskip\.RoleConfig"):
        register_skip("other", config=dict)  # type: ignore[arg-type]
