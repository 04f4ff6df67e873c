"""A reward function over the sessions of cached rollouts: what it is given, and what it changed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip.batch.decoding import Decode
from rlskip.errors import RlskipError
from rlskip.format.dump_errors import DumpError
from rlskip.rescore.judge import ONE, VERL_MANY, Judge, RewardError
from rlskip.rescore.kept import ABSENT
from rlskip.runs.conversation import recorded, to_text
from rlskip.runs.json_lines import numbered
from rlskip.runs.opened import Scope
from rlskip.runs.rollouts import PLACE, ROW, TEXTS, Rollouts, SessionRows

SHOWN = 10  # sessions that changed most
_KEPT_ERRORS = 20
_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
_TRUTHS = ("ground_truth", "gts", "label")
_NOT_COLUMNS = {*ROW, *PLACE, *TEXTS}
Data = Mapping[str, Mapping[str, Any]]
"""The rows of a data set, by their prompts as text."""


# -- what a function is given ------------------------------------------------------------------


def read_data(file: Path) -> Data:
    """The rows of a data set by their ``prompt``, from Parquet or JSON lines.

    Raises RlskipError where it has no such column, or another form.
    """
    try:
        rows = [json.loads(row) if isinstance(row, str) else row for _, row in numbered(file)]
        return {_name_of(row.pop("prompt")): row for row in rows}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        what = f"it has no rows with a prompt: {type(error).__name__}: {error}"
        raise RlskipError(what, str(file), "give Parquet, or JSON lines") from error


def _name_of(prompt: Any) -> str:
    """Text or messages as text; of messages nothing but role and content counts."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return json.dumps([[one["role"], one.get("content")] for one in prompt])


def arguments(
    judge: Judge, sessions: Sequence[SessionRows], decode: Decode | None, data: Data | None = None
) -> Any:
    """The arguments of a call of `judge` for these sessions, one if it takes one.

    `decode` makes text of tokens, without special ones; `data` has more columns, by prompt. Raises
    RlskipError where the run does not record what the function takes, or `data` lacks its prompt.
    """
    given = [_Given.of(one, decode, data) for one in sessions]
    of_verl = judge.judged in (*ONE, *VERL_MANY)
    columns = _verl_columns(judge, given) if of_verl else _trl_columns(judge, given)
    found = {n: v for n, v in columns.items() if judge.takes_any or n in judge.names}
    if "completion_ids" in judge.needs and None in found["completion_ids"]:
        one = given[found["completion_ids"].index(None)]
        what, remedy = "the function takes completion_ids", "take completions or solution_str"
        raise RewardError(f"{what}, and the run records text", one.session.where, remedy)
    for name in judge.needs - found.keys():
        is_truth = name.startswith("ground_truth")
        one = next((one for one in given if not is_truth or one.truth is ABSENT), given[0])
        own = ", ".join(sorted(name for name in one.last if name not in _NOT_COLUMNS)) or "none"
        what = f"the function takes {name}, which the run does not record"
        remedy = f"name the data set: --data FILE; the fields are {own}"
        raise RewardError(what, one.session.where, remedy)
    return found if judge.takes_many else {name: cells[0] for name, cells in found.items()}


def _verl_columns(judge: Judge, given: Sequence[_Given]) -> dict[str, list[Any]]:
    takes_ids = "completion_ids" in judge.names
    columns: dict[str, list[Any]] = {
        "solution_str": [one.solution(takes_ids) for one in given],
        "data_source": [one.last.get("data_source") for one in given],
        "extra_info": [one.extra_info for one in given],
    }
    truths = [one.truth for one in given]
    if not any(truth is ABSENT for truth in truths):  # "in" would compare arrays
        columns["ground_truth"] = truths
    plural = "s" if judge.takes_many else ""
    found = {name + plural: cells for name, cells in columns.items()}
    if takes_ids:
        found["completion_ids"] = [one.last.get("response") for one in given]
    return found


def _trl_columns(judge: Judge, given: Sequence[_Given]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "prompts": [one.prompt for one in given],
        "completions": [one.completion for one in given],
        "completion_ids": [one.tokens for one in given],
    }
    # Columns that differ from dump to dump would else be missing for some.
    left_out = _NOT_COLUMNS - judge.names
    columns = {n: None for one in given for n in one.last if n not in left_out and n not in found}
    return found | {name: [one.last.get(name) for one in given] for name in columns}


@attrs.frozen
class _Given:
    session: SessionRows
    turns: list[dict[str, Any]]
    decode: Decode | None
    last: Mapping[str, Any]
    """Its last turn, which trainers score, with the columns of its prompt."""

    @classmethod
    def of(cls, session: SessionRows, decode: Decode | None, data: Data | None) -> _Given:
        turns = session.turns
        if data is None:
            return cls(session, turns, decode, turns[-1])
        asked = _name_of(recorded(turns[0], "user"))
        if asked not in data:  # its columns would be missing
            what = f"no row of --data has the prompt {asked!r:.80}"
            remedy = "give the prompts as the run recorded them, text as text, messages as messages"
            raise RewardError(what, session.where, remedy)
        return cls(session, turns, decode, {**data[asked], **turns[-1]})

    @property
    def tokens(self) -> list[int] | None:
        whole = self.session.conversation
        return None if whole is None else whole.completion

    def solution(self, takes_ids: bool) -> str | None:
        """The last answer as text; None for a function that takes its tokens, without text."""
        said, tokens = recorded(self.last, "assistant"), self.last.get("response")
        if isinstance(said, str):
            return said
        if tokens is not None and self.decode is not None:
            return self.decode(tokens)
        if tokens is not None and takes_ids:
            return None
        what = "its answer is not text, and there is no tokenizer"
        raise RlskipError(what, self.session.where, to_text(self.last))

    @property
    def truth(self) -> Any:
        """What verl and TRL call the right answer; ABSENT where the run records none."""
        model = self.last.get("reward_model")
        if isinstance(model, Mapping) and "ground_truth" in model:
            return model["ground_truth"]
        return next((self.last[name] for name in _TRUTHS if name in self.last), ABSENT)

    @property
    def extra_info(self) -> dict[str, Any]:
        """As verl's reward manager completes it."""
        found = self.last.get("extra_info")
        turns = self.last.get("__num_turns__", self.last.get("num_turns"))
        scores = self.last.get("reward_scores", {})
        more = {"num_turns": turns, "rollout_reward_scores": scores}
        return {**(found if isinstance(found, Mapping) else {}), **more}

    @property
    def prompt(self) -> Any:
        said = recorded(self.turns[0], "user")
        return self._text(self.turns[0].get("prompt")) if said is None else said

    @property
    def completion(self) -> Any:
        said = recorded(self.last, "assistant")
        if said is None and self.tokens is None:
            raise RlskipError("it has no answer", self.session.where, to_text(self.last))
        if said is not None and len(self.turns) == 1:
            return said
        messages = self.session.messages if said is not None else None
        if messages is None:
            return self._text(self.tokens)
        first = recorded(self.turns[0], "user")
        return messages[len(first) if isinstance(first, list) else 1 :]

    def _text(self, tokens: Any) -> Any:
        return tokens if tokens is None or self.decode is None else self.decode(tokens)


def score_of(verdict: Any, *, finite: bool = True) -> float | Exception:
    """The score in a verdict, a `finite` number or verl's mapping with one; else what is wrong."""
    try:
        score: Any = verdict.get("score") if isinstance(verdict, Mapping) else verdict
        found = float(score)
        if math.isfinite(found) or not finite:
            return found
    except Exception:  # a verdict may be anything
        pass
    return RewardError(f"it returned {verdict!r:.80}, which is not a score")


# -- what it changed ---------------------------------------------------------------------------


@attrs.define
class Rescored:
    """What scoring again found. Of a session that has a new score only its scores are kept.

    ``most_changed`` are the sessions that changed most. Groups that ``gained`` a signal have scores
    that differ now and were equal before, as ``step/group``. ``failures`` are the first of the
    sessions without a new score; ``unreadable`` says why a dump cannot be read.
    """

    sessions: int = 0
    failed: int = 0
    failures: list[dict[str, Any]] = attrs.field(factory=list)
    old: list[float] = attrs.field(factory=list)
    new: list[float] = attrs.field(factory=list)
    changed: int = 0
    most_changed: list[dict[str, Any]] = attrs.field(factory=list)
    groups: int = 0
    gained: list[str] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)
    unreadable: list[dict[str, str]] = attrs.field(factory=list)

    def add(self, step: int, rollouts: Rollouts, verdicts: Sequence[float | Exception]) -> None:
        """Count a dump's sessions, of each of which there is a verdict."""
        cells = rollouts.columns.of("reward")
        dtype = getattr(cells[0], "dtype", None) if cells else None
        scores: dict[tuple[str, int], float] = {}
        for one, found in zip(rollouts.sessions, verdicts, strict=True):
            place = {"step": step, "call": one.place["call"],
                     "group": one.group, "session": one.number}  # fmt: skip
            self.sessions += 1
            if isinstance(found, Exception):
                self.failed += 1
                if self.failed <= _KEPT_ERRORS:
                    self.failures.append({**place, "error": f"{type(found).__name__}: {found}"})
                continue
            # As the run's rewards are: 0.1 is another number in float32.
            new = float(dtype.type(found)) if dtype is not None and dtype.kind == "f" else found
            old, scores[one.group, one.number] = one.reward, new
            self.new.append(new)
            if old is not None:
                self.old.append(old)
            if old != new:
                self.changed += 1
                by = math.inf if old is None else abs(new - old)
                every = [*self.most_changed, {"by": by, **place, "old": old, "new": new}]
                self.most_changed = sorted(every, key=lambda one: -one["by"])[:SHOWN]
        for group in rollouts.groups:
            self.groups += 1
            # With the sessions that were not scored again.
            before = {one.reward for one in group.sessions}
            after = {scores.get((one.group, one.number), one.reward) for one in group.sessions}
            had, has = (len(some - {None}) > 1 for some in (before, after))
            if had != has:
                (self.gained if has else self.lost).append(f"{step}/{group.name}")

    def as_json(self) -> dict[str, Any]:
        scores = {"old": _described(self.old), "new": _described(self.new)}
        return attrs.asdict(self, filter=lambda field, _: field.name not in scores) | scores


def _described(scores: list[float]) -> dict[str, Any] | None:
    """``count``, ``mean``, ``std``, ``min``, ``p10``, ``p50``, ``p90``, ``max``."""
    if not scores:
        return None
    found = {"count": len(scores), "mean": float(np.mean(scores)), "std": float(np.std(scores))}
    quantiles = np.quantile(scores, list(_QUANTILES.values()), method="lower").tolist()
    return found | dict(zip(_QUANTILES, quantiles, strict=True))


def rescore(
    judge: Judge,
    steps: Sequence[Scope],
    *,
    workers: int = 8,
    data: Data | None = None,
    progress: Callable[[Sequence[Scope]], Iterable[Scope]] = iter,
) -> Rescored:
    """Score the sessions of some steps or calls again; one dump is in memory at a time.

    `workers` calls of the function are under way at a time; `data` has more columns, by prompt.
    Raises RlskipError where a dump does not record what the function takes.
    """

    async def run() -> Rescored:  # an async function has one loop for all
        pool = ThreadPoolExecutor(workers, "rlskip-judge")
        asyncio.get_running_loop().set_default_executor(pool)
        rescored = Rescored()
        for step in progress(steps):
            for dump in step.iter_dumps():
                try:
                    rollouts = step.read(dump)
                except DumpError as error:
                    problem = str(error).partition("\n")[0]
                    rescored.unreadable.append({"dump": dump.name, "problem": problem})
                    continue
                rollouts.decode = rollouts.decode or dump.decoder(skip_special=True)
                verdicts = await _verdicts(judge, rollouts, workers, data)
                rescored.add(dump.step, rollouts, verdicts)
        return rescored

    return asyncio.run(run())


async def _verdicts(
    judge: Judge, rollouts: Rollouts, workers: int, data: Data | None
) -> list[float | Exception]:
    """Of each session its score, or why there is none."""
    sessions = rollouts.sessions
    size = math.ceil(len(sessions) / workers) if judge.takes_many else 1
    cuts = [sessions[i : i + size] for i in range(0, len(sessions), max(size, 1))]
    at_a_time = asyncio.Semaphore(workers)

    async def ask(cut: Sequence[SessionRows]) -> list[float | Exception]:
        async with at_a_time:
            # What the run lacks concerns every session, so it is raised here.
            given = arguments(judge, cut, rollouts.decode, data)
            try:
                if judge.is_async:
                    said = await judge.ask_async(given)
                else:
                    said = await asyncio.to_thread(judge.ask, given)
            except Exception as error:
                return [error] * len(cut)
            except SystemExit as error:  # it must not end the command, as if all were well
                return [RewardError(f"it ended with exit code {error.code}")] * len(cut)
        return [score_of(verdict) for verdict in said]

    answers = await asyncio.gather(*map(ask, cuts))
    return [score for scores in answers for score in scores]
