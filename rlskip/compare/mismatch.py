"""What the engine said against what the trainer computed: log-probs of the same sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from rlskip.batch.row_parts import by_token
from rlskip.compare.records import Record, RowTable, StepRecords, Values, pair_rows
from rlskip.compare.steps import around_token, name_of
from rlskip.compare.verdict import RowName
from rlskip.stages.parts import ROWS

ENGINE = "engine_log_probs"
#: What a trainer's log-probs before its first update are called, the likeliest first.
TRAINER = ("old_log_probs", "log_probs")
BEYOND = 1.0
_WORST = 5


@attrs.frozen
class Gaps:
    """Differences of log-probs, trainer minus engine, over sampled tokens.

    Parameters
    ----------
    tokens
        How many tokens.
    mean, largest
        Of the absolute differences.
    kl
        The k3 estimate of the KL divergence of the trainer's policy from the engine's,
        ``mean(exp(d) - 1 - d)``, in nats a token.
    beyond
        The share of tokens whose difference exceeds 1.0.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    beyond: float

    @classmethod
    def of(cls, gaps: np.ndarray) -> Gaps:
        """Of float64 differences; NaN where there are none."""
        if not gaps.size:
            return cls(0, *[float("nan")] * 4)
        sizes = np.abs(gaps)
        with np.errstate(over="ignore"):
            kl = float((np.expm1(gaps) - gaps).mean())
        share = float((sizes > BEYOND).mean())
        return cls(gaps.size, float(sizes.mean()), float(sizes.max()), kl, share)


@attrs.frozen(order=True)
class WorstToken:
    """A token whose log-probs differ most, by `gap`."""

    gap: float
    step: int
    row: RowName = attrs.field(order=False)
    token: int = attrs.field(order=False)
    engine: float = attrs.field(order=False)
    trainer: float = attrs.field(order=False)
    around: tuple[list[int], int] = attrs.field(order=False)


@attrs.frozen
class StepMismatch:
    """A step's differences: of all tokens, and the worst."""

    step: int
    stage: str
    all: Gaps
    worst: list[WorstToken]


def mismatch(step: int, records: StepRecords) -> StepMismatch | None:
    """Compare the engine's log-probs of a step with the trainer's; None where either has no value
    for each token.

    Raises
    ------
    DumpError
        A value cannot be read.
    """
    rows = records.rows
    known = {name: found for name in (ENGINE, *TRAINER) if (found := _of_tokens(records, name))}
    stage = next((name for name in TRAINER if name in known), None)
    if stage is None or ENGINE not in known or rows is None:
        return None
    every = [np.empty(0)]
    worst: list[WorstToken] = []
    both = known[ENGINE], known[stage]
    for at, tokens, engine, trainer, places in _sampled(records, rows, *both):
        gaps = trainer - engine
        every.append(gaps)
        k = int(np.abs(gaps).argmax())
        size = float(abs(gaps[k]))
        if len(worst) < _WORST or size > worst[-1].gap:
            place = int(places[k])
            values = float(engine[k]), float(trainer[k])
            around = around_token(tokens, place)
            worst.append(WorstToken(size, step, name_of(rows, at), place, *values, around))
            worst = sorted(worst, reverse=True)[:_WORST]
    return StepMismatch(step, stage, Gaps.of(np.concatenate(every)), worst)


def _of_tokens(records: StepRecords, stage: str) -> list[Record]:
    """The records of a stage that have a value for each token of their rows."""
    every = records.stages.get(stage, ())
    return [one for one in every if one.form == ROWS and one.layout.align is not None]


def _sampled(
    records: StepRecords, table: RowTable, engine: Sequence[Record], trainer: Sequence[Record]
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Of each row its place in the table, its tokens, and of those that were sampled both
    log-probs and their places."""
    values = Values(), Values()
    for i, row, j, other in pair_rows(engine, trainer).rows.tolist():
        one, two = engine[i], trainer[j]
        assert one.keys is not None
        at = int(table.find(one.keys[row]))
        found = records.tokens_of(at)
        if found is None:
            continue
        tokens, sampled = found
        prompt = int(table.prompt_lengths[at])
        placed = [
            by_token(record.layout.part(kept.of(record), n), record.layout.align, prompt, sampled)
            for record, n, kept in ((one, row, values[0]), (two, other, values[1]))
        ]
        places = np.flatnonzero(sampled & ~np.isnan(placed[0]) & ~np.isnan(placed[1]))
        if len(places):
            yield at, tokens, placed[0][places], placed[1][places], places
