"""The `merge` node: how the turns of a trajectory become rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlskip.config.nodes import read_node


@dataclass
class MergeConfig:
    """How the turns of a trajectory become rows to train on; see :mod:`rlskip.merge`."""

    # Fold the turns of a trajectory into as few rows as their tokens allow. false: no change.
    # null: SkyRL's ``generator.merge_stepwise_output``, else false.
    stepwise_output: bool | None = field(default=None, metadata={"null": False})

    # adjacent: a turn may continue the turn before it. chain: it may continue any earlier turn of
    # the trajectory, so that interleaved sub-agents and branches become few rows as well.
    strategy: str = field(default="adjacent", metadata={"choices": ("adjacent", "chain")})

    # Longest merged row in tokens, prompt and response; null: no limit.
    max_seq_len: int | None = field(default=None, metadata={"min": 1})

    # A merge that would exceed max_seq_len: split (stop at the turn before), error, or warn.
    on_overlong: str = field(default="split", metadata={"choices": ("split", "error", "warn")})


def read_merge(config: Any) -> MergeConfig:
    """The `merge` node of a config, as :func:`~rlskip.config.nodes.read_node` reads it."""
    return read_node(MergeConfig, "merge", config)
