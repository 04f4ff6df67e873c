"""The roles of a job, made from its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlskip.batch.columns import first_uid
from rlskip.config.facts import HostFacts, application_facts
from rlskip.config.skip import SKIP_REGISTRY, VALIDATION_ROLE, RoleConfig
from rlskip.errors import ConfigError
from rlskip.skip.call_role import CallRole
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import BaseSkip, Role

_SAMPLE_ID = re.compile(r"(?:uid_)?sample_(\d+)_(\d+)", re.ASCII)


def parse_async_rollout_sample_step(sample_id: Any) -> int:
    """Feed-order index of ``sample_{epoch}_{index}`` (also ``uid_sample_{epoch}_{index}``).

    >>> parse_async_rollout_sample_step("sample_0_42")
    42
    """
    match = _SAMPLE_ID.fullmatch(sample_id) if isinstance(sample_id, str) else None
    if match is None:
        what = "expected sample_{epoch}_{index}, as the argument sample_id or as the prompts' uid"
        raise ConfigError(f"{sample_id!r} is not a sample id", "skip.async_rollout", what)
    return int(match[2])


class SampleRole(CallRole):
    """The role for calls that generate one sample each, which tells its own step."""

    support_online_step = True

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The feed-order index of a call's ``sample_id``, or else of its prompts' uid."""
        sample_id = kwargs.get("sample_id")
        if sample_id is None:
            sample_id = next((arg for arg in args if isinstance(arg, str)), None)
        if sample_id is None:
            sample_id = first_uid([*args, *kwargs.values()])
        return parse_async_rollout_sample_step(sample_id)


class RolloutSkip(CallRole, BaseSkip):
    """A role for calls, to subclass: override what your role does in another way.

    With ``support_online_step`` the subclass has an `extract_step`. Its methods of ``BaseSkip`` are
    called for each call of a decorated function, and may be called by hand, too.
    """

    def __init__(self, local_config: Any, global_config: Any) -> None:
        super().__init__(self.role, local_config, application_facts(global_config))
        self.global_config = global_config

    # Of a decorated function, too, the methods are asked that a subclass may override.
    find, replay, keep = BaseSkip.find, BaseSkip.replay, BaseSkip.keep


def make_roles(roles: Mapping[str, RoleConfig], facts: HostFacts) -> dict[str, Role]:
    """These `roles`, each from its own config and the facts of the host."""
    made: dict[str, Role] = {}
    for role, local in roles.items():
        if role in SKIP_REGISTRY:
            own = made[role] = SKIP_REGISTRY[role](local, facts.config)
            if isinstance(own, RolloutSkip):  # which read those of a plain application
                own.dumps = Dumps(role, local, facts, own.shard)
        # With role rollout_tq, validation travels through a queue in a partition of its own.
        elif role == "rollout_tq" or (role == VALIDATION_ROLE and "rollout_tq" in roles):
            from rlskip.skip.rollout_tq import GroupRole  # needs torch

            made[role] = GroupRole(role, local, facts)
        else:
            kind = SampleRole if role == "async_rollout" else CallRole
            made[role] = kind(role, local, facts)
    return made
