"""The nodes beside `skip`: their dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlskip.config.dump_dir import parse_directory
from rlskip.config.steps import FORMS, Steps
from rlskip.errors import ConfigError

_positive = {"min": 1}
_seconds = {"min": 0.001, "max": 1e9}
_or_one = {"min": 1, "null": 1}
_incomplete = {"choices": ("raise", "drop", "refill", "min_viable")}
_stale = {"choices": ("none", "drop", "wait")}


@dataclass
class DispatchConfig:
    """How a batch of prompts becomes sessions on workers."""

    # true: sessions are dispatched one by one, as dispatch.policy says. false: the sessions of a
    # prompt stay on one worker. null: the host's value, else false.
    rollout_level: bool | None = field(default=None, metadata={"null": False})

    # Sessions that run at once on one worker; null: the host's number, else any (16 if it blocks).
    max_concurrent_rollouts_per_worker: int | None = field(default=None, metadata=_positive)

    # Which session goes to which worker, and when: chunk, round_robin, least_loaded, longest_first,
    # or a custom function as package.module:function. Always chunk without rollout_level.
    policy: str = "least_loaded"

    # Where ``RolloutDispatcher.from_config`` makes workers: local (in this process), or ray.
    pool: str = field(default="local", metadata={"choices": ("local", "ray")})

    # Number of workers; null: the host's number, else 4.
    workers: int | None = field(default=None, metadata={"min": 1, "null": 4})

    # Sessions per prompt that has no `__rollout_n__`; null: the host's number, else 1.
    n: int | None = field(default=None, metadata=_or_one)

    # The same in validation; null: the host's number, else 1.
    val_n: int | None = field(default=None, metadata=_or_one)

    # Sampling parameters, passed to the worker unchanged; null: the host's.
    sampling: dict[str, Any] | None = None

    # The same in validation; null: the host's.
    val_sampling: dict[str, Any] | None = None

    # Each session's seed derives from it, step, prompt and session; null: the host's, else 0.
    seed: int | None = field(default=None, metadata={"min": 0, "null": 0})

    # Rows of a batch that lack a field which others have. false: an error that names field,
    # prompt and session. true: None, unless the field is a tensor, which is always an error.
    fill_missing: bool = False

    # Seconds that an attempt at a session may take (an async worker must not block); null: any.
    session_timeout_s: float | None = field(default=3600.0, metadata=_seconds)

    # Further attempts after an infrastructure failure: a lost worker, a deadline, an OSError.
    max_retries: int = field(default=2, metadata={"min": 0})

    # Further attempts after a data failure: any other error that the worker raised.
    max_data_retries: int = field(default=1, metadata={"min": 0})

    # Journal finished sessions next to the step's dump, so that a killed step resumes; under
    # verl's V1 trainer with rollout_level only.
    journal: bool = False


@dataclass
class ReplayConfig:
    """Which groups a :class:`rlskip.queue.ReplayBuffer` returns to the trainer."""

    # A finished group of which too few sessions succeeded: raise an error that names it, drop it,
    # refill it by the buffer's callback, or min_viable: train on it if that many succeeded.
    on_incomplete: str = field(default="raise", metadata=_incomplete)

    # With on_incomplete: min_viable, the fewest sessions that must succeed; fewer raises.
    min_viable: int | None = field(
        default=None, metadata={**_positive, "needed_by": ("on_incomplete", ["min_viable"])}
    )

    # Refills of incomplete, stale and rejected groups that one call may ask for, for each prompt
    # that it samples, before it raises.
    max_refills: int = field(default=3, metadata=_positive)

    # Sessions of a prompt whose root tag has no number; null: the host's, else those there are.
    n: int | None = field(default=None, metadata=_positive)

    # The same in the partition val.
    val_n: int | None = field(default=None, metadata=_positive)

    # A group is stale when it spans more than this many steps: 1 is on-policy, 2 allows the
    # prompts of one step earlier. null: no limit. Applies to sampling by batch size, not to val.
    max_off_policy_threshold: int | None = field(
        default=None,
        metadata={**_positive, "needed_by": ("max_off_policy_strategy", ["drop", "wait"])},
    )

    # drop: evict stale groups. wait: sample nothing while a prompt in flight has reached the
    # threshold, so that it is trained on before it is stale. none: ignore the age.
    max_off_policy_strategy: str = field(default="none", metadata=_stale)

    # Seconds that one call of sample() waits before it raises and names what is missing.
    timeout_s: float = field(default=3600.0, metadata=_seconds)

    # Seconds between two progress lines of a call that waits.
    progress_interval_s: float = field(default=60.0, metadata=_seconds)


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
    max_seq_len: int | None = field(default=None, metadata=_positive)

    # A merge that would exceed max_seq_len: split (stop at the turn before), error, or warn.
    on_overlong: str = field(default="split", metadata={"choices": ("split", "error", "warn")})


def _parse_stages(value: Any, key: str) -> list[str]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(n, str) and n for n in names):
        return ["*"] if names == ["all"] else names
    what = f"expected names or patterns, got {value!r}"
    raise ConfigError(what, key, "write [advantages, actor/*], or all")


@dataclass
class RecordConfig:
    """What :func:`rlskip.record` keeps."""

    # Whether anything is recorded.
    enable: bool = False

    # Names of stages, or patterns such as ``actor/*``; a list, a string with commas, or all.
    stages: Any = field(default="all", metadata={"parse": _parse_stages})

    # Steps that are recorded: a list of ints, a string such as "1-128,200,300-400:10", or all.
    steps: Any = field(default="all", metadata={"parse": Steps.parse, "like": FORMS})

    # all: whole values, to name differences by token. digest: a row's checksum and moments.
    values: str = field(default="all", metadata={"choices": ("all", "digest")})

    # How many steps of a job to keep, the last written; null: all.
    keep_last: int | None = field(default=None, metadata=_positive)

    # Directory of the records, as skip.dump_dir; null: the same.
    dump_dir: str | None = field(default=None, metadata={"parse": parse_directory})
