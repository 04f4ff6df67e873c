"""What a job recorded, as curves over its steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlskip.batch.rows import by_token
from rlskip.compare.records import Record, StepRecords
from rlskip.compare.sides import Side
from rlskip.compare.steps import pair_rows
from rlskip.format.dump_errors import DumpError
from rlskip.stages.parts import DIGEST, MOMENTS, NUMBER, ROWS

_STEPS, _OF_ROWS = 400, 64  # steps that are read; and those of which values of rows are read
_FIRST = ("loss", "grad_norm", "entropy", "kl", "log_prob")
_MOST = 24

ENGINE = "engine_log_probs"
#: What a trainer's log-probs before its first update are called, the likeliest first.
TRAINER = ("old_log_probs", "log_probs")


def curves(
    records: Side, wanted: Sequence[int] | None
) -> tuple[dict[str, list[Any]], dict[int, float | None], list[tuple[str, str]]]:
    """The numbers that a job recorded, a value a step: of rows and of several records the mean.

    Of the `wanted` steps (None: of all) it returns columns: ``step``, and one for each stage that
    is not zero everywhere, losses first; by step how far the trainer's log-probs are from the
    engine's; and what cannot be read.
    """
    recorded = records.steps()
    steps = spread(recorded if wanted is None else sorted({*recorded} & {*wanted}), _STEPS)
    heavy = {*spread(steps, _OF_ROWS)}
    gaps, problems = dict[int, float | None](), list[tuple[str, str]]()
    values: dict[str, dict[int, float]] = {}
    for step in steps:
        try:
            found = records.records(step)
            gaps[step] = mean_gap(found) if step in heavy else None
            for name, stage in found.stages.items():
                means = [_mean_of(one) for one in stage if step in heavy or one.form == NUMBER]
                if known := [mean for mean in means if mean is not None and math.isfinite(mean)]:
                    values.setdefault(name, {})[step] = float(np.mean(known))
        except DumpError as error:
            problems.append((f"records of step {step}", error.what))
    names = [name for name in values if any(values[name].values())]
    names.sort(key=lambda name: next((i for i, w in enumerate(_FIRST) if w in name), 9))
    columns = {name: [values[name].get(step) for step in steps] for name in names[:_MOST]}
    return {"step": steps, **columns} if columns else {}, gaps, problems


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, evenly, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[i] for i in np.linspace(0, len(steps) - 1, most).astype(int).tolist()]


def _mean_of(record: Record) -> float | None:
    if record.form == NUMBER:
        return None if isinstance(record.number, str) else float(record.number)
    value = record.load()
    if record.form == DIGEST:
        weights, means = (value["moments"][:, MOMENTS.index(name)] for name in ("count", "mean"))
        known = weights > 0
        return float(np.average(means[known], weights=weights[known])) if known.any() else None
    if record.has_rows and record.layout.spans is not None:
        assert record.keys is not None
        parts = [record.layout.part(value, row).reshape(-1) for row in range(len(record.keys))]
        value = np.concatenate(parts) if parts else np.empty(0)
    return float(np.asarray(value, np.float64).mean()) if value.size else None


def mean_gap(records: StepRecords) -> float | None:
    """The mean absolute difference of log-probs, trainer minus engine, by sampled token.

    None where either has no value for each token; raises DumpError.
    """
    stages = {
        name: [one for one in stage if one.form == ROWS and one.layout.align is not None]
        for name, stage in records.stages.items()
    }
    engine = stages.get(ENGINE)
    trainer = next((stages[name] for name in TRAINER if stages.get(name)), None)
    if not engine or trainer is None or records.rows is None:
        return None
    value_of, gaps = functools.cache(lambda record: record.load()), [np.empty(0)]
    for i, row, j, other in pair_rows(engine, trainer)[0]:
        keys = engine[i].keys
        assert keys is not None
        at = int(records.rows.find(keys[row]))
        if (tokens := records.tokens_of(at)) is None:
            continue
        prompt, sampled = int(records.rows.prompt_lengths[at]), tokens[1]
        a, b = (
            by_token(one.layout.part(value_of(one), n), one.layout.align, prompt, sampled)
            for one, n in ((engine[i], row), (trainer[j], other))
        )
        both = np.abs(b - a)[sampled]
        gaps.append(both[~np.isnan(both)])
    every = np.concatenate(gaps)
    return float(every.mean()) if every.size else None
