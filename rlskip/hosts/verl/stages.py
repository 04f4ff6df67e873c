"""What verl's trainers compute on the driver, recorded for `rlskip compare`.

Seams, each wrapped when verl imports its module:

``RayPPOTrainer.fit``, ``PPOTrainer.fit`` (V1)
    Recording starts, by the trainer's config and its count of steps, and everything is on disk when
    it returns: the actor that trains is killed later.
``ray_trainer.compute_advantage``, ``PPOTrainer._compute_advantage`` (V1)
    The first place that sees all of a batch: scores, rewards, log-probs, values, advantages.
``Tracking.log``
    The step's metrics, among them what the workers returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlskip import stages
from rlskip._wrap import around, wrap_if_there
from rlskip.config.record import RecordConfig, read_record_of
from rlskip.hosts.verl.names import RAY_TRAINER, V1

_KEY = "rlskip.verl_stages"
_TRACKING = "verl.utils.tracking"

#: verl's fields in the order in which a step computes them, by the names that all hosts share.
FIELDS = {
    "rollout_log_probs": "engine_log_probs",
    "old_log_probs": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "values": "values",
    "rm_scores": "scores",
    "token_level_scores": "scores",
    "token_level_rewards": "rewards",
    "advantages": "advantages",
    "returns": "returns",
}
_ROWS = ("prompts", "responses", "response_mask")
# What a repetition need not have in common: times, memory, throughput.
_OF_THE_MACHINE = ("timing", "perf/", "memory", "throughput", "training/")


def attach() -> None:
    """Wrap the seams when verl imports their modules. Imports nothing of verl.

    A seam that a release lacks is left out: what is recorded is not worth a training.
    """
    seams: dict[str, Callable[..., Any]] = {
        f"{RAY_TRAINER}:RayPPOTrainer.fit": _fitting,
        f"{RAY_TRAINER}:compute_advantage": _computing_advantage,
        f"{V1}.trainer_base:PPOTrainer.fit": _fitting,
        f"{V1}.trainer_base:PPOTrainer._compute_advantage": _computing_advantage_v1,
        f"{_TRACKING}:Tracking.log": _logging,
    }
    for name, decorate in seams.items():
        wrap_if_there(name, decorate, key=_KEY, missing=[])


@around
def _fitting(fit: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    settings = read_record_of(self.config) or RecordConfig()
    stages.start(settings, lambda: getattr(self, "global_steps", None))
    try:
        return fit(self, *args, **kwargs)
    finally:
        stages.stop()


@around
def _computing_advantage(compute: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    result = compute(data, *args, **kwargs)
    # The V1 trainer's batch has no tokens here.
    if stages.directory() is not None and "responses" in result.batch.keys():  # noqa: SIM118
        _record(result.batch, result)
    return result


@around
def _computing_advantage_v1(
    compute: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    result = compute(self, batch, *args, **kwargs)
    if stages.directory() is not None:
        import transfer_queue as tq

        wanted = [*_ROWS, *FIELDS]
        data = tq.kv_batch_get(
            keys=result.keys, partition_id=result.partition_id, select_fields=wanted
        )
        _record(data, data)
    return result


def _record(fields: Any, rows: Any) -> None:
    there, found = set(fields.keys()), {}
    for field, name in FIELDS.items():
        if field in there:
            found[name] = fields[field]
    for name, value in found.items():
        stages.record(name, value, rows=rows)


@around
def _logging(log: Callable[..., Any], self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    if stages.directory() is not None:
        stages.record("metrics", stages.comparable(data, _OF_THE_MACHINE))
    return log(self, data, *args, **kwargs)
