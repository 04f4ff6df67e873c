"""What the engine said against what the trainer computed: log-probs of the same sampled tokens."""

from __future__ import annotations

import numpy as np

from rlskip.batch.row_parts import by_token
from rlskip.compare.records import Record, StepRecords, Values, pair_rows
from rlskip.stages.parts import ROWS

ENGINE = "engine_log_probs"
#: What a trainer's log-probs before its first update are called, the likeliest first.
TRAINER = ("old_log_probs", "log_probs")


def mean_gap(records: StepRecords) -> float | None:
    """The mean absolute difference of a step, trainer minus engine, over sampled tokens.

    None where either has no value for each token. Raises DumpError where one cannot be read.
    """
    known = {name: found for name in (ENGINE, *TRAINER) if (found := _of_tokens(records, name))}
    stage = next((name for name in TRAINER if name in known), None)
    if stage is None or ENGINE not in known or records.rows is None:
        return None
    engine, trainer = known[ENGINE], known[stage]
    values = Values(), Values()
    gaps = [np.empty(0)]
    for i, row, j, other in pair_rows(engine, trainer).rows.tolist():
        sides = (engine[i], row, values[0]), (trainer[j], other, values[1])
        keys = engine[i].keys
        assert keys is not None
        at = int(records.rows.find(keys[row]))
        if (tokens := records.tokens_of(at)) is None:
            continue
        prompt, sampled = int(records.rows.prompt_lengths[at]), tokens[1]
        a, b = (
            by_token(one.layout.part(kept.of(one), n), one.layout.align, prompt, sampled)
            for one, n, kept in sides
        )
        both = np.abs(b - a)[sampled]
        gaps.append(both[~np.isnan(both)])
    every = np.concatenate(gaps)
    return float(every.mean()) if every.size else None


def _of_tokens(records: StepRecords, stage: str) -> list[Record]:
    """The records of a stage that have a value for each token of their rows."""
    every = records.stages.get(stage, ())
    return [one for one in every if one.form == ROWS and one.layout.align is not None]
