"""The roles of a job, made from its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.batch.prompts import first_uid
from rlskip.config.facts import HostFacts, application_facts
from rlskip.config.skip import SKIP_REGISTRY, VALIDATION_ROLE, RoleConfig
from rlskip.errors import ConfigError
from rlskip.skip.call import Call
from rlskip.skip.call_role import CallRole
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import BaseSkip, Role, present
from rlskip.skip.stage import Stage
from rlskip.skip.step_calls import StepCalls

_SAMPLE_ID = re.compile(r"(?:uid_)?sample_(\d+)_(\d+)", re.ASCII)


def parse_async_rollout_sample_step(sample_id: Any) -> int:
    """Feed-order index of ``sample_{epoch}_{index}`` (also ``uid_sample_{epoch}_{index}``).

    >>> parse_async_rollout_sample_step("sample_0_42")
    42
    """
    match = _SAMPLE_ID.fullmatch(sample_id) if isinstance(sample_id, str) else None
    if match is None:
        raise ConfigError(
            f"{sample_id!r} is not a sample id",
            "skip.async_rollout",
            "expected sample_{epoch}_{index}, as the argument sample_id or as the prompts' uid",
        )
    return int(match[2])


def sample_step(*args: Any, **kwargs: Any) -> int:
    """The feed-order index of a call's ``sample_id``, or else of its prompts' uid."""
    sample_id = kwargs.get("sample_id")
    if sample_id is None:
        sample_id = next((arg for arg in args if isinstance(arg, str)), None)
    if sample_id is None:
        sample_id = first_uid([*args, *kwargs.values()])
    return parse_async_rollout_sample_step(sample_id)


class RoleByHand(CallRole):
    """A role for calls with the methods of verl's ``BaseSkip``, which may be called by hand.

    They keep nothing between them: each names a call by its step and its arguments, and of equal
    calls of a step it means the first.
    """

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        with self._call(step, func, args, kwargs) as call:
            return call.found is not None if call.name else CallRole.find(self, call)

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        with self._call(step, func, args, kwargs) as call:
            if not call.name:
                CallRole.find(self, call)
            return CallRole.replay(self, call)

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        with self._call(step, lambda *_, **__: None, args, kwargs) as call:  # the stage is over
            CallRole.keep(self, call, result)

    @contextmanager
    def _call(
        self, step: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Call]:
        """The present call of a decorated function, or the one that the arguments name."""
        call = present.get()
        if call is not None and (call.stage.role, call.step) == (self.role, step):
            yield call
            return
        call = Call(Stage(func, "", _likely_prompts), args, kwargs, step)
        call.visit, call.by_hand = StepCalls(self.dumps.store, step), True
        with call.cleanup:
            yield call


class RolloutSkip(RoleByHand, BaseSkip):
    """A role for calls, to subclass: override what your role does in another way.

    Dumps, identity and ranks are those of :class:`~rlskip.skip.call_role.CallRole`. With
    ``support_online_step`` the subclass has an `extract_step`. Its methods of ``BaseSkip`` are
    called for each call of a decorated function, and may be called by hand, too.
    """

    def __init__(self, local_config: Any, global_config: Any) -> None:
        step_of = self.extract_step if self.support_online_step else None
        super().__init__(self.role, local_config, application_facts(global_config), step_of)
        self.global_config = global_config

    # Of a decorated function, too, the methods are asked that a subclass may override.
    find, replay, keep = BaseSkip.find, BaseSkip.replay, BaseSkip.keep


def _likely_prompts(*args: Any, **kwargs: Any) -> Any:
    """The argument `prompts`, else the first that is a batch, else the first."""
    if "prompts" in kwargs:
        return kwargs["prompts"]
    given = [*args, *kwargs.values()]
    return next((one for one in given if columns_of(one)), given[0] if given else None)


def make_roles(roles: Mapping[str, RoleConfig], facts: HostFacts) -> dict[str, Role]:
    """These `roles`, each from its own config and the facts of the host."""
    made: dict[str, Role] = {}
    for role, local in roles.items():
        if role in SKIP_REGISTRY:
            own = made[role] = SKIP_REGISTRY[role](local, facts.config)
            if isinstance(own, RolloutSkip):  # which read those of a plain application
                own.use(Dumps(role, local, facts, own.shard))
        # With role rollout_tq, validation travels through a queue in a partition of its own.
        elif role == "rollout_tq" or (role == VALIDATION_ROLE and "rollout_tq" in roles):
            from rlskip.skip.rollout_tq import GroupRole  # needs torch

            made[role] = GroupRole(role, local, facts)
        else:
            step_of = sample_step if role == "async_rollout" else None
            made[role] = RoleByHand(role, local, facts, step_of)
    return made
