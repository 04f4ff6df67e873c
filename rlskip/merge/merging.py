"""Merge a trainer's batch, of lists or packed, as its config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tensordict import TensorDictBase

from rlskip.config.merge import MergeConfig, read_merge
from rlskip.merge.chains import link
from rlskip.merge.checks import check_count, naming_odd_tokens
from rlskip.merge.lists import fold_lists, list_rows
from rlskip.merge.merge_report import MergeReport, Tokenizer, report_on
from rlskip.merge.packed import fold_packed, packed_rows
from rlskip.merge.turns import MergeError


def merge(
    out: Any,
    config: Any,
    uids: Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Any, Sequence[str] | None, MergeReport]:
    """Merge the rows of a step; without ``merge.stepwise_output``, return them unchanged.

    Parameters
    ----------
    out
        A GeneratorOutput (a dict of lists; see :func:`rlskip.merge.merge_stepwise_output`) or a
        TensorDict with jagged fields of the same names (see :mod:`rlskip.merge.packed`).
    config
        A full config with a node `merge`, or a :class:`rlskip.MergeConfig`.
    uids
        The prompt of each row.
    tokenizer
        If given, the report shows differing tokens as text, too.

    Returns
    -------
    tuple
        The batch, the uids of its rows, and the :class:`~rlskip.merge.MergeReport`.

    Raises
    ------
    MergeError
        The rows cannot be merged; or, with `on_overlong` ``error``, a merge would be too long.
    ConfigError
        The config is invalid; the error names every problem.
    """
    config = read_merge(config)
    if not config.stepwise_output:
        return out, uids, MergeReport()
    packed = isinstance(out, TensorDictBase)
    rows = packed_rows(out) if packed else list_rows(out)
    if uids is not None:
        if not (isinstance(uids, Sequence) or getattr(uids, "ndim", 0)):
            raise MergeError(f"expected a sequence, got {type(uids).__name__}", "uids")
        check_count(len(uids), len(rows.prompts), "uids")
    with nullcontext() if packed else naming_odd_tokens(out):
        linked = link(rows, config.strategy, config.max_seq_len, config.on_overlong)
        chains = [chain for chains in linked for chain in chains]
        merged = (fold_packed if packed else fold_lists)(out, rows, chains)
        report = report_on(rows, linked, config.strategy, tokenizer)
    if uids is not None:
        uids = [uids[chain[-1]] for chain in chains]
    return merged, uids, report


def merge_stepwise_output(out: Mapping[str, Any]) -> dict[str, Any]:
    """Fold consecutive turns into one row wherever the later prompt continues the earlier row.

    Turn i+1 joins turn i if turn i, prompt and response, is a prefix of the prompt of turn i+1.
    The merged row has the first turn's prompt. Its response consists of all responses with the
    observations between them; observations get loss mask 0, reward 0, log-prob 0, and 0 in any
    extra field whose entries are lists or tuples of numbers, arrays or tensors, all as long as
    their responses. A field with one value per row (`stop_reasons`, `is_last_step`, a reward per
    row, any other field) keeps the last turn's. This is SkyRL's rule (NovaSky-AI/SkyRL#1532),
    except that fields which SkyRL drops are kept.

    Parameters
    ----------
    out
        A step-wise GeneratorOutput: a dict of lists with one entry per turn; a trajectory's turns
        are consecutive and in order. Not changed, and shares no list with the result.

    Returns
    -------
    dict
        The same fields, with one entry per merged row.

    Raises
    ------
    MergeError
        A field is missing, has an odd type or the wrong length, or cannot be merged; the error
        names the field and the row.
    """
    merged: dict[str, Any] = merge(out, MergeConfig(stepwise_output=True))[0]
    return merged
