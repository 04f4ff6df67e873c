"""The `merge` node, and the one older flag that means the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rlskip.config.check import Problem, node_of, raise_all, read
from rlskip.config.skip import look_up

# SkyRL's name for `merge.stepwise_output`.
HOST_FLAG = "generator.merge_stepwise_output"


@dataclass
class MergeConfig:
    """How the turns of a trajectory become rows to train on; see :mod:`rlskip.merge`."""

    # Fold the turns of a trajectory into as few rows as their tokens allow. Off: nothing changes.
    stepwise_output: bool = False

    # adjacent: a turn may continue the turn before it. chain: it may continue any earlier turn of
    # the trajectory, so that interleaved sub-agents and branches become few rows as well.
    strategy: str = field(default="adjacent", metadata={"choices": ("adjacent", "chain")})

    # Longest merged row in tokens, prompt and response; null: no limit.
    max_seq_len: int | None = field(default=None, metadata={"min": 1})

    # A merge that would exceed max_seq_len: split (stop at the turn before), error, or warn.
    on_overlong: str = field(default="split", metadata={"choices": ("split", "error", "warn")})


def read_merge(config: Any) -> MergeConfig:
    """The merge settings of a full config; the defaults, which are off, where it has none.

    ``generator.merge_stepwise_output: true``, as SkyRL writes it, turns merging on as
    ``merge.stepwise_output: true`` does. Its false is SkyRL's default and says nothing.

    Parameters
    ----------
    config
        A full DictConfig, or a mapping with the entries `merge` or `generator`.

    Raises
    ------
    ConfigError
        Names *every* problem by its full key.
    """
    node = node_of(config, "merge") or {}
    problems: list[Problem] = []
    settings = read(MergeConfig, node, "merge", problems)
    host = look_up(config, HOST_FLAG)
    if host is not None and not isinstance(host, bool):
        problems.append(Problem(HOST_FLAG, f"expected bool, got {host!r} ({type(host).__name__})"))
    elif host and node.get("stepwise_output") is False:
        problems.append(
            Problem(
                "merge.stepwise_output",
                f"false, but {HOST_FLAG} is true and means the same",
                "set one of them",
            )
        )
    raise_all(problems)
    return dataclasses.replace(settings, stepwise_output=settings.stepwise_output or bool(host))
