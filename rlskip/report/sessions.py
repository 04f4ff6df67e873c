"""What a page shows of what was recorded: curves over a job's steps, and sessions token by token.

Of a session the page's script reads a mapping. ``parts`` are its pieces in order, each with
``kind`` (one of :data:`KINDS`), ``turn``, ``ids``, ``values`` (by the name of what was recorded,
one number a token) and, where the vocabulary's texts do not make up its text, ``texts``.
``messages`` are the chat messages that the run recorded, ``cells`` the values of a first row
without tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlskip._human import short
from rlskip.batch.decoding import Decode
from rlskip.compare.records import Record, RowValues, StepRecords, pair_rows
from rlskip.compare.sides import Side
from rlskip.format.dump_errors import DumpError
from rlskip.runs.conversation import Piece, messages_of
from rlskip.runs.on_disk import spread
from rlskip.runs.rollouts import PLACE, ROW, SessionRows
from rlskip.runs.tables import line
from rlskip.stages.parts import DIGEST, MOMENTS, NUMBER, ROWS

READ, _OF_ROWS = 400, 64  # steps that are read; and those of which values of rows are read
_FIRST = ("loss", "grad_norm", "entropy", "kl", "engine", "log_prob")
_MOST = 24

ENGINE = "engine_log_probs"
#: What a trainer's log-probs before its first update are called, the likeliest first.
TRAINER = ("old_log_probs", "log_probs")

KINDS = PROMPT, SAMPLED, OBSERVED, UNKNOWN = "prompt", "sampled", "observed", "unknown"
GAP = "trainer - engine"
#: What the log-probs of the rollouts themselves are called.
LOG_PROBS = "log-probs of the rollout"

_CELL = 2_000  # characters
_TAIL = 300  # characters, or tokens, of a group's prompt


def curves(
    records: Side, wanted: Sequence[int]
) -> tuple[list[int], dict[str, list[float | None]], list[tuple[str, str]]]:
    """The numbers that a job recorded, a value a step: of rows and of several records the mean.

    Returned are which of the `wanted` steps (none: of all) are read; a column for each stage that
    is not zero everywhere, losses first, and for how far the trainer's log-probs are from the
    engine's; and what cannot be read.
    """
    recorded = records.steps()
    steps = spread(sorted({*recorded} & {*wanted}) if wanted else recorded, READ)
    heavy = {*spread(steps, _OF_ROWS)}
    values, problems = dict[str, dict[int, float]](), list[tuple[str, str]]()
    for step in steps:
        try:
            found = records.records(step)
            if step in heavy and (gap := mean_gap(found)) is not None:
                values.setdefault(f"|{GAP}|", {})[step] = gap
            for name, stage in found.stages.items():
                means = [_mean_of(one) for one in stage if step in heavy or one.form == NUMBER]
                if known := [mean for mean in means if mean is not None and math.isfinite(mean)]:
                    values.setdefault(name, {})[step] = float(np.mean(known))
        except DumpError as error:
            problems.append((f"records of step {step}", error.what))
    names = [name for name in values if any(values[name].values())]
    names.sort(key=lambda name: next((i for i, w in enumerate(_FIRST) if w in name), 9))
    columns = {name: [values[name].get(step) for step in steps] for name in names[:_MOST]}
    return steps, columns, problems


def _mean_of(record: Record) -> float | None:
    value = record.load()
    if record.form == NUMBER and value.dtype.kind == "U":
        return None
    if record.form == DIGEST:
        weights, means = (value["moments"][:, MOMENTS.index(name)] for name in ("count", "mean"))
        known = weights > 0
        return float(np.average(means[known], weights=weights[known])) if known.any() else None
    if record.keys is not None:  # without padding
        parts = [record.part(value, row).reshape(-1) for row in range(len(record.keys))]
        value = np.concatenate([*parts, value[:0].reshape(-1)])
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
            one.by_token(value_of(one), n, prompt, sampled)
            for one, n in ((engine[i], row), (trainer[j], other))
        )
        both = np.abs(b - a)[sampled]
        gaps.append(both[~np.isnan(both)])
    every = np.concatenate(gaps)
    return float(every.mean()) if every.size else None


class Vocabulary:
    """The texts of the tokens that a chunk of a page shows, by their ids."""

    def __init__(self, decode: Decode | None) -> None:
        self.decode = decode
        self.texts: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text; without a tokenizer their numbers."""
        return " ".join(map(str, ids)) if self.decode is None else self.decode(ids)

    def add(self, ids: Sequence[int]) -> list[str] | None:
        """Note the tokens; their texts where those of single tokens do not make up the whole."""
        if self.decode is None:
            return None
        for token in set(ids) - self.texts.keys():
            self.texts[token] = self.decode([token])
        if "".join(self.texts[token] for token in ids) == self.decode(ids):
            return None
        return _one_by_one(ids, self.decode)


def _one_by_one(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds to those before it; of a part of a character none yet."""
    found: list[str] = []
    start = read = 0
    for i in range(len(ids)):
        before, after = decode(ids[start:read]), decode(ids[start : i + 1])
        if after.endswith("\ufffd") and i + 1 < len(ids):
            found.append("")
            continue
        found.append(after[len(before) :])
        start, read = read, i + 1
    return found


def _token_values(row: Mapping[str, Any], piece: Piece, recorded: RowValues) -> dict[str, Any]:
    """For each name one value a token of a turn's response, float64; NaN where there is none."""
    found = {LOG_PROBS: np.array(piece.log_probs, np.float64)}
    for name in recorded.names:
        if (values := recorded.by_token(name, row["row"])) is not None:
            found[name] = values
    engine = found.get(ENGINE, found[LOG_PROBS])
    trainer = next((found[name] for name in TRAINER if name in found), None)
    if trainer is not None:
        found[GAP] = trainer - engine
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def session(one: SessionRows, vocabulary: Vocabulary, recorded: RowValues) -> dict[str, Any]:
    """A session for the page; raises DumpError where what was recorded cannot be read."""
    turns, pieces = one.turns, one.pieces
    parts: list[dict[str, Any]] = []
    for turn, (row, piece) in enumerate(zip(turns, pieces, strict=False)):
        if piece.added:
            kind = OBSERVED if turn and piece.continues else PROMPT
            parts.append(_part(kind, turn, piece.added, {}, vocabulary))
        values, end = _token_values(row, piece, recorded), 0
        kinds = [UNKNOWN] * len(piece.response)
        if piece.mask is not None:
            kinds = [SAMPLED if flag else OBSERVED for flag in piece.mask]
        for kind, run in itertools.groupby(kinds):
            start, end = end, end + len(list(run))
            span = slice(start, end)
            some = {name: array[span] for name, array in values.items() if kind != OBSERVED}
            parts.append(_part(kind, turn, piece.response[span], some, vocabulary))
    found: dict[str, Any] = {"parts": parts, "messages": _messages(turns)}
    if not pieces:
        named = ((name, v) for name, v in turns[0].items() if name not in (*PLACE, *ROW))
        found["cells"] = [(name, short(_as_text(value), _CELL)) for name, value in named]
    return found


def prompt_of(one: SessionRows, vocabulary: Vocabulary) -> str:
    """The end of the text of a session's first prompt."""
    tokens = one.turns[0].get("prompt")
    said = next((m["text"] for m in _messages(one.turns) if m["role"] == "user"), None)
    if tokens is not None and (said is None or vocabulary.decode is not None):
        said = vocabulary.text(tokens[-_TAIL:])
    return (one.group if said is None else said)[-_TAIL:]


def _part(
    kind: str, turn: int, ids: list[int], values: Mapping[str, np.ndarray], words: Vocabulary
) -> dict[str, Any]:
    part: dict[str, Any] = {"kind": kind, "turn": turn, "ids": ids}
    if (texts := words.add(ids)) is not None:
        part["texts"] = texts
    if known := {name: rounded(v, 4) for name, v in values.items() if not np.isnan(v).all()}:
        part["values"] = known
    return part


def rounded(values: np.ndarray, digits: int) -> list[float | None]:
    """Numbers with few digits, which are shorter in JSON; None for what is not finite."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values.tolist()]


def _messages(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The chat messages that the run recorded: role and text; without texts of a tokenizer."""
    found = []
    for message in messages_of(turns, None) or ():
        given = {name: _as_text(value) for name, value in message.items() if value is not None}
        role, content = given.pop("role", ""), given.pop("content", None)
        texts = [] if content is None else [content]
        texts += [f"{name}: {text}" for name, text in given.items()]
        found.append({"role": role, "text": "\n".join(texts)})
    return found


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else line(value)
