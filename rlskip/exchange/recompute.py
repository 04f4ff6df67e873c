"""The stages of a bundled step computed again, against what was recorded."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from rlskip.batch.row_parts import by_token
from rlskip.compare.records import Record, StepRecords
from rlskip.compare.rounding import LAMBDA
from rlskip.compare.steps import single_values
from rlskip.compare.verdict import DIFFERS, EQUAL, ROUNDING
from rlskip.errors import ConfigError
from rlskip.exchange.bundle import Bundle
from rlskip.exchange.losses import ADVANTAGES, LOSSES
from rlskip.rescore.arguments import arguments, score_of
from rlskip.rescore.judge import Judge
from rlskip.stages.parts import NUMBER, ROWS

REWARD, ADVANTAGE, LOSS = "reward", "advantages", "loss"
_ADVANTAGES, _REWARDS = ("advantages",), ("rewards", "scores")
_OLD = ("old_log_probs", "engine_log_probs")
_LOSSES = ("loss", "metrics.actor/pg_loss", "metrics.loss", "metrics.policy_loss")


@attrs.frozen
class Recomputed:
    """A stage: ``equal``, ``within rounding``, ``differs``, or ``not recorded``."""

    stage: str
    state: str
    function: str
    recorded: float | None = None
    computed: float | None = None
    where: str = ""


def recompute(bundle: Bundle, functions: Mapping[str, str]) -> list[Recomputed]:
    """Compute again what `functions` name, in the order reward, advantages, loss.

    Parameters
    ----------
    functions
        By stage ``module:function``, or a name of :mod:`rlskip.exchange.losses`, with keywords
        after commas: ``grpo,eps=1e-4``. A reward is called as ``rlskip rescore`` does,
        advantages with the rewards of the sessions (float32) and the names of their groups, a loss
        with log-probs, old log-probs, advantages and mask, a value for each token.

    Raises
    ------
    ConfigError
        A function does not exist.
    """
    found = []
    if REWARD in functions:
        found.append(_reward(bundle, functions[REWARD]))
    if ADVANTAGE in functions:
        found.append(_advantages(bundle, functions[ADVANTAGE]))
    if LOSS in functions:
        found.append(_loss(bundle, functions[LOSS]))
    return found


def _function(spec: str, own: Mapping[str, Callable[..., Any]], stage: str) -> Callable[..., Any]:
    name, *settings = spec.split(",")
    keywords: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            keywords[key] = {"true": True, "false": False}.get(text.lower())
            keywords[key] = float(text) if keywords[key] is None else keywords[key]
        except ValueError as error:
            what = f"{setting!r} is not a number"
            raise ConfigError(what, f"--{stage}", "give numbers: grpo,eps=1e-4") from error
    if name in own:
        function = own[name]
    else:
        module, _, path = name.partition(":")
        if not path:
            known = ", ".join(own) or "none"
            what = f"{name!r} names no function"
            raise ConfigError(what, f"--{stage}", f"give module:function; rlskip has: {known}")
        sys.path.insert(0, os.getcwd())
        try:
            function = importlib.import_module(module)  # type: ignore[assignment]
            for part in path.split("."):
                function = getattr(function, part)
        except Exception as error:  # of what the module runs
            what = f"{name} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigError(what, f"--{stage}") from error
    return lambda *args: function(*args, **keywords)


def _compared(
    stage: str, spec: str, old: np.ndarray, new: np.ndarray, names: list[str], scale: float = 0.0
) -> Recomputed:
    """`old` against `new` in float32: to the bit, or within rounding of `scale`."""
    a, b = old.astype(np.float32), new.astype(np.float32)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return Recomputed(stage, EQUAL, spec)
    gaps = np.where(same, 0.0, np.abs(a.astype(np.float64) - b))
    at = int(np.nanargmax(np.where(np.isnan(gaps), np.inf, gaps)))
    is_close = bool(
        (gaps <= LAMBDA * 2.0**-24 * np.maximum(np.maximum(np.abs(a), np.abs(b)), scale)).all()
    )
    state = ROUNDING if is_close else DIFFERS
    return Recomputed(stage, state, spec, float(a[at]), float(b[at]), names[at])


def _reward(bundle: Bundle, spec: str) -> Recomputed:
    function = _function(spec, {}, REWARD)
    name = spec.partition(",")[0]
    module, _, path = name.partition(":")
    found = getattr(sys.modules[module], path.partition(".")[0])
    judge = Judge(found if "." not in path else function, None, None)
    new, old, names = [], [], []
    sessions, earned = bundle.rollouts.sessions, _rewards(bundle)
    cuts = [sessions] if judge.takes_many else [[one] for one in sessions]
    for cut in cuts:
        said = judge.function(**arguments(judge, cut, bundle.rollouts.decode))
        for one, verdict in zip(cut, said if judge.takes_many else [said], strict=True):
            score = score_of(verdict)
            if isinstance(score, Exception):
                raise score
            new.append(score)
            old.append(earned[one.group, one.number])
            names.append(f"group {one.group}, session {one.number}")
    return _compared(REWARD, spec, np.array(old), np.array(new), names)


def _advantages(bundle: Bundle, spec: str) -> Recomputed:
    sessions, found = bundle.rollouts.sessions, _of_rows(bundle, _ADVANTAGES)
    rewards = torch.tensor(list(_rewards(bundle).values()), dtype=torch.float32)
    new = _function(spec, ADVANTAGES, ADVANTAGE)(rewards, [s.group for s in sessions])
    if found is None:
        return Recomputed(ADVANTAGE, "not recorded", spec)
    old, computed, names = list[float](), [], []
    for one, value in zip(sessions, np.asarray(new, np.float64), strict=True):
        for row in one.rows:
            if (value_of := found[row]) is not None:
                old.append(value_of[0])
                computed.append(value)
                names.append(f"group {one.group}, session {one.number}")
    return _compared(ADVANTAGE, spec, np.array(old), np.array(computed), names)


def _rewards(bundle: Bundle) -> dict[tuple[str, int], float]:
    """What each session earned: of its turns, as recorded, else as the rollouts have it."""
    recorded = _of_rows(bundle, _REWARDS)
    found: dict[tuple[str, int], float] = {}
    for one in bundle.rollouts.sessions:
        cells = [] if recorded is None else [recorded[row] for row in one.rows]
        known = [cell[0] for cell in cells if cell is not None]
        own = np.nan if one.reward is None else one.reward
        found[one.group, one.number] = sum(known) if known else own
    return found


def _loss(bundle: Bundle, spec: str) -> Recomputed:
    function = _function(spec, LOSSES, LOSS)
    records = bundle.records
    numbers = [] if records is None else _numbers(records, _LOSSES)
    if len(numbers) > 1:
        what = f"not comparable: {len(numbers)} losses of mini-batches were recorded"
        return Recomputed(LOSS, what, spec)
    parts = {name: _of_rows(bundle, (name,)) for name in ("log_probs", *_OLD, *_ADVANTAGES)}
    old = next((parts[name] for name in _OLD if parts[name] is not None), _own_log_probs(bundle))
    new, advantages = parts["log_probs"] or old, parts["advantages"]
    if not numbers or old is None or advantages is None or new is None:
        return Recomputed(LOSS, "not recorded", spec)
    columns: list[list[np.ndarray]] = [[], [], [], []]
    tokens = bundle.rollouts.tokens
    for row in range(len(bundle.rollouts)):
        mine, theirs, advantage = new[row], old[row], advantages[row]
        if mine is None or theirs is None or advantage is None:
            continue
        mask = tokens.mask[row] if tokens.mask is not None else None
        n = len((tokens.response or ())[row])
        sampled = np.ones(n) if mask is None else (np.asarray(mask) != 0).astype(float)
        given = (mine[1], theirs[1], np.where(np.isnan(advantage[1]), advantage[0], advantage[1]))
        for column, values in zip(columns, (*given, sampled), strict=True):
            column.append(np.nan_to_num(values))
    made = [torch.tensor(np.concatenate(column), dtype=torch.float32) for column in columns]
    computed = float(function(*made))
    scale = float((made[2].abs() * made[3]).mean()) * float(np.sqrt(len(made[0])))
    return _compared(LOSS, spec, np.array(numbers), np.array([computed]), ["the step"], scale)


def _numbers(records: StepRecords, names: tuple[str, ...]) -> list[float]:
    stage = next((records.stages[name] for name in names if name in records.stages), None)
    return [float(one.number) for one in stage or () if one.form == NUMBER]


def _own_log_probs(bundle: Bundle) -> list[tuple[float, np.ndarray] | None] | None:
    """Those of the rollouts themselves."""
    cells = bundle.rollouts.tokens.log_probs
    if cells is None:
        return None
    return [None if cell is None else (0.0, np.asarray(cell)) for cell in cells]


def _of_rows(
    bundle: Bundle, names: tuple[str, ...]
) -> list[tuple[float, np.ndarray] | None] | None:
    """For each row its first record: as one number, and for each token of the response."""
    records, rows = bundle.records, bundle.rollouts.tokens.rows
    stage = None
    if records is not None:
        stage = next((records.stages[name] for name in names if name in records.stages), None)
    if stage is None or rows is None or any(one.form != ROWS for one in stage):
        return None
    waiting: dict[int, deque[tuple[Record, int]]] = defaultdict(deque)
    for record in stage:
        for row, key in enumerate([] if record.keys is None else record.keys.tolist()):
            waiting[key].append((record, row))
    loaded: dict[int, np.ndarray] = {}
    found: list[tuple[float, np.ndarray] | None] = []
    tokens = bundle.rollouts.tokens
    for i, key in enumerate(rows.keys.tolist()):
        if not waiting[key]:
            found.append(None)
            continue
        record, row = waiting[key].popleft()
        value = loaded.setdefault(id(record), record.load())
        single = float(single_values(record, value, np.array([row]))[0])
        n_prompt = 0 if tokens.prompt is None else len(tokens.prompt[i])
        n = len((tokens.response or ())[i])
        mask = tokens.mask[i] if tokens.mask is not None else None
        own = np.ones(n, bool) if mask is None else np.asarray(mask) != 0
        if record.layout.align is None and value.size == len(value):
            found.append((single, np.full(n, single)))
            continue
        sampled = np.concatenate([np.zeros(n_prompt, bool), own])
        part = record.layout.part(value, row)
        found.append((single, by_token(part, record.layout.align, n_prompt, sampled)[n_prompt:]))
    return found
