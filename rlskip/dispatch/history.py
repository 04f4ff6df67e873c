"""How long a prompt's sessions were before: in earlier batches, and in dumps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rlskip.store import DumpError, StepStore, fingerprint

logger = logging.getLogger(__name__)

NEWEST = 64
"""So many steps' dumps are read, the newest."""


class History:
    """Mean length by prompt.

    Parameters
    ----------
    fields
        The fields that name a prompt; empty: all of its content does.
    """

    def __init__(self, fields: Sequence[str] = ()) -> None:
        self._fields = tuple(fields)
        self._known: dict[str, tuple[float, int]] = {}

    def key(self, sample: Mapping[str, Any]) -> str | None:
        """What the history knows a prompt by; None when it lacks one of the fields."""
        if not self._fields:
            return fingerprint(sample)
        if not all(name in sample for name in self._fields):
            return None
        return fingerprint({name: sample[name] for name in self._fields}, volatile=())

    def expected(self, key: str | None) -> float | None:
        """The mean length of the prompt's sessions; None when none is known."""
        if key is None or key not in self._known:
            return None
        total, count = self._known[key]
        return total / count

    def learn(self, key: str | None, length: float) -> None:
        """One more session of the prompt was so long."""
        if key is not None:
            total, count = self._known.get(key, (0.0, 0))
            self._known[key] = total + length, count + 1

    def learn_dumps(self, store: StepStore) -> int:
        """Take in the rows of a run's newest dumps; returns how many.

        A row's length is the sum of its ``response_mask``. Dumps without that, or without one
        of the fields, or that cannot be read, teach nothing.
        """
        if not self._fields:
            return 0
        learnt = 0
        for step in store.steps()[-NEWEST:]:
            try:
                batch = store.load(step, fields=[*self._fields, "response_mask"])
            except (DumpError, OSError) as error:
                logger.info("step %d teaches no lengths: %s", step, error)
                continue
            columns = _columns(batch)
            masks = columns.pop("response_mask")
            for i, mask in enumerate(masks):
                sample = {name: column[i] for name, column in columns.items()}
                self.learn(self.key(sample), float(mask.sum()))
            learnt += len(masks)
        return learnt


def _columns(batch: Any) -> dict[str, Sequence[Any]]:
    """The fields of a TensorDict, a mapping or a DataProto, each a sequence over its rows."""
    if hasattr(batch, "non_tensor_batch"):
        tensors = {} if batch.batch is None else _columns(batch.batch)
        return {**tensors, **_columns(batch.non_tensor_batch)}
    names = batch.keys() if isinstance(batch, TensorDictBase) else list(batch)
    return {name: _column(batch[name]) for name in names}


def _column(value: Any) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return value.unbind(0)
    return value.tolist() if hasattr(value, "tolist") else value  # type: ignore[no-any-return]


def length_of(row: Mapping[str, Any]) -> int:
    """The tokens that a row's session generated: by its response mask, else its responses."""
    mask, responses = row.get("response_mask"), row.get("responses")
    try:
        if mask is not None:
            return int(mask.sum() if hasattr(mask, "sum") else sum(mask))
        return 0 if responses is None else len(responses)
    except TypeError:  # fields of these names that hold something else
        return 0
