"""What the fields of a stage's rows hold, as a dump records it for its readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from rlskip.errors import ConfigError

CONVENTION: dict[str, tuple[str, ...]] = {
    "prompt": ("prompts", "prompt_token_ids", "prompt_ids"),
    "response": ("responses", "response_ids", "completion_ids"),
    "whole": ("input_ids",),
    "attention": ("attention_mask",),
    "prompt_mask": ("prompt_mask",),
    "mask": ("response_mask", "loss_masks", "loss_mask", "completion_mask", "tool_mask"),
    "log_probs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "old_log_probs",
        "logprobs",
    ),
    "reward": ("rewards", "reward", "rm_scores", "token_level_scores", "token_level_rewards",
               "scores", "score"),
    "group": ("uid", "uids", "prompt"),
    "session": ("session_id", "session", "trajectory_ids"),
    "turn": ("turn", "step_index"),
    "last": ("is_last_step",),
}  # fmt: skip
"""The names that verl, SkyRL, TRL and ``train.py`` give to fields, the likeliest first."""


class RowsError(ConfigError):
    """A description of rows that does not fit what the stage returns."""


@attrs.frozen
class RowFields:
    """Names the field of a stage's rows that holds each of these; None: no field does.

    A name may go on into the value of a row, as ``trajectory_ids.instance_id``. Fields of tokens
    have one value a token, with or without padding (:mod:`rlskip.batch.padding`).

    Parameters
    ----------
    prompt, response
        Token ids of the prompt, and of what was sampled for it.
    whole
        Token ids of both, one after the other.
    attention
        1 where ``whole``, or the prompt followed by the response, is not padding.
    prompt_mask
        1 where the prompt is not padding.
    mask
        1 where a token of the response, or of the prompt followed by it, was sampled.
    log_probs
        Of the sampled tokens, one for each token of the response, or of the prompt followed by it.
    reward
        One number a row, or one a token as ``log_probs`` has them.
    group
        A value that the rows of one prompt have in common.
    session, turn, last
        Which session of its group a row belongs to, which turn of that it is, and whether it is
        the last one.
    prompt_group
        The field of the *prompts* whose values the rows repeat in ``group``.
    n
        How many rows each prompt has, one after the other, where no field tells.
    pad
        The token id that pads prompts and responses.
    """

    prompt: str | None = None
    response: str | None = None
    whole: str | None = None
    attention: str | None = None
    prompt_mask: str | None = None
    mask: str | None = None
    log_probs: str | None = None
    reward: str | None = None
    group: str | None = None
    session: str | None = None
    turn: str | None = None
    last: str | None = None
    prompt_group: str | None = None
    n: int | None = None
    pad: int | None = None

    @classmethod
    def of(cls, names: Collection[str], given: Mapping[str, Any] | None = None) -> RowFields:
        """The description of rows with columns of these names.

        `given` are entries that are not as in :data:`CONVENTION`. Raises RowsError as `check` does.
        """
        given = given or {}
        check(given)
        usual = {
            what: next((name for name in likely if name in names), None)
            for what, likely in CONVENTION.items()
        }
        return cls(**{**usual, **given})

    def refuse_missing(self, names: Collection[str]) -> None:
        """Raise RowsError where it names a field that rows with fields of these names lack."""
        missing = [
            name
            for what in _KNOWN
            if isinstance(name := getattr(self, what), str) and what != "prompt_group"
            if name.split(".")[0] not in names
        ]
        if missing:
            raise RowsError(
                f"the stage's result has no field {', '.join(missing)}",
                "annotate(rows=...)",
                f"name some of its fields: {', '.join(sorted(names)) or 'it has none'}",
            )

    @classmethod
    def from_meta(cls, meta: Any) -> RowFields | None:
        """The description that a dump's meta records; None without one (`meta` may be None)."""
        found = getattr(meta, "info", {}).get("rows")
        if not isinstance(found, Mapping):
            return None
        return cls(**{what: found[what] for what in found if _fits(what, found[what])})

    def to_meta(self) -> dict[str, Any]:
        """What `info` of a dump's meta records of it."""
        return {"rows": attrs.asdict(self, filter=lambda _, value: value is not None)}


_NUMBERS = ("n", "pad")
_KNOWN = tuple(field.name for field in attrs.fields(RowFields))


def check(given: Mapping[str, Any], where: str = "annotate(rows=...)") -> None:
    """Raise RowsError where an entry of a description is unknown, or has no value of its type."""
    for what, value in given.items():
        if what not in _KNOWN:
            raise RowsError(f"there is no entry {what!r}", where, f"known: {', '.join(_KNOWN)}")
        if value is not None and not _fits(what, value):
            kind = "a whole number" if what in _NUMBERS else "the name of a field"
            raise RowsError(f"{what} is {value!r:.80}, not {kind}", where)


def _fits(what: str, value: Any) -> bool:
    if what in _NUMBERS:
        return type(value) is int and value >= (what == "n")
    return what in _KNOWN and isinstance(value, str) and bool(value)
