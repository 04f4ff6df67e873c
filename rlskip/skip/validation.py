"""Role `rollout_val`: validation, which ``skip.validation: replay`` caches.

What one call returns is one dump, as in role `rollout`. Beside role `rollout_tq` the groups of a
queue are: validation has its own partition there.
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
