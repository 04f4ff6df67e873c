"""Rollouts of any trainer as columns, rows and sessions: tokens, log-probs, rewards.

The meaning of a column is inferred from its name; the names are those of verl, SkyRL, TRL and
``train.py``. A session of several turns may have several rows: lengths and rewards are those of
sessions.

Columns are those of a dump that was loaded into numpy's arrays: looking at it needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch import columns as batches
from rlskip.keys import split_trajectory
from rlskip.runs import trl_results

NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompts", "prompt_token_ids", "prompt_ids"),
    "response": ("responses", "response_ids", "completion_ids"),
    "whole": ("input_ids",),
    "attention": ("attention_mask",),
    "mask": ("response_mask", "loss_masks", "loss_mask", "completion_mask"),
    "log_probs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "old_log_probs",
        "logprobs",
    ),
    "reward": ("rewards", "reward", "rm_scores", "token_level_scores", "token_level_rewards",
               "scores", "score"),
    "uid": ("uid", "uids", "trajectory_ids"),
    "group": ("uid", "uids", "prompt"),
    "session": ("session_id", "session"),
    "turn": ("turn", "step_index"),
    "last": ("is_last_step",),
}  # fmt: skip

Column = Any  # an array or a sequence: one value a row


@attrs.frozen
class Columns:
    """Rollouts as columns of `n` values each, and `whole`: what belongs to the whole batch."""

    n: int
    columns: Mapping[str, Column]
    whole: Mapping[str, Any]

    def name_of(self, what: str) -> str | None:
        """The name of the column that holds `what` (a key of NAMES); None without one."""
        return next((name for name in NAMES[what] if name in self.columns), None)

    def of(self, what: str) -> Sequence[Any] | None:
        """The values of the column that holds `what`; None without one."""
        name = self.name_of(what)
        return None if name is None else values(self.columns[name])

    def array(self, what: str) -> np.ndarray | None:
        """The column that holds `what`, if it is an array of numbers; complex ones are none."""
        name = self.name_of(what)
        column = None if name is None else self.columns[name]
        return column if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" else None


@attrs.frozen
class Trajectory:
    """A row without padding. `response` begins with the first sampled token.

    ``mask`` has for each token of the response whether it was sampled, ``log_probs`` its
    log-prob; None if the rollouts have none. A token-level ``reward`` is summed.
    """

    index: int
    uid: str | None
    prompt: list[int]
    response: list[int]
    mask: list[int] | None
    log_probs: list[float] | None
    reward: float | None


@attrs.frozen
class SessionRows:
    """A session: its rows in the order of its turns, and the group of sessions of its prompt."""

    group: str
    number: int
    rows: list[int]


# -- any rollouts as columns ---------------------------------------------------------------


def rollout_columns(rollouts: Any) -> Columns:
    """Columns of a DataProto, a TensorDict, a mapping, a queue's part or a list of rows.

    What TRL's stage returned has no names, and gets those that `trl_results` knows.
    """
    batch, named = rollouts, batches.columns_of(rollouts)
    whole: dict[str, Any] = {}
    if of_trl := trl_results.named(rollouts):
        named, whole = of_trl
        batch = dict([next(iter(named.items()))])  # the first has one value for each row
    elif is_queue_part(rollouts):
        batch, whole = rollouts["fields"], {"groups": rollouts["groups"]}
        named = {"key": rollouts["keys"], **batches.columns_of(batch)}
    elif batches.is_data_proto(rollouts):
        whole = {"meta_info": rollouts.meta_info}
    elif not named and isinstance(rollouts, list | tuple):
        named = {"value": list(rollouts)}
    elif not named and not isinstance(rollouts, Mapping):
        whole = {"value": rollouts}
    n = batches.length_of(batch)
    columns = {str(k): column for k, column in named.items() if batches.column_length(column) == n}
    others = {str(k): batches.unwrapped(v) for k, v in named.items() if str(k) not in columns}
    return Columns(n, columns, {**others, **whole})


def is_queue_part(rollouts: Any) -> bool:
    """Whether `rollouts` are what role rollout_tq dumps."""
    return isinstance(rollouts, dict) and rollouts.keys() == {"groups", "keys", "fields"}


def values(column: Column) -> Sequence[Any]:
    """One value for each row."""
    return batches.cells_of(column) or ()


# -- columns as rows -----------------------------------------------------------------------


def trajectories_of(columns: Columns) -> list[Trajectory]:
    """All rows; none if no column holds tokens."""
    return trajectories_at(columns, range(columns.n))


def trajectories_at(columns: Columns, places: Sequence[int]) -> list[Trajectory]:
    """The rows at these indices; none if no column holds tokens."""
    found = {what: cells for what in _OF_A_ROW if (cells := columns.of(what)) is not None}
    for what in ("prompt", "response", "whole"):
        if what in found and any(tokens(found[what][i]) is None for i in places):
            del found[what]  # text, or numbers that are not tokens
    if not found.keys() & {"response", "whole"}:
        return []
    return [_row(i, {what: column[i] for what, column in found.items()}) for i in places]


_OF_A_ROW = ("prompt", "response", "whole", "attention", "mask", "log_probs", "reward", "uid")


def _row(index: int, cell: dict[str, Any]) -> Trajectory:
    response, mask = tokens(cell.get("response")), numbers(cell.get("mask"))
    log_probs = numbers(cell.get("log_probs"))
    prompt, attention = tokens(cell.get("prompt")) or [], numbers(cell.get("attention"))
    if response is None:
        # The prompt is what precedes the first sampled token.
        whole = tokens(cell["whole"]) or []
        sampled = [i for i, flag in enumerate(mask or []) if flag]
        first, last = (sampled[0], sampled[-1] + 1) if sampled else (len(whole), len(whole))
        prompt, response = whole[:first], whole[first:last]
        if attention is not None and len(attention) == len(whole):
            prompt = [t for t, real in zip(prompt, attention, strict=False) if real]
        mask = mask[first:last] if mask else None
        log_probs = log_probs[first:last] if log_probs else None
    elif attention is not None and len(attention) == len(prompt) + len(response):
        seen = attention[len(prompt) :]
        prompt = [t for t, real in zip(prompt, attention, strict=False) if real]
        # Only trailing zeros are padding; a gap belongs to the rollout.
        length = max((i + 1 for i, real in enumerate(seen) if real), default=0)
        response = response[:length]
        mask = mask[:length] if mask else None
        log_probs = log_probs[:length] if log_probs else None
    uid = cell.get("uid")
    return Trajectory(
        index,
        None if uid is None else str(_single(uid)),
        prompt,
        response,
        None if mask is None else [int(bool(flag)) for flag in mask],
        None if log_probs is None else [float(p) for p in log_probs],
        _total(cell.get("reward")),
    )


def tokens(value: Any) -> list[int] | None:
    """A cell as a list of tokens; None if it is anything else."""
    found = numbers(value)
    if found is None or not all(math.isfinite(v) and int(v) == v for v in found):
        return None
    return [int(v) for v in found]


def numbers(value: Any) -> list[Any] | None:
    """A cell as a list of numbers; None if it is anything else."""
    if isinstance(value, np.ndarray | np.generic):
        value = np.reshape(value, -1).tolist()
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        return list(value)
    return None


def _total(value: Any) -> float | None:
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return float(value)
    given = numbers(value)
    return None if given is None else float(sum(given))


def _single(value: Any) -> Any:
    """A cell that holds one value as that value; any other as it is."""
    is_single = isinstance(value, np.ndarray | np.generic) and value.size == 1
    return value.item() if is_single else value


# -- rows as sessions ----------------------------------------------------------------------


def sessions_of(columns: Columns) -> list[SessionRows]:
    """The sessions, in the order of their first rows.

    Rows belong to one session if their keys say so (a queue's), or their columns of group and
    session, or their trajectory ids (SkyRL), or if no earlier row is a session's last step. Else
    each row is a session. Groups are those of the key, of the uid, or of equal prompts.
    """
    names = _row_names(columns)
    found: dict[tuple[str, Any], list[tuple[Any, int]]] = {}
    for i, (group, session, turn) in enumerate(names):
        found.setdefault((group, session), []).append((turn, i))
    count: Counter[str] = Counter()
    sessions = []
    for (group, _), rows in found.items():
        sessions.append(SessionRows(group, count[group], [i for _, i in sorted(rows)]))
        count[group] += 1
    return sessions


def _row_names(columns: Columns) -> list[tuple[str, Any, Any]]:
    """Group, session and turn of each row."""
    n = columns.n
    keys = [split_trajectory(str(key)) for key in values(columns.columns.get("key", ()))]
    if len(keys) == n and all(keys):
        return [key for key in keys if key is not None]
    group, session, turn = (_scalars(columns, what) for what in ("group", "session", "turn"))
    turns = turn if turn and all(isinstance(t, int) for t in turn) else [0] * n
    if group and session:
        return list(zip(map(str, group), session, turns, strict=True))
    if columns.name_of("uid") == "trajectory_ids":
        ids = [str(_single(uid)) for uid in columns.of("uid") or ()]
        heads = [uid.rpartition("_")[0] or uid for uid in ids]
        return list(zip(heads, ids, turns, strict=True))
    groups = [str(name) for name in group] if group else _prompts(columns)
    last = _scalars(columns, "last") or [True] * n
    first, names = 0, []
    for i in range(n):
        names.append((groups[first], first, turns[i]))
        first = i + 1 if last[i] else first
    return names


def _scalars(columns: Columns, what: str) -> list[Any] | None:
    """The column that holds `what`, if it has a text or a whole number for each row."""
    column = columns.of(what)
    if column is None:
        return None
    cells = [_single(v) for v in column]
    return cells if all(isinstance(v, str | int) for v in cells) else None


def _prompts(columns: Columns) -> list[str]:
    """For each row the number of its prompt among the prompts that differ."""
    numbered: dict[tuple[int, ...], int] = {}
    rows = trajectories_of(columns)
    if not rows:
        return [str(i) for i in range(columns.n)]
    return [str(numbered.setdefault(tuple(row.prompt), len(numbered))) for row in rows]


def lengths_of(columns: Columns) -> list[int]:
    """Tokens of each row's response without padding; none if no column holds tokens.

    Worked out for whole columns if they are arrays: a step may have 10 000 rows.
    """
    response, attention, mask = (columns.array(w) for w in ("response", "attention", "mask"))
    if response is not None and response.ndim == 2 and response.dtype.kind != "f":
        width = response.shape[1]
        real = mask if mask is not None and mask.shape == response.shape else None
        if attention is not None and attention.ndim == 2 and attention.shape[1] > width:
            real = attention[:, attention.shape[1] - width :]
        if real is None:
            return [width] * columns.n
        if not width or not columns.n:
            return [0] * columns.n
        lengths: list[int] = (np.arange(1, width + 1) * (real != 0)).max(1).tolist()
        return lengths
    return [len(row.response) for row in trajectories_of(columns)]


def rewards_of(columns: Columns) -> list[float | None]:
    """The reward of each row; None if it has none, or one that is not finite."""
    reward = columns.array("reward")
    if reward is not None and columns.n:
        totals: list[Any] = reward.astype(np.float64).reshape(columns.n, -1).sum(1).tolist()
    else:
        totals = [_total(cell) for cell in columns.of("reward") or [None] * columns.n]
    return [None if total is None else if_finite(total) for total in totals]


def if_finite(value: float) -> float | None:
    """`value`; None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def real_columns(columns: Columns) -> dict[str, Column]:
    """The columns; of padded arrays with token columns only what is not padding, flat.

    A token-level reward becomes the reward of each row.
    """
    found = dict(columns.columns)
    for what in ("prompt", "response", "whole", "log_probs", "mask", "reward"):
        name, column = columns.name_of(what), columns.array(what)
        if name is None or column is None or column.ndim != 2:
            continue
        if what == "reward":
            found[name] = Padded(column, column.sum(1))
        elif (real := _real(columns, what, column.shape[1])) is not None:
            found[name] = Padded(column, column[real])
    return found


@attrs.frozen
class Padded:
    """A column, and its values without padding."""

    column: np.ndarray
    values: np.ndarray


def _real(columns: Columns, what: str, width: int) -> np.ndarray | None:
    """Which tokens of a padded column of `width` are not padding, as far as masks tell."""
    attention, mask = columns.array("attention"), columns.array("mask")
    if attention is not None and attention.ndim == 2 and attention.shape[1] >= width:
        at = 0 if what == "prompt" else attention.shape[1] - width
        real: np.ndarray = attention[:, at : at + width] != 0
        return real
    if what == "prompt" or mask is None or mask.ndim != 2 or mask.shape[1] != width:
        return None
    sampled = mask != 0
    # Up to the last token that was sampled.
    upto_last: np.ndarray = np.maximum.accumulate(sampled[:, ::-1], axis=1)[:, ::-1]
    return sampled if what == "log_probs" else upto_last


def plain(value: Any) -> Any:
    """A cell as JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
