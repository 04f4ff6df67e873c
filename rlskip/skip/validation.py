"""Role `rollout_val`: validation, which ``skip.validation: replay`` caches.

As in role `rollout`, one dump holds what one call returned. With role `rollout_tq`, validation
travels through a queue in a partition of its own, and one dump holds the groups of a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from rlskip.config.skip import VALIDATION_ROLE, RolloutValSkipConfig
from rlskip.skip.role import BaseSkip, register_skip
from rlskip.skip.rollout import RolloutSkip
from rlskip.skip.rollout_tq import RolloutTqSkip


class QueuedValSkip(RolloutTqSkip):
    """Validation whose groups travel through a queue."""

    role: ClassVar[str] = VALIDATION_ROLE
    serves_validation: ClassVar[bool] = True


@register_skip(VALIDATION_ROLE, config=RolloutValSkipConfig)
class RolloutValSkip(RolloutSkip):
    """Validation that calls return."""

    serves_validation: ClassVar[bool] = True

    @classmethod
    def beside(cls, roles: Collection[str]) -> type[BaseSkip]:
        return QueuedValSkip if "rollout_tq" in roles else cls
