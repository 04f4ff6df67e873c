"""What tests of your own can use.

:func:`assert_same_training` compares a training with a golden one, stage by stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use

if TYPE_CHECKING:
    from rlskip.testing.training import assert_same_training

__all__ = ["assert_same_training"]

__getattr__ = load_on_use(__name__, {"rlskip.testing.training": ["assert_same_training"]})
