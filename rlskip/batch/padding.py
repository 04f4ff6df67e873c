"""Which values of the columns of a batch belong to which token of a row, and which are padding.

What a mask of attention or of the prompt leaves out of a prompt is padding, wherever it is; without
one, a prompt has none. Of a response, and of a row that is one column, only what follows its last
token is padding: gaps belong to it. The last one is the last that is attended to; without a mask of
attention, the last one that was sampled. (A trainer that masks prompts masks responses alike, not
what of them was sampled.) Lists have no padding.

A mask, log-probs and token rewards have one value for each token of the response, or of the prompt
and the response. They are padded as their tokens are, or not at all. Of a row with any other number
of values it is not known which token has which: they are never cut, and none is made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._human import counted
from rlskip.batch.ragged import Ragged
from rlskip.errors import RlskipError


class LengthError(RlskipError, ValueError):
    """A mask, log-probs or rewards with another number of values than their row has tokens."""


@attrs.frozen
class Misfit:
    """Values of a row that are not one for each of its tokens.

    ``what`` is the entry of RowFields, ``name`` the field that it names, ``of`` what has the
    `tokens`: ``response``, ``prompt`` or ``row``. Without a row the field has `values` rows, and
    the batch `tokens`. Where `values` is None, they are anything but a sequence of numbers.
    """

    what: str
    name: str
    row: int | None
    values: int | None
    tokens: int
    of: str = "response"

    def __str__(self) -> str:
        if self.values is None:
            where = "" if self.row is None else f" in row {self.row}"
            return f"{self.name} is not one number for each token{where}"
        if self.row is None:
            rows, responses = counted(self.values, "row"), counted(self.tokens, "response")
            return f"{self.name} has {rows}, for {responses}"
        values, tokens = counted(self.values, "value"), counted(self.tokens, "token")
        whose = "the row" if self.of == "row" else f"its {self.of}"
        return f"{self.name} has {values} in row {self.row}, and {whose} has {tokens}"


def refuse(misfits: Sequence[Misfit], where: str, *, annotated: bool = True) -> None:
    """Raise LengthError where values have another length; `where` says whose they are.

    If a stage is `annotated`, what its fields hold can be told.
    """
    if not (misfits := [odd for odd in misfits if odd.values is not None]):
        return
    first, others = misfits[0], len({odd.row for odd in misfits}) - 1
    hint = f"; or, where it holds something else: annotate(rows={{{first.what!r}: None}})"
    hint = hint if annotated else ""
    raise LengthError(
        str(first) + (f"; likewise {counted(others, 'other row')}" if others else ""),
        where,
        f"give {first.name} one value for each token, or None in a row without values{hint}",
    )


@attrs.frozen(eq=False)
class Places:
    """Where the values of a field are that has `widths` of them in each row: int64 [B].

    Those from `starts` to `ends` are the wanted tokens'; ``of`` tells what the widths count.
    """

    of: str
    widths: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def places_of_response(
    prompts: np.ndarray, responses: np.ndarray, padded: Sequence[Places], *, is_padded: bool
) -> list[Places]:
    """Where a field may have the response's values, the likeliest first.

    `prompts` and `responses` count each row's tokens; `padded` tells where they are in fields with
    the width of the tokens. A field that is not `is_padded` may have no padding.
    """
    found = [attrs.evolve(one, starts=one.ends - responses) for one in padded]
    if is_padded:
        return found
    whole = Places("row", prompts + responses, prompts, prompts + responses)
    alone = Places("response", responses, np.zeros_like(responses), responses)
    # A response's width may be the length of a row; what is likelier has both its forms first.
    return [whole, *found, alone] if padded[0].of == "row" else [alone, found[0], whole, found[1]]


def fit(
    lengths: np.ndarray, likely: Sequence[Places], misfits: list[Misfit], what: str, name: str
) -> tuple[Places, np.ndarray]:
    """Which of the `likely` places a field's values have, and in which rows they are there.

    `lengths` count each row's values, -1 without any; rows that do not fit are added to `misfits`.
    """
    absent = lengths < 0
    for places in likely:
        if (absent | (lengths == places.widths)).all():
            return places, ~absent
    places = likely[0]
    fits = lengths == places.widths
    for row in np.flatnonzero(~(absent | fits)).tolist():
        values, tokens = int(lengths[row]), int(places.widths[row])
        misfits.append(Misfit(what, name, row, values, tokens, places.of))
    return places, fits


def unpadded(read: dict[str, Ragged], names: Mapping[str, str]) -> dict[str, Any]:
    """What ``Rows`` has of rows with these columns, called `names`."""
    misfits: list[Misfit] = []

    def fitted(what: str, *likely: Places, misfits: list[Misfit] = misfits) -> Ragged | None:
        """The wanted part of a mask; None without one, or where it fits no row."""
        if (mask := read.get(what)) is None:
            return None
        lengths = np.where(mask.given, mask.lengths, -1)
        places, fits = fit(lengths, likely, misfits, what, names[what])
        found = attrs.evolve(mask, given=fits).cut(places.starts, places.ends)
        return found if fits.any() else None

    made = _of_two(read, fitted) if "response" in read else _of_one(read, fitted)
    return {**made, "misfits": misfits}


def _of_one(read: dict[str, Ragged], fitted: Any) -> dict[str, Any]:
    """Of rows whose prompt and response are in one column."""
    whole = read["whole"]
    attention = fitted("attention", _all("row", whole.lengths))
    starts, ends = _extents(attention, whole.lengths)
    likely = [Places("row", whole.lengths, starts, ends)]
    if "mask" in read and not read["mask"].is_padded:
        likely.append(_all("row", ends - starts))
    mask = fitted("mask", *likely)
    first, last = _extents(mask, ends - starts)
    is_sampled = (first < ends - starts) & (np.False_ if mask is None else mask.given)
    if attention is None and whole.is_padded:
        ends = np.where(is_sampled, last, ends)
    firsts = np.where(is_sampled, starts + first, ends)
    seen = attention and attention.cut(starts, firsts)
    return {
        "prompt": whole.cut(starts, firsts).without_gaps(seen),
        "response": whole.cut(firsts, ends),
        "mask": mask and mask.cut(firsts - starts, ends - starts),
        "has_prompts": True,
        "places": [Places("row", whole.lengths, starts, ends)],
        "extents": {"whole": (starts, ends)},
    }


def _of_two(read: dict[str, Ragged], fitted: Any) -> dict[str, Any]:
    """Of rows whose prompts and responses are in a column each."""
    response = read["response"]
    prompt = read.get("prompt") or Ragged.of_cells([np.empty(0, np.int64)] * len(response))
    both = prompt.lengths + response.lengths
    # Without its prompts a row may have more tokens than are known.
    known: dict[str, Any] = {} if "prompt" in read else {"misfits": []}
    attention = fitted("attention", _all("row", both), **known)
    if attention is not None:
        of_prompt = attention.cut(0, prompt.lengths)
        of_response = attention.cut(prompt.lengths, both)
    else:
        of_prompt, of_response = fitted("prompt_mask", _all("prompt", prompt.lengths)), None
    starts, stops = _extents(of_prompt, prompt.lengths)
    seen = of_prompt and of_prompt.cut(starts, stops)
    kept = prompt.cut(starts, stops).without_gaps(seen)

    def padded(ends: np.ndarray) -> list[Places]:
        own = Places("response", response.lengths, np.zeros_like(ends), ends)
        return [own, Places("row", both, starts, prompt.lengths + ends)]

    ends = _response_ends(of_response, response.lengths, of_prompt)
    is_padded = "mask" in read and read["mask"].is_padded
    likely = places_of_response(kept.lengths, ends, padded(ends), is_padded=is_padded)
    mask = fitted("mask", *likely)
    if attention is None and response.is_padded:
        # A mask alone may leave out what a tool said: where there is no padding it cuts nothing.
        ends = _response_ends(mask, response.lengths, of_prompt)
    return {
        "prompt": kept,
        "response": response.cut(0, ends),
        "mask": mask and mask.cut(0, ends),
        "has_prompts": "prompt" in read,
        "places": padded(ends),
        "extents": {
            "prompt": (starts, stops),
            "response": (0 * ends, ends),
            "whole": (starts, prompt.lengths + ends),
        },
    }


def _all(of: str, lengths: np.ndarray) -> Places:
    return Places(of, lengths, np.zeros_like(lengths), lengths)


def _response_ends(
    mask: Ragged | None, lengths: np.ndarray, of_prompt: Ragged | None
) -> np.ndarray:
    """Where each response ends: after its last real token; what follows is padding."""
    first, ends = _extents(mask, lengths)
    # A response without any token that is attended to is empty.
    return ends if of_prompt is None else np.where(first == lengths, 0, ends)


def _extents(mask: Ragged | None, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in each row of these lengths what is not padding starts and ends; all without a mask.

    Both are the length of a row of which the mask keeps nothing.
    """
    if mask is None:
        return np.zeros_like(lengths), lengths
    flags = mask.flat.tobytes()  # bytes are searched faster than arrays
    found = [(flags.find(1, *span), flags.rfind(1, *span) + 1) for span in mask.spans]
    first, last = np.array(found, np.int64).reshape(-1, 2).T
    none = first < 0
    first, last = np.where(none, lengths, first - mask.starts), last - mask.starts
    return np.where(mask.given, first, 0), np.where(none | ~mask.given, lengths, last)
