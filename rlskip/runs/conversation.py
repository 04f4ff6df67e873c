"""A session as one conversation: its prompt, and all that followed, in one piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs

Turns = Sequence[Mapping[str, Any]]

_SAID = {
    "user": ("raw_prompt", "messages", "prompt", "prompt_text", "input"),
    "assistant": ("completions", "completion", "response", "response_text", "output"),
}


@attrs.frozen
class Piece:
    """A turn of a session, without what the turn before it said.

    Whether its prompt ``continues`` with that turn, the tokens that it has ``added``, and its
    response, with a mask (None: not known) and a log-prob (None: none) for each of its tokens.
    """

    continues: bool
    added: list[int]
    response: list[int]
    mask: list[bool] | None
    log_probs: list[float | None]


def pieces_of(turns: Turns, unknown: Sequence[bool] = ()) -> list[Piece]:
    """The turns of a session; none if no column holds tokens.

    A turn without a mask was sampled as a whole, unless it is `unknown` what of it was.
    """
    if turns[0].get("response") is None:
        return []
    found, whole = list[Piece](), list[int]()
    for turn, is_unknown in zip_longest(turns, unknown):
        seen, response = turn.get("prompt") or [], turn["response"]
        continues = seen[: len(whole)] == whole
        mask = list(map(bool, turn.get("mask") or [True] * len(response)))
        probs = turn.get("log_probs") or [None] * len(response)
        added = seen[len(whole) :] if continues else seen
        found.append(Piece(continues, added, response, None if is_unknown else mask, probs))
        whole = seen + response
    return found


@attrs.frozen
class Conversation:
    """The first turn's prompt, and what followed it.

    ``mask`` has for each token of the completion whether the policy sampled it, or is None where
    that of a turn is not known; others are observations between the turns, without log-probs.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[bool] | None
    log_probs: list[float | None] | None

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Conversation | None:
        """Without the observations of a turn whose context was rewritten; None of no pieces."""
        if not pieces:
            return None
        completion, mask, probs = list[int](), list[bool](), list[float | None]()
        for i, piece in enumerate(pieces):
            added = piece.added if i and piece.continues else []
            completion += added + piece.response
            mask += [False] * len(added) + (piece.mask or [])
            probs += [None] * len(added) + piece.log_probs
        known = mask if all(piece.mask is not None for piece in pieces) else None
        said = probs if any(one is not None for one in probs) else None
        return cls(pieces[0].added, completion, known, said)


def messages_of(
    turns: Turns, text: Callable[[Sequence[int]], str] | None
) -> list[dict[str, Any]] | None:
    """A session's chat messages; None where the run recorded none and no tokenizer makes text.

    What was observed between turns is what a later prompt's messages have beyond those before it.
    Where none say so, its tokens are a message of a user, because nothing says who wrote it.
    """
    asked = _chat(recorded(turns[0], "user"), "user")
    answers = [_chat(recorded(turn, "assistant"), "assistant") for turn in turns]
    if asked is None or None in answers:
        return None
    found: list[dict[str, Any]] = []
    for turn, piece, answer in zip_longest(turns, pieces_of(turns), answers):
        chat = recorded(turn, "user")
        if not found:
            found += asked
        elif isinstance(chat, list) and _said(chat[: len(found)]) == _said(found):
            found += map(dict, chat[len(found) :])
        elif piece and piece.continues and piece.added and text is not None:
            found.append({"role": "user", "content": text(piece.added)})
        found += answer or ()
    return found


def _said(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Who said what: a message that is quoted may have other entries, or "" for None."""
    return [(one["role"], one.get("content") or "") for one in messages]


def recorded(turn: Mapping[str, Any], role: str) -> str | list[dict[str, Any]] | None:
    """What a turn has of the prompt (``user``) or the answer (``assistant``): text or messages."""
    found = (turn.get(f"own_{name}", turn.get(name)) for name in _SAID[role])
    return next((one for one in found if _chat(one, role)), None)


def to_text(turn: Mapping[str, Any]) -> str:
    """What to type where a turn has no text."""
    if turn.get("response") is not None:
        return "give the tokenizer: --tokenizer DIRECTORY"
    return "say which field the answer is: SkipManager.annotate(rows={'response': FIELD})"


def _chat(value: Any, role: str) -> list[dict[str, Any]] | None:
    """A value as chat messages, text as one of `role`; None if it is anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = value if isinstance(value, list) else []
    is_chat = turns and all(isinstance(one, Mapping) and "role" in one for one in turns)
    return [dict(one) for one in turns] if is_chat else None
