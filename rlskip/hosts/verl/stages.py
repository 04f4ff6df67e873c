"""What verl's trainers compute on the driver, recorded for `rlskip compare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlskip import stages
from rlskip.config.nodes import read_record_of
from rlskip.config.other_nodes import RecordConfig
from rlskip.hosts.verl.facts import rows_of
from rlskip.hosts.verl.seams import RAY_TRAINER, V0_TRAINER, V1_TRAINER, seams
from rlskip.skip import SkipManager

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


@seams.around(f"{V0_TRAINER}.fit", f"{V1_TRAINER}.fit")
def _fitting(fit: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Recording starts, by the trainer's config and its count of steps.

    Everything is on disk when `fit` returns: the actor that trains is killed later.
    """
    settings = read_record_of(self.config) or RecordConfig()
    stages.start(settings, lambda: getattr(self, "global_steps", None))
    try:
        return fit(self, *args, **kwargs)
    finally:
        stages.stop()


@seams.around(f"{RAY_TRAINER}:compute_advantage")
def _computing_advantage(compute: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """It is the first place that sees all of a batch: scores, rewards, log-probs, advantages."""
    result = compute(data, *args, **kwargs)
    # The V1 trainer's batch has no tokens here.
    if stages.directory() is not None and "responses" in result.batch.keys():  # noqa: SIM118
        _record(result.batch, result)
    return result


@seams.around(f"{V1_TRAINER}._compute_advantage")
def _computing_advantage_v1(
    compute: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    result = compute(self, batch, *args, **kwargs)
    if stages.directory() is not None:
        data = rows_of(result, [*_ROWS, *FIELDS])
        _record(data, data)
    return result


def _record(fields: Any, rows: Any) -> None:
    found = {name: fields[field] for field, name in FIELDS.items() if field in set(fields.keys())}
    for name, value in found.items():
        stages.record(name, value, rows=rows)


@seams.around("verl.utils.tracking:Tracking.log")
def _logging(log: Callable[..., Any], self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """The step's metrics, among them what the workers returned, and what was replayed."""
    if stages.directory() is not None:
        stages.record("metrics", stages.comparable(data, _OF_THE_MACHINE))
    return log(self, {**data, **SkipManager.logged()}, *args, **kwargs)
