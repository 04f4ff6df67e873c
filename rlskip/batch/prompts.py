"""The uids of a batch of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlskip.batch.columns import UIDS, cells_of, columns_of
from rlskip.batch.meta import plain
from rlskip.errors import RlskipError


class PromptsError(RlskipError, ValueError):
    """Prompts that cannot be distinguished."""


def uids_of(prompts: Any) -> list[str]:
    """The prompts' uids, in order.

    Raises
    ------
    PromptsError
        There is not one uid for each prompt, or a uid occurs twice.
    """
    uids = cells_of(_uid_column(prompts))
    if uids is None:
        raise PromptsError(
            f"these prompts have no uids (they are a {type(prompts).__name__})",
            remedy="give them a field `uid`, one for each; or name the argument that holds the "
            "prompts: annotate(prompts=...)",
        )
    uids = named(uids)
    if len(set(uids)) < len(uids):
        twice = sorted({uid for uid in uids if uids.count(uid) > 1})
        raise PromptsError(f"uids given twice: {', '.join(twice)}", remedy="submit each once")
    return uids


def named(uids: Iterable[Any]) -> list[str]:
    """Uids as queues and dumps name them: numbers, tensors and the like as text."""
    return [str(plain(uid)) for uid in uids]


def first_uid(values: Iterable[Any]) -> str | None:
    """The first row's uid of the first of `values` that is a batch with uids."""
    for value in values:
        uids = plain(_uid_column(value))
        if uids is not None:
            return uids if isinstance(uids, str) else str(next(iter(uids), None))
    return None


def _uid_column(prompts: Any) -> Any:
    columns = columns_of(prompts)
    return next((columns[name] for name in UIDS if name in columns), None)
