"""A session as one conversation: its prompt, and all that followed, in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

import attrs

Turns = Sequence[Mapping[str, Any]]

_SAID = {
    "user": ("raw_prompt", "messages", "own_prompt", "prompt", "prompt_text", "input"),
    "assistant": ("completions", "completion", "own_response", "response_text", "output"),
}


@attrs.frozen
class Conversation:
    """The first turn's prompt, and what followed it.

    ``mask`` has for each token of the completion whether the policy sampled it; others are
    observations between the turns. Their log-probs are None.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[bool]
    log_probs: list[float | None] | None

    @classmethod
    def of(cls, turns: Turns) -> Conversation | None:
        """None if no column holds tokens.

        Where a turn's prompt does not begin with the turn before it, because the context was
        rewritten, its observations are left out; what was sampled is always there.
        """
        pieces = pieces_of(turns)
        if not pieces:
            return None
        prompt, completion = pieces[0].added, list(pieces[0].response)
        mask, probs = list(pieces[0].mask), list(pieces[0].log_probs)
        for piece in pieces[1:]:
            added = piece.added if piece.continues else []
            completion += added + piece.response
            mask += [False] * len(added) + piece.mask
            probs += [None] * len(added) + piece.log_probs
        has_log_probs = any(turn.get("log_probs") is not None for turn in turns)
        return cls(prompt, completion, mask, probs if has_log_probs else None)


@attrs.frozen
class Piece:
    """A turn of a session, without what the turn before it said.

    Parameters
    ----------
    continues
        Whether its prompt begins with the turn before it, prompt and response; of the first True.
    added
        The tokens that its prompt has beyond those: all, unless it `continues`.
    response, mask, log_probs
        Its response, with an entry for each token: whether the policy sampled it, and its log-prob
        (None where none was recorded).
    """

    continues: bool
    added: list[int]
    response: list[int]
    mask: list[bool]
    log_probs: list[float | None]


def pieces_of(turns: Turns) -> list[Piece]:
    """The turns of a session; none if no column holds tokens."""
    if turns[0].get("response") is None:
        return []
    found: list[Piece] = []
    whole: list[int] = []
    for turn in turns:
        seen, response = turn.get("prompt") or [], turn["response"]
        continues = seen[: len(whole)] == whole
        mask = [*map(bool, turn.get("mask") or ()), *[True] * len(response)][: len(response)]
        probs = [*(turn.get("log_probs") or ()), *[None] * len(response)][: len(response)]
        added = seen[len(whole) :] if continues else seen
        found.append(Piece(continues, added, response, mask, probs))
        whole = seen + response
    return found


@attrs.frozen
class Said:
    """A message, and the tokens that it adds: of several in a row the last may have those of all.

    Parameters
    ----------
    message
        None where the run recorded only tokens.
    sampled
        Whether the policy said it.
    tokens, mask, log_probs
        As :class:`Piece` has them. Of an answer also those of the template before it.
    """

    message: dict[str, Any] | None
    sampled: bool
    tokens: list[int] = attrs.field(factory=list)
    mask: list[bool] = attrs.field(factory=list)
    log_probs: list[float | None] = attrs.field(factory=list)

    def add(self, tokens: list[int], mask: list[bool], log_probs: list[float | None]) -> None:
        self.tokens.extend(tokens)
        self.mask.extend(mask)
        self.log_probs.extend(log_probs)


def said_in(
    turns: Turns, text: Callable[[Sequence[int]], str] | None
) -> Iterator[tuple[list[Said], list[Said]]]:
    """For each turn what the policy was told since it last spoke, and what it said then.

    What a tool answered within a row is among what was said.
    """
    whole: list[dict[str, Any]] = []
    for number, (turn, piece) in enumerate(zip_longest(turns, pieces_of(turns))):
        asked = _chat(recorded(turn, "user"), "user") or []
        told = _observed(whole, turn, piece, text) if number else asked
        messages = _chat(recorded(turn, "assistant"), "assistant") or []
        whole += told + messages
        before = [Said(message, sampled=False) for message in told]
        if piece is not None and piece.continues and (added := piece.added):
            before = before or [Said(None, sampled=False)]
            before[-1].add(added, [False] * len(added), [None] * len(added))
        yield before, _answers(messages, piece)


def _answers(messages: list[dict[str, Any]], piece: Piece | None) -> list[Said]:
    """The messages of a response with its tokens; without messages, one for each run of tokens."""
    answers = [Said(message, message["role"] == "assistant") for message in messages]
    if piece is None:
        return answers
    runs, end = [], 0
    for sampled, flags in groupby(piece.mask):
        start, end = end, end + len(list(flags))
        runs.append((sampled, slice(start, end)))
    answers = answers or [Said(None, sampled) for sampled, _ in runs]
    owners = _owners([one.sampled for one in answers], [sampled for sampled, _ in runs])
    for owner, (_, span) in zip(owners, runs, strict=True):
        answers[owner].add(piece.response[span], piece.mask[span], piece.log_probs[span])
    return answers


def _owners(said: list[bool], sampled: list[bool]) -> list[int]:
    """For each run of tokens, sampled or not, the number of its message, said by the policy or not.

    A run that was sampled is one message, or several in a row. Where the numbers of runs and of
    messages allow neither, the policy's last message has all tokens.
    """
    own = [i for i, is_own in enumerate(said) if is_own]
    ends = own if len(own) == sum(sampled) else [i for i in own if i + 1 not in own]
    if len(ends) != sum(sampled):
        return [own[-1] if own else len(said) - 1] * len(sampled)
    owners, k = [], 0
    for is_sampled in sampled:
        start = ends[k - 1] + 1 if k else 0
        stop = next((i for i in own if i >= start), len(said))
        if is_sampled:
            owners.append(ends[k])
            k += 1
        elif start < stop:  # others spoke before the policy's next message
            owners.append(stop - 1)
        else:
            owners.append(ends[min(k, len(ends) - 1)])
    return owners


def messages_of(
    turns: Turns, text: Callable[[Sequence[int]], str] | None
) -> list[dict[str, Any]] | None:
    """A session's chat messages; None where the run recorded none and no tokenizer makes text.

    The first prompt's are those that the run recorded, else one message of a user. What was
    observed between the turns is what a later prompt's messages have beyond those before it. Where
    none say so, its tokens are a message of a user, because nothing says who wrote it.
    """
    texts = [recorded(turns[0], "user"), *(recorded(turn, "assistant") for turn in turns)]
    if any(one is None for one in texts):
        return None
    every = (one for told, answers in said_in(turns, text) for one in (*told, *answers))
    return [one.message for one in every if one.message is not None]


def _observed(
    before: Sequence[Mapping[str, Any]],
    turn: Mapping[str, Any],
    piece: Piece | None,
    text: Callable[[Sequence[int]], str] | None,
) -> list[dict[str, Any]]:
    chat = recorded(turn, "user")
    if isinstance(chat, list) and _said(chat[: len(before)]) == _said(before):
        return [dict(one) for one in chat[len(before) :]]
    if piece and piece.continues and piece.added and text is not None:
        return [{"role": "user", "content": text(piece.added)}]
    return []


def _said(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Who said what: a message that is quoted may have other entries, or "" for None."""
    return [(one["role"], one.get("content") or "") for one in messages]


def recorded(turn: Mapping[str, Any], role: str) -> str | list[dict[str, Any]] | None:
    """What a turn has of the prompt (``user``) or the answer (``assistant``): text or messages."""
    found = (turn.get(name) for name in _SAID[role])
    return next((one for one in found if _chat(one, role)), None)


def _chat(value: Any, role: str) -> list[dict[str, Any]] | None:
    """A value as chat messages, text as one of `role`; None if it is anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    is_chat = isinstance(value, list) and bool(value) and all(
        isinstance(one, Mapping) and "role" in one for one in value
    )  # fmt: skip
    return [dict(one) for one in value] if is_chat else None
