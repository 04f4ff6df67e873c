"""The roles of a job, made from its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.batch.prompts import first_uid
from rlskip.config.application import application_facts
from rlskip.config.facts import HostFacts
from rlskip.config.skip import SKIP_REGISTRY, VALIDATION_ROLE, RoleConfig
from rlskip.errors import RlskipError
from rlskip.skip.call import Call, Stage
from rlskip.skip.call_role import CallRole
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import BaseSkip, Role
from rlskip.skip.rollout_tq import GroupRole

_SAMPLE_ID = re.compile(r"(?:uid_)?sample_(\d+)_(\d+)", re.ASCII)


class SampleIdError(RlskipError, ValueError):
    """A sample id that names no step."""


def parse_async_rollout_sample_step(sample_id: Any) -> int:
    """Feed-order index of ``sample_{epoch}_{index}`` (also ``uid_sample_{epoch}_{index}``).

    >>> parse_async_rollout_sample_step("sample_0_42")
    42
    """
    match = _SAMPLE_ID.fullmatch(sample_id) if isinstance(sample_id, str) else None
    if match is None:
        raise SampleIdError(
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


class RolloutSkip(CallRole, BaseSkip):
    """A role for calls, to subclass: override what your role does in another way.

    Dumps, identity and ranks are those of :class:`~rlskip.skip.call_role.CallRole`. With
    ``support_online_step`` the subclass has an `extract_step`.

    The methods of verl's ``BaseSkip`` can be called by hand, too. They name a call by its step and
    its arguments: it is the same one as long as these are the very same objects, in the same visit,
    until :meth:`warp_function` has served it or :meth:`prepare_data` has kept its result.

    Parameters
    ----------
    local_config, global_config
        As of :class:`BaseSkip`.
    role, facts, step_of
        Of a role of rlskip's own; else they are the class's and the config's.
    """

    def __init__(
        self,
        local_config: Any,
        global_config: Any,
        *,
        role: str | None = None,
        facts: HostFacts | None = None,
        step_of: Callable[..., int] | None = None,
    ) -> None:
        facts = facts or application_facts(global_config)
        step_of = self.extract_step if self.support_online_step else step_of
        super().__init__(role or self.role, local_config, facts, step_of)
        self.global_config = global_config
        # Looked up, and neither served nor kept so far. A call keeps its arguments alive, so no
        # other object has their ids.
        self._asked: dict[tuple[Any, ...], Call] = {}

    def find(self, call: Call) -> bool:
        with _at_hand(call):
            return BaseSkip.find(self, call)

    def replay(self, call: Call) -> Any:
        with _at_hand(call):
            return BaseSkip.replay(self, call)

    def keep(self, call: Call, result: Any) -> None:
        with _at_hand(call):
            BaseSkip.keep(self, call, result)

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a dump serves this call; asked again, the answer is the same."""
        return self._looked_up(step, func, args, kwargs).found is not None

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What replaces ``func(*args, **kwargs)``.

        Raises
        ------
        DumpError
            No dump serves the call, or it is unusable.
        """
        call = self._looked_up(step, func, args, kwargs)
        result = super().replay(call)
        self._end(call)
        return result

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Keep `result`, which the stage returned for these arguments."""
        call = self._present_call(step) or self._asked.get(_key(step, args, kwargs))
        if call is None:
            call = Call(Stage(_no_function, "", _likely_prompts), args, kwargs, step)
        try:
            super().keep(call, result)
        finally:
            self._end(call)

    def begin_visit(self) -> None:
        super().begin_visit()
        for call in list(self._asked.values()):
            self._end(call)

    def _looked_up(
        self, step: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        if (call := self._present_call(step)) is not None:
            if call.visit is None:
                super().find(call)
            return call
        key = _key(step, args, kwargs)
        if (call := self._asked.get(key)) is not None:
            return call
        call = Call(Stage(func, ""), args, kwargs, step)
        try:
            super().find(call)
        except BaseException:
            call.cleanup.close()
            raise
        self._asked[key] = call
        for old in list(self._asked.values())[:-_MOST]:
            self._end(old)
        return call

    def _present_call(self, step: int) -> Call | None:
        """The call of a decorated function that the methods are about; None: they name it."""
        call = _present.get()
        mine = call is not None and (call.stage.role, call.step) == (self.role, step)
        return call if mine else None

    def _end(self, call: Call) -> None:
        if call is not self._present_call(call.step):  # else the manager ends it
            self._asked.pop(_key(call.step, call.args, call.kwargs), None)
            call.cleanup.close()


# Of calls that have a step of their own, so many are known until they are served or kept.
_MOST = 1000

# The call of a decorated function that a RolloutSkip is asked about.
_present: ContextVar[Call | None] = ContextVar("rlskip_present", default=None)


@contextmanager
def _at_hand(call: Call) -> Iterator[None]:
    token = _present.set(call)
    try:
        yield
    finally:
        _present.reset(token)


def _key(step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return step, *map(id, args), *((name, id(kwargs[name])) for name in sorted(kwargs))


def _no_function(*args: Any, **kwargs: Any) -> None:
    """Replaces the stage where only its arguments are known."""


def _likely_prompts(*args: Any, **kwargs: Any) -> Any:
    """The argument `prompts`, else the first that is a batch, else the first."""
    if "prompts" in kwargs:
        return kwargs["prompts"]
    given = [*args, *kwargs.values()]
    return next((one for one in given if columns_of(one)), given[0] if given else None)


def make_roles(roles: Mapping[str, RoleConfig], facts: HostFacts) -> dict[str, Role]:
    """These `roles`, each from its own config and the facts of the host."""
    queued = "rollout_tq" in roles
    return {role: _make(role, local, facts, queued) for role, local in roles.items()}


def _make(role: str, local: RoleConfig, facts: HostFacts, queued: bool) -> Role:
    if role in SKIP_REGISTRY:
        own: BaseSkip = SKIP_REGISTRY[role](local, facts.config)
        if isinstance(own, RolloutSkip):  # which read those of a plain application
            own.use(Dumps(role, local, facts, own.shard))
        return own
    # With role rollout_tq, validation travels through a queue in a partition of its own.
    if role == "rollout_tq" or (role == VALIDATION_ROLE and queued):
        return GroupRole(role, local, facts)
    step_of = sample_step if role == "async_rollout" else None
    return RolloutSkip(local, facts.config, role=role, facts=facts, step_of=step_of)
