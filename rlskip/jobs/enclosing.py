"""Which calls of decorated functions enclose the present code.

A stage that calls its own role again (its base class's function, say) is one call. A dispatcher
in a stage tells by their names which call of the step submits a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

#: By role, the name of the call among the step's, which is the same in every run; empty where the
#: role tells its calls apart by their prompts (``rollout_tq``).
enclosing: ContextVar[Mapping[str, str]] = ContextVar("rlskip_enclosing")
