"""The lengths of a prompt's earlier sessions, from earlier batches and from dumps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlskip.batch.columns import rows_of
from rlskip.dispatch.failures import DataFailure, text_of
from rlskip.store import DumpError, StepStore, UnsupportedTypeError, fingerprint

logger = logging.getLogger(__name__)

NEWEST = 64
"""The number of steps whose dumps are read, newest first."""


class History:
    """Mean length by prompt.

    Parameters
    ----------
    fields
        The fields that identify a prompt; empty for all of its content.
    """

    def __init__(self, fields: Sequence[str] = ()) -> None:
        self._fields = tuple(fields)
        self._known: dict[str, tuple[float, int]] = {}

    def key(self, sample: Mapping[str, Any]) -> str | None:
        """The key of a prompt in this history.

        None if it lacks one of the fields, or holds what cannot be compared.
        """
        with contextlib.suppress(UnsupportedTypeError):
            if not self._fields:
                return fingerprint(sample)
            if all(name in sample for name in self._fields):
                return fingerprint({name: sample[name] for name in self._fields}, volatile=())
        return None

    def expected(self, key: str | None) -> float | None:
        """The mean length of the prompt's sessions; None when unknown."""
        if key is None or key not in self._known:
            return None
        total, count = self._known[key]
        return total / count

    def learn(self, key: str | None, length: float) -> None:
        """Record the length of one more session of the prompt."""
        if key is not None:
            total, count = self._known.get(key, (0.0, 0))
            self._known[key] = total + length, count + 1

    def learn_dumps(self, store: StepStore) -> int:
        """Learn from the rows of a run's newest dumps; returns their number.

        A row's length is the sum of its ``response_mask``. Dumps that lack it or one of the
        fields, and dumps and rows that cannot be read, are skipped.
        """
        if not self._fields:
            return 0
        learnt = 0
        for step in store.steps()[-NEWEST:]:
            try:
                rows = rows_of(store.load(step, fields=[*self._fields, "response_mask"]))
            except (DumpError, OSError) as error:
                logger.info("step %d has no lengths to learn: %s", step, error)
                continue
            for row in rows:
                try:
                    length = _length_of({"response_mask": row.pop("response_mask")})
                    self.learn(self.key(row), length)
                except Exception as error:  # a column may hold anything
                    logger.info("step %d has a row without a length: %s", step, error)
                else:
                    learnt += 1
        return learnt


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """The tokens that a session generated, by its rows' response masks, else their responses.

    Raises
    ------
    DataFailure
        A row's mask or responses have no length: NaN, a meta tensor, an object that raises.
    """
    tokens = 0
    for i, row in enumerate(rows):
        try:
            tokens += _length_of(row)
        except TypeError:  # fields of these names that hold something else
            pass
        except BaseException as error:
            name = "responses" if row.get("response_mask") is None else "response_mask"
            what = f"the length of its {name} cannot be read: {type(error).__name__}"
            raise DataFailure(f"row {i}: {what}: {text_of(error)}") from error
    return tokens


def _length_of(row: Mapping[str, Any]) -> int:
    mask, responses = row.get("response_mask"), row.get("responses")
    if mask is not None:
        return int(mask.sum() if hasattr(mask, "sum") else sum(mask))
    return 0 if responses is None else len(responses)
