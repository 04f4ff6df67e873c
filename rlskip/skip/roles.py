"""The roles of a job, made from its config."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlskip.batch.prompts import first_uid
from rlskip.config.application import application_facts
from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE, RoleConfig
from rlskip.errors import RlskipError
from rlskip.skip.base_skip import SKIP_REGISTRY, BaseSkip
from rlskip.skip.call import Call
from rlskip.skip.call_role import CallRole, call_role
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import Role
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


class RolloutSkip(BaseSkip):
    """A role for calls, to subclass: override what your role does in another way.

    Dumps, identity and ranks are those of :class:`~rlskip.skip.call_role.CallRole`. With
    ``support_online_step`` the subclass has an `extract_step`.
    """

    #: What the host says of the run; None: what its config says.
    facts: HostFacts | None = None

    @functools.cached_property
    def calls(self) -> CallRole:
        facts = self.facts or application_facts(self.global_config)
        step_of = self.extract_step if self.support_online_step else None
        return call_role(self.role, self.local_config, facts, step_of)

    @property
    def dumps(self) -> Dumps:  # type: ignore[override]
        return self.calls.dumps

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        return self.calls.meet_precondition(step, func, *args, **kwargs)

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        return self.calls.warp_function(step, func, *args, **kwargs)

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        self.calls.prepare_data(step, result, *args, **kwargs)

    def find(self, call: Call) -> bool:
        with self.calls.at_hand(call):
            return super().find(call)

    def replay(self, call: Call) -> Any:
        with self.calls.at_hand(call):
            return super().replay(call)

    def keep(self, call: Call, result: Any) -> None:
        with self.calls.at_hand(call):
            super().keep(call, result)

    def begin_visit(self) -> None:
        self.calls.begin_visit()

    def flush(self) -> None:
        self.calls.flush()


def make_roles(roles: Mapping[str, RoleConfig], facts: HostFacts) -> dict[str, Role]:
    """These `roles`, each from its own config and the facts of the host."""
    queued = "rollout_tq" in roles
    return {role: _make(role, local, facts, queued) for role, local in roles.items()}


def _make(role: str, local: RoleConfig, facts: HostFacts, queued: bool) -> Role:
    if role in SKIP_REGISTRY:
        own = SKIP_REGISTRY[role](local, facts.config)
        if isinstance(own, RolloutSkip):
            own.facts = facts
        return own
    # With role rollout_tq, validation travels through a queue in a partition of its own.
    if role == "rollout_tq" or (role == VALIDATION_ROLE and queued):
        return GroupRole(role, local, facts)
    return call_role(role, local, facts, sample_step if role == "async_rollout" else None)
