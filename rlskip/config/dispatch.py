"""The `dispatch` node: its dataclass and its reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlskip.config.nodes import read_node

_not_negative = {"min": 0}


@dataclass
class DispatchConfig:
    """How a batch of prompts becomes sessions on workers."""

    # true: sessions are dispatched one by one, as dispatch.policy says. false: the sessions of a
    # prompt stay on one worker. null: the host's value, else false.
    rollout_level: bool | None = field(default=None, metadata={"null": False})

    # Sessions that run at once on one worker; null: the host's number, else any, on a
    # blocking worker 16.
    max_concurrent_rollouts_per_worker: int | None = field(default=None, metadata={"min": 1})

    # Which session goes to which worker, and when: chunk, round_robin, least_loaded,
    # longest_first, or a custom function as package.module:function. Always chunk without
    # rollout_level.
    policy: str = "least_loaded"

    # Where workers run: local (in this process) or ray (actors). This key and the next apply to
    # ``RolloutDispatcher.from_config``, which makes the pool.
    pool: str = field(default="local", metadata={"choices": ("local", "ray")})

    # Number of workers; null: the host's number, else 4.
    workers: int | None = field(default=None, metadata={"min": 1, "null": 4})

    # Sessions per prompt that has no `__rollout_n__`; null: the host's number, else 1.
    n: int | None = field(default=None, metadata={"min": 1, "null": 1})

    # The same in validation; null: the host's number, else 1.
    val_n: int | None = field(default=None, metadata={"min": 1, "null": 1})

    # Sampling parameters, passed to the worker unchanged; null: the host's.
    sampling: dict[str, Any] | None = None

    # The same in validation; null: the host's.
    val_sampling: dict[str, Any] | None = None

    # Each session's seed derives from this seed, the step, the prompt and the session.
    # null: the host's seed, else 0.
    seed: int | None = field(default=None, metadata={"min": 0, "null": 0})

    # Rows of a batch that lack a field which others have. false: an error that names field,
    # prompt and session. true: None, unless the field is a tensor, which is always an error.
    fill_missing: bool = False

    # Seconds that one attempt at a session may take; null: no limit, also none for an async worker
    # that blocks its event loop.
    session_timeout_s: float | None = field(default=3600.0, metadata={"min": 0.001, "max": 1e9})

    # Further attempts after an infrastructure failure: a lost worker, a deadline, an OSError.
    max_retries: int = field(default=2, metadata=_not_negative)

    # Further attempts after a data failure: any other error that the worker raised.
    max_data_retries: int = field(default=1, metadata=_not_negative)

    # Journal finished sessions next to the step's dump, so that a killed step resumes; under
    # verl's V1 trainer with rollout_level only.
    journal: bool = False


def read_dispatch(config: Any) -> DispatchConfig:
    """The `dispatch` node of a config, as :func:`~rlskip.config.nodes.read_node` reads it."""
    return read_node(DispatchConfig, "dispatch", config)
