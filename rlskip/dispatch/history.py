"""The lengths of a prompt's earlier sessions in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlskip.dispatch.batch import Prompt
from rlskip.dispatch.failures import DataFailure, text_of
from rlskip.store import UnsupportedTypeError, fingerprint


class History:
    """Mean length by the content of a prompt."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int]] = {}

    def look_up(self, prompts: Sequence[Prompt]) -> None:
        """Set what is known of prompts; of one that holds what cannot be compared it is nothing."""
        for prompt in prompts:
            with contextlib.suppress(UnsupportedTypeError):
                prompt.known_as = fingerprint(prompt.fields)
                total, count = self._known.get(prompt.known_as, (0.0, 0))
                prompt.expected = total / count if count else None

    def learn(self, key: str | None, length: float) -> None:
        """Record the length of one more session of the prompt."""
        if key is not None:
            total, count = self._known.get(key, (0.0, 0))
            self._known[key] = total + length, count + 1


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """The tokens that a session generated, by its rows' response masks, else their responses.

    Raises
    ------
    DataFailure
        A row's mask or responses have no length: NaN, a meta tensor, an object that raises.
    """
    tokens = 0
    for i, row in enumerate(rows):
        mask, responses = row.get("response_mask"), row.get("responses")
        try:
            if mask is not None:
                tokens += int(mask.sum() if hasattr(mask, "sum") else sum(mask))
            elif responses is not None:
                tokens += len(responses)
        except TypeError:  # fields of these names that hold something else
            pass
        except BaseException as error:
            name = "responses" if mask is None else "response_mask"
            what = f"the length of its {name} cannot be read: {type(error).__name__}"
            raise DataFailure(f"row {i}: {what}: {text_of(error)}") from error
    return tokens
