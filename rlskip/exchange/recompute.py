"""The stages of a bundled step computed again, against what was recorded.

Advantages and losses do what verl and TRL do, operation by operation, so that equal inputs give
equal bits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from rlskip._human import counted
from rlskip.compare.records import RowValues
from rlskip.compare.rounding import Rounding, differences
from rlskip.compare.verdict import DIFFERS, EQUAL, ROUNDING
from rlskip.errors import ConfigError
from rlskip.exchange.bundle import Bundle
from rlskip.rescore.judge import Judge, named_function
from rlskip.rescore.scoring import arguments, score_of
from rlskip.stages.parts import NUMBER

REWARD, ADVANTAGE, LOSS = "reward", "advantages", "loss"
NEW, OLD = "log_probs", "old_log_probs"
_REWARDS = ("rewards", "scores")
_LOSSES = ("loss", "metrics.actor/pg_loss", "metrics.loss", "metrics.policy_loss",
           "metrics.policy/policy_loss")  # fmt: skip


def grpo(
    rewards: torch.Tensor, groups: Sequence[str], eps: float = 1e-6, scale: bool = True
) -> torch.Tensor:
    """A reward's distance from its group's mean, in standard deviations of the group.

    Rewards are one for each session, float32. `eps` is added to the deviation: 1e-6 in verl, 1e-4
    in TRL. Dr. GRPO does not divide (`scale`).
    """
    found = torch.empty_like(rewards)
    for members in _members(groups):
        own = rewards[members]
        if len(members) == 1:  # verl: mean 0, deviation 1
            found[members] = own / (1 + eps) if scale else own
            continue
        gaps = own - own.mean()
        found[members] = gaps / (own.std() + eps) if scale else gaps
    return found


def rloo(rewards: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """A reward's distance from the mean of the other sessions of its group."""
    found = rewards.clone()
    for members in _members(groups):
        n = len(members)
        if n > 1:
            own = rewards[members]
            found[members] = own * n / (n - 1) - own.mean() * n / (n - 1)
    return found


def clipped(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    clip_c: float | None = None,
) -> torch.Tensor:
    """PPO's clipped loss, also that of GRPO and RLOO: the mean over all sampled tokens.

    All have a value for each token; the mask is 1 where it was sampled. The ratio may be `clip`
    below and `clip_high` above 1; `clip_c` is verl's ``clip_ratio_c``, the most that a ratio counts
    where the advantage is negative.
    """
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -20.0, 20.0))
    bounded = torch.clamp(ratio, 1 - clip, 1 + (clip if clip_high is None else clip_high))
    losses = torch.maximum(-advantages * ratio, -advantages * bounded)
    if clip_c is not None:
        losses = torch.where(advantages < 0, torch.minimum(-advantages * clip_c, losses), losses)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


ADVANTAGES = {"grpo": grpo, "rloo": rloo}
LOSSES = {"grpo": clipped, "rloo": clipped, "ppo": clipped}


def _members(groups: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for i, name in enumerate(groups):
        found.setdefault(name, []).append(i)
    return list(found.values())


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

    They are by stage ``module:function``, or one of ADVANTAGES or LOSSES, with keywords
    after commas: ``grpo,eps=1e-4``. A reward is called as ``rlskip rescore`` does, advantages with
    the rewards of the sessions (float32) and the names of their groups, a loss with log-probs, old
    log-probs, advantages and mask, a value for each token. Raises ConfigError where a function does
    not exist.
    """
    values = RowValues(bundle.records, bundle.rollouts)
    stages = {REWARD: _reward, ADVANTAGE: _advantages, LOSS: _loss}
    return [make(bundle, values, functions[n]) for n, make in stages.items() if n in functions]


def _function(spec: str, own: Mapping[str, Callable[..., Any]], stage: str) -> Callable[..., Any]:
    name, *settings = spec.split(",")
    keywords: dict[str, Any] = {}
    known = {"true": True, "false": False}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            keywords[key] = known[text.lower()] if text.lower() in known else float(text)
        except ValueError as error:
            what = f"{setting!r} is not a number"
            raise ConfigError(what, f"--{stage}", "give numbers: grpo,eps=1e-4") from error
    if name not in own and ":" not in name:
        remedy = f"give module:function; rlskip has: {', '.join(own) or 'none'}"
        raise ConfigError(f"{name!r} names no function", f"--{stage}", remedy)
    function = own[name] if name in own else named_function(name, f"--{stage}")
    return partial(function, **keywords) if keywords else function


def _numbers_of(
    function: Callable[..., Any], spec: str, stage: str, n: int, *args: Any, **given: Any
) -> list[float]:
    """What a function made of a stage: `n` numbers. What it raises is the user's to see."""
    try:
        said = function(*args, **given)
        if inspect.iscoroutine(said):
            said = asyncio.run(said)
        said = said.tolist() if hasattr(said, "tolist") else said
        is_many = isinstance(said, Iterable) and not isinstance(said, Mapping | str)
        scores = [score_of(one, finite=False) for one in (said if is_many else [said])]
        problem = next((str(one) for one in scores if isinstance(one, Exception)), None)
        if problem is None and len(scores) != n:
            problem = f"it returned {counted(len(scores), 'number')} for {n}"
    except (Exception, SystemExit) as error:
        problem = f"it raised {type(error).__name__}: {error}"
    if problem is not None:
        raise ConfigError(f"{spec}: {problem}", f"--{stage}")
    return scores  # type: ignore[return-value]


def _compared(
    stage: str, spec: str, old: list[float], new: list[float], names: list[str], scale: float = 0.0
) -> Recomputed:
    """`old` against `new` in float32: to the bit, or within rounding of `scale`."""
    a, b = (np.array(some, np.float32).astype(np.float64) for some in (old, new))
    gaps = differences(a, b)
    if not gaps.any():
        return Recomputed(stage, EQUAL, spec)
    at = int(gaps.argmax())
    allowed = Rounding().allowed(a, b, ("float32", "float32"), 1, scale)
    state = ROUNDING if (gaps <= allowed).all() else DIFFERS
    return Recomputed(stage, state, spec, float(a[at]), float(b[at]), names[at])


def _reward(bundle: Bundle, values: RowValues, spec: str) -> Recomputed:
    judge = Judge(_function(spec, {}, REWARD), None, None)
    if bundle.manifest["redacted"] and judge.needs != {"completion_ids"}:
        remedy = "bundle the step without --redact, or take completion_ids"
        raise ConfigError(f"{spec}: the bundle has hashes for texts", f"--{REWARD}", remedy)
    new, old, names = list[float](), [], []
    sessions, earned = bundle.rollouts.sessions, _rewards(bundle, values)
    for cut in [sessions] if judge.takes_many else [[one] for one in sessions]:
        given = arguments(judge, cut, bundle.rollouts.decode)
        new += _numbers_of(judge.function, spec, REWARD, len(cut), **given)
        old += [earned[one.group, one.number] for one in cut]
        names += [f"group {one.group}, session {one.number}" for one in cut]
    return _compared(REWARD, spec, old, new, names)


def _advantages(bundle: Bundle, values: RowValues, spec: str) -> Recomputed:
    sessions = bundle.rollouts.sessions
    rewards = torch.tensor(list(_rewards(bundle, values).values()), dtype=torch.float32)
    function, groups = _function(spec, ADVANTAGES, ADVANTAGE), [one.group for one in sessions]
    new = _numbers_of(function, spec, ADVANTAGE, len(sessions), rewards, groups)
    old, computed, names = list[float](), [], []
    for one, value in zip(sessions, new, strict=True):
        for row in one.rows:
            if (recorded := values.single(ADVANTAGE, row)) is not None:
                old.append(recorded)
                computed.append(value)
                names.append(f"group {one.group}, session {one.number}")
    if not old:  # or of other rollouts of the step
        return Recomputed(ADVANTAGE, "not recorded", spec)
    return _compared(ADVANTAGE, spec, old, computed, names)


def _rewards(bundle: Bundle, values: RowValues) -> dict[tuple[str, int], float]:
    """What each session earned: of its turns, as recorded, else as the rollouts have it."""
    name = next((name for name in _REWARDS if name in values.names), "")
    found: dict[tuple[str, int], float] = {}
    for one in bundle.rollouts.sessions:
        known = [v for row in one.rows if (v := values.single(name, row)) is not None]
        own = np.nan if one.reward is None else one.reward
        found[one.group, one.number] = sum(known) if known else own
    return found


def _loss(bundle: Bundle, values: RowValues, spec: str) -> Recomputed:
    """The loss of a step's only update, or of its first: there both policies are one.

    A trainer then records the log-probs once, before the update or in it.
    """
    function = _function(spec, LOSSES, LOSS)
    stages = {} if bundle.records is None else bundle.records.stages
    recorded = next((stages[name] for name in _LOSSES if name in stages), [])
    numbers = [float(one.load()[0]) for one in recorded if one.form == NUMBER]
    if len(numbers) > 1:
        what = f"not comparable: {len(numbers)} losses of mini-batches were recorded"
        return Recomputed(LOSS, what, spec)
    known = [name for name in (NEW, OLD) if name in values.names] or [NEW]
    columns: list[list[np.ndarray]] = [[], [], [], []]
    rows = bundle.rollouts.tokens.rows
    for row in range(len(bundle.rollouts)):
        given = [values.by_token(name, row) for name in (known[0], known[-1], ADVANTAGE)]
        if rows is not None and all(one is not None for one in given):
            sampled = rows.sampled[row][int(rows.prompt.lengths[row]) :]
            for column, some in zip(columns, (*given, sampled), strict=True):
                column.append(np.nan_to_num(np.asarray(some, np.float64)))
    if not numbers or not columns[0]:
        return Recomputed(LOSS, "not recorded", spec)
    made = [torch.tensor(np.concatenate(column), dtype=torch.float32) for column in columns]
    computed = _numbers_of(function, spec, LOSS, 1, *[one.clone() for one in made])
    scale = float((made[2].abs() * made[3]).mean()) * float(np.sqrt(len(made[0])))
    return _compared(LOSS, spec, numbers, computed, ["the step"], scale)
