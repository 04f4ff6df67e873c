"""One call for a trainer: a batch of either kind in, the same kind with fewer rows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase

from rlskip.merge.chains import link
from rlskip.merge.packed import fold_packed, packed_rows
from rlskip.merge.report import MergeReport, Tokenizer, report_on
from rlskip.merge.rows import check_count
from rlskip.merge.stepwise import fold_lists, list_rows


class MergeOptions(Protocol):
    """What :func:`merge` reads of a config; :class:`rlskip.MergeConfig` has it."""

    stepwise_output: bool
    strategy: str
    max_seq_len: int | None
    on_overlong: str


def merge(
    out: Any,
    config: MergeOptions,
    uids: Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Any, Sequence[str] | None, MergeReport]:
    """Merge a step's rows as `config` says, or hand them back untouched when it says off.

    Parameters
    ----------
    out
        A GeneratorOutput (a dict of lists; see :func:`rlskip.merge.merge_stepwise_output`) or a
        TensorDict with jagged fields of the same names (see :mod:`rlskip.merge.packed`).
    uids
        The prompt of each row.
    tokenizer
        Given, the report shows in text what differed where merging stopped.

    Returns
    -------
    tuple
        The batch, the uids of its rows, and the :class:`~rlskip.merge.MergeReport`.

    Raises
    ------
    MergeError
        The rows cannot be merged; or, with `on_overlong` ``error``, a merge would be too long.
    ConfigError
        A strategy that does not exist.
    """
    if not config.stepwise_output:
        return out, uids, MergeReport()
    packed = isinstance(out, TensorDictBase)
    rows = packed_rows(out) if packed else list_rows(out)
    linked = link(rows, config.strategy, config.max_seq_len, config.on_overlong)
    chains = [chain for chains in linked for chain in chains]
    merged = (fold_packed if packed else fold_lists)(out, rows, chains)
    if uids is not None:
        check_count(len(uids), len(rows.prompts), "uids")
        uids = [uids[chain[-1]] for chain in chains]
    return merged, uids, report_on(rows, linked, config.strategy, tokenizer)
