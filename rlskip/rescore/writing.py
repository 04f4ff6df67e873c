"""A run of its own with new scores: the dumps of another one, their rewards replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip.batch.columns import columns_of, is_data_proto, is_lazy, is_tensor, is_tensordict
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import fingerprint
from rlskip.rescore.judge import Judge
from rlskip.runs.columns import is_queue_part
from rlskip.runs.on_disk import Dump, dumps_of
from rlskip.runs.rollouts import Rollouts
from rlskip.store import StepStore
from rlskip.store.layout import refuse_links, run_name

NOTE = "rescored"
"""The entry of a dump's meta that names the function whose scores it has."""


class WriteError(RlskipError, ValueError):
    """Rollouts that cannot be written with new scores."""


@attrs.frozen
class RescoredRun:
    """A dump_dir for runs with the scores of `judge`; each has the name of the run it is made from.

    A dump that a killed or failed attempt left is kept, if it is the same.
    """

    dump_dir: Path
    judge: Judge
    repeat: int = 1
    only_failed: bool = False

    def write(self, dump: Dump, rollouts: Rollouts, new: Mapping[tuple[str, int], float]) -> None:
        """Write a dump with new scores, named by group and session; other sessions keep theirs.

        A session's score goes to its last turn, and there to the last token where each token has a
        reward.

        Raises
        ------
        WriteError
            The rollouts have no rewards, or the dump that is there has other scores.
        """
        place = dump.place
        directory = self.dump_dir / run_name(place.root)
        refuse_links(directory)
        note = {
            "reward": self.judge.name,
            "version": self.judge.version,
            "repeat": self.repeat,
            "only_failed": self.only_failed,
        }
        name = rollouts.columns.name_of("reward")
        if name is None or "." in name or dump.meta is None:
            what = "the run records no rewards, because its trainer computes them later"
            remedy = 'give the trainer the function as rlskip.cached_reward(function, version="1")'
            raise WriteError(what, f"step {place.step}", remedy)
        scores: dict[int, float] = {}
        for session in rollouts.sessions:
            score = new.get((session.group, session.number))
            if score is not None:
                scores |= {**dict.fromkeys(session.rows, 0.0), session.rows[-1]: score}
        tokens = rollouts.tokens
        if odd := next((one for one in tokens.misfits if one.what == "reward"), None):
            remedy = "generate the step again, with one reward for each token or each row"
            raise WriteError(str(odd), f"step {place.step}", remedy)
        ends = tokens.lengths or [0] * len(rollouts)
        for i, span in enumerate(tokens.rewards):
            ends[i] = ends[i] if span is None else span[1]
        try:
            scored = with_scores(dump.load(), name, scores, ends)
        except WriteError as error:
            raise WriteError(error.what, f"step {place.step}", error.remedy) from error
        for there in dumps_of(directory, place.step):
            same = there.place.name == place.name
            if same and there.meta is not None:
                _refuse_other(there, note, scored)
                return
        store = StepStore(directory, rank=place.rank, world_size=place.world_size)
        meta = dump.full_meta()
        store.save(
            place.step,
            scored,
            identity=meta.identity,
            info={**meta.info, NOTE: note},
            sidecar=dump.load("aside"),
            call=place.call,
        )


def _refuse_other(there: Dump, note: Mapping[str, Any], scored: Any) -> None:
    """Raise WriteError where a dump is not what would be written in its place."""
    meta = there.meta
    is_same = meta is not None and meta.info.get(NOTE) == note
    if not is_same or fingerprint(there.load(), ()) != fingerprint(scored, ()):
        what = "the dump that is there has other rollouts or other scores"
        raise WriteError(what, str(there.place.directory), "write to another directory")


def with_scores(rollouts: Any, name: str, scores: Mapping[int, float], ends: Sequence[int]) -> Any:
    """`rollouts` with other values in the column `name`: `scores` by row.

    Parameters
    ----------
    ends
        Where in a row's rewards those of its response end: the last one gets the score where the
        old cell, which has one value a token, is zero everywhere.
    """

    def column(old: Any) -> Any:
        return _replaced(old, scores, ends)

    if is_queue_part(rollouts):
        fields = with_scores(rollouts["fields"], name, scores, ends)
        return {**rollouts, "fields": fields}
    if is_data_proto(rollouts):
        in_batch = rollouts.batch is not None and name in rollouts.batch.keys()  # noqa: SIM118
        holder = rollouts.batch if in_batch else rollouts.non_tensor_batch
        holder[name] = column(columns_of(holder)[name])
        return rollouts
    if is_tensordict(rollouts) and is_lazy(rollouts):
        for i, part in enumerate(rollouts.tensordicts):
            old = _as_floats(part[name])
            part[name] = _cell(old, scores[i], ends[i]) if i in scores else old
        return rollouts
    if is_tensordict(rollouts):
        rollouts[name] = column(columns_of(rollouts)[name])
        return rollouts
    if isinstance(rollouts, Mapping):
        return {**rollouts, name: column(rollouts[name])}
    rows = [
        {**row, name: _cell(row.get(name), scores[i], ends[i])} if i in scores else row
        for i, row in enumerate(rollouts)
    ]
    return tuple(rows) if isinstance(rollouts, tuple) else rows


def _replaced(column: Any, scores: Mapping[int, float], ends: Sequence[int]) -> Any:
    if is_tensor(column) and column.is_nested:
        import torch

        rows = [_as_floats(row) for row in column.unbind()]
        for i, score in scores.items():
            rows[i] = _cell(rows[i], score, ends[i])
        return torch.nested.as_nested_tensor(rows, layout=column.layout)
    made: Any
    if is_tensor(column):
        made = _as_floats(column).clone()
    elif isinstance(column, np.ndarray | list):
        made = _as_floats(column).copy()
    else:
        what = f"its rewards are a {type(column).__name__}"
        raise WriteError(what, remedy="only tensors, arrays and lists can be replaced")
    for i, score in scores.items():
        made[i] = _cell(made[i], score, ends[i])
    return made


def _cell(old: Any, score: float, end: int) -> Any:
    """A row's reward: a number, or one number a token of which the last one has the score."""
    if isinstance(old, list):
        try:
            array = np.array(old, np.float64)
        except (ValueError, TypeError) as error:
            raise WriteError(f"a row's rewards are not numbers: {old!r:.80}") from error
        return _cell(array, score, end).tolist()
    new = _as_floats(old)
    if is_tensor(old):
        new = new.new_zeros(new.shape)
    elif isinstance(old, np.ndarray) and old.ndim:
        new = np.zeros_like(new)
    else:
        return score
    flat = new.reshape(-1)
    earned = [i for i, reward in enumerate(old.reshape(-1).tolist()) if reward]
    if len(flat):
        flat[earned[-1] if earned else max(min(end, len(flat)) - 1, 0)] = score
    elif score:
        what = f"a row has no token, and its score is {score:.4g}: each reward is one a token"
        raise WriteError(what, remedy="let the function return 0 for it")
    return new


def _as_floats(value: Any) -> Any:
    """A tensor or an array of numbers that are not whole; any other value as it is."""
    if is_tensor(value):
        return value if value.is_floating_point() else value.float()
    is_whole = isinstance(value, np.ndarray) and value.dtype.kind in "biu"
    return value.astype(np.float64) if is_whole else value
