"""The `replay` node: which groups to train on, how old they may be, how long to wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlskip.config.nodes import read_node
from rlskip.errors import ConfigError

_positive = {"min": 1}
_on_incomplete = {"choices": ("raise", "drop", "refill", "min_viable")}
_strategy = {"choices": ("none", "drop", "wait")}


@dataclass
class ReplayConfig:
    """Which groups a :class:`rlskip.queue.ReplayBuffer` returns to the trainer."""

    # A finished group that is incomplete (a failed session, or fewer successful sessions than
    # expected): raise an IncompleteRolloutError; drop the group; refill it through the buffer's
    # callback; min_viable: train on it if at least replay.min_viable of its sessions succeeded.
    on_incomplete: str = field(default="raise", metadata=_on_incomplete)

    # With on_incomplete: min_viable, the fewest successful sessions a group may have; a group
    # with fewer raises.
    min_viable: int | None = field(
        default=None, metadata={"min": 1, "needed_by": ("on_incomplete", ["min_viable"])}
    )

    # With on_incomplete: refill, how often one prompt is replaced before its group raises.
    max_refills: int = field(default=3, metadata=_positive)

    # Sessions to expect of a prompt whose root tag has no number of sessions;
    # null: the host's number, else the sessions that are there.
    n: int | None = field(default=None, metadata=_positive)

    # The same in the partition val.
    val_n: int | None = field(default=None, metadata=_positive)

    # A group is stale when it spans more than this many steps: 1 is on-policy, 2 allows the
    # prompts of one step earlier. null: no limit. Applies to sampling by batch size, not to val.
    max_off_policy_threshold: int | None = field(
        default=None,
        metadata={"min": 1, "needed_by": ("max_off_policy_strategy", ["drop", "wait"])},
    )

    # drop: evict stale groups. wait: sample nothing while a prompt in flight has reached the
    # threshold, so that it is trained on before it is stale. none: ignore the age.
    max_off_policy_strategy: str = field(default="none", metadata=_strategy)

    # Seconds one call of sample() waits before it raises and names what is missing: it never
    # waits forever.
    timeout_s: float = field(default=3600.0, metadata={"min": 0.001, "max": 1e9})

    # Seconds between two progress lines of a call that waits.
    progress_interval_s: float = field(default=60.0, metadata={"min": 0.001, "max": 1e9})


def read_replay(config: Any) -> ReplayConfig:
    """The `replay` node of a config, as :func:`~rlskip.config.nodes.read_node` reads it."""
    settings = read_node(ReplayConfig, "replay", config)
    least, n = settings.min_viable or 0, settings.n
    if settings.on_incomplete == "min_viable" and n is not None and least > n:
        what = f"{least} sessions can never succeed, because a prompt gets {n}"
        raise ConfigError(what, "replay.min_viable", f"set at most {n}")
    return settings
