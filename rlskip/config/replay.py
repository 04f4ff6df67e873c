"""The `replay` node: which groups may be trained on, how old, and how long to wait for them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from rlskip.config.check import Problem, node_of, raise_all, read
from rlskip.config.skip import look_up


@dataclass
class ReplayConfig:
    """What a :class:`rlskip.replay.ReplayBuffer` may hand to the trainer."""

    # A group that is over and not whole (a failed session, or fewer successful sessions than
    # expected): raise an IncompleteRolloutError; drop the group; refill it through the buffer's
    # callback; min_viable: train on it when at least replay.min_viable of its sessions succeeded.
    on_incomplete: str = field(
        default="raise", metadata={"choices": ("raise", "drop", "refill", "min_viable")}
    )

    # Fewest successful sessions a group may have with on_incomplete: min_viable; one with fewer
    # raises.
    min_viable: int | None = field(default=None, metadata={"min": 1})

    # How often on_incomplete: refill replaces one prompt before it raises after all.
    max_refills: int = field(default=3, metadata={"min": 1})

    # Sessions to expect of a prompt whose root tag does not say;
    # null: actor_rollout_ref.rollout.n, else what is there counts as all.
    n: int | None = field(default=None, metadata={"min": 1})

    # The same in the partition val; null: actor_rollout_ref.rollout.val_kwargs.n.
    val_n: int | None = field(default=None, metadata={"min": 1})

    # A group is stale when it spans more than this many steps: 1 is on-policy, 2 allows the
    # prompts of one step earlier. null: no limit. It concerns sampling by batch size, not val.
    max_off_policy_threshold: int | None = field(default=None, metadata={"min": 1})

    # drop: evict stale groups. wait: sample nothing while a prompt in flight has reached the
    # threshold, so that it is trained on before it is stale. none: the age does not matter.
    max_off_policy_strategy: str = field(
        default="none", metadata={"choices": ("none", "drop", "wait")}
    )

    # Seconds one call of sample() waits before it raises and names what is missing.
    timeout_s: float = 3600.0

    # Seconds between two progress lines of a call that waits.
    progress_interval_s: float = 60.0


def read_replay(config: Any) -> ReplayConfig:
    """The replay settings of a full config; the defaults where it has none.

    Parameters
    ----------
    config
        A full DictConfig, a mapping with an entry `replay`, or a :class:`ReplayConfig`.

    Raises
    ------
    ConfigError
        Names *every* problem by its full key.
    """
    if isinstance(config, ReplayConfig):
        node = dataclasses.asdict(config)
    else:
        node = node_of(config, "replay") or {}
    problems: list[Problem] = []
    settings = read(ReplayConfig, node, "replay", problems)
    if settings.n is None:
        settings.n = _sessions(config, "actor_rollout_ref.rollout.n", problems)
    if settings.val_n is None:
        settings.val_n = _sessions(config, "actor_rollout_ref.rollout.val_kwargs.n", problems)
    problems += _contradictions(settings)
    raise_all(problems)
    return settings


def _sessions(config: Any, key: str, problems: list[Problem]) -> int | None:
    """What the host's config says at `key`: a number of sessions, or nothing."""
    found = look_up(config, key)
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found > 0):
        return found
    problems.append(Problem(key, f"expected a number of sessions, got {found!r}"))
    return None


def _contradictions(settings: ReplayConfig) -> list[Problem]:
    problems = []
    if settings.on_incomplete == "min_viable":
        k = settings.min_viable
        if k is None:
            problems.append(
                Problem(
                    "replay.min_viable",
                    "on_incomplete: min_viable needs it",
                    "set the fewest successful sessions a group may have, e.g. 6",
                )
            )
        elif settings.n is not None and k > settings.n:
            what = f"{k} sessions can never succeed where a prompt gets {settings.n}"
            problems.append(Problem("replay.min_viable", what))
    if settings.max_off_policy_strategy != "none" and settings.max_off_policy_threshold is None:
        problems.append(
            Problem(
                "replay.max_off_policy_threshold",
                f"max_off_policy_strategy: {settings.max_off_policy_strategy} needs it",
                "set a number of steps, or max_off_policy_strategy: none",
            )
        )
    for name in ("timeout_s", "progress_interval_s"):
        seconds = getattr(settings, name)
        if not (seconds > 0 and math.isfinite(seconds)):
            what = f"expected a finite number of seconds above 0, got {seconds!r}"
            problems.append(Problem(f"replay.{name}", what, "no call of sample() waits forever"))
    return problems
