"""Prefix-aware merging: turns that continue one another become one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tensordict import TensorDictBase

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import MergeConfig
from rlskip.merge.chains import link
from rlskip.merge.generator_outputs import concatenate_generator_outputs
from rlskip.merge.layouts import fold_lists, fold_packed, list_rows, packed_rows
from rlskip.merge.merge_report import Break, MergeReport, report_on
from rlskip.merge.turns import MergeError, TrajectoryID, check_count, expect, naming_odd_tokens

__all__ = [
    "Break",
    "MergeError",
    "MergeReport",
    "TrajectoryID",
    "concatenate_generator_outputs",
    "merge",
    "merge_stepwise_output",
]


def merge(
    out: Any,
    config: Any,
    uids: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> tuple[Any, Sequence[str] | None, MergeReport]:
    """Merge the rows of a step; without ``merge.stepwise_output``, return them unchanged.

    Returns the batch, the uids of its rows, and the :class:`~rlskip.merge.MergeReport`.

    Parameters
    ----------
    out
        A GeneratorOutput (a dict of lists; see :func:`rlskip.merge.merge_stepwise_output`) or a
        TensorDict with jagged fields of the same names (see :mod:`rlskip.merge.layouts`).
    config
        A full config with a node `merge`, or a :class:`rlskip.MergeConfig`.
    uids
        The prompt of each row.
    tokenizer
        If given (it has a method ``decode``), the report shows differing tokens as text, too.

    Raises
    ------
    MergeError
        The rows cannot be merged; or, with `on_overlong` ``error``, a merge would be too long.
    ConfigError
        The config is invalid; the error names every problem.
    """
    config = read_node(MergeConfig, config)
    if not config.stepwise_output:
        return out, uids, MergeReport()
    packed = isinstance(out, TensorDictBase)
    with nullcontext() if packed else naming_odd_tokens(out):
        rows = packed_rows(out) if packed else list_rows(out)
        if uids is not None:
            is_sequence = isinstance(uids, Sequence) or bool(getattr(uids, "ndim", 0))
            expect(is_sequence, f"expected a sequence, got {type(uids).__name__}", "uids")
            check_count(len(uids), len(rows.prompts), "uids")
        linked = link(rows, config)
        chains = [chain for chains in linked for chain in chains]
        merged = (fold_packed if packed else fold_lists)(out, rows, chains)
        report = report_on(rows, linked, config.strategy, tokenizer)
    if uids is not None:
        uids = [uids[chain[-1]] for chain in chains]
    return merged, uids, report


def merge_stepwise_output(out: Mapping[str, Any]) -> dict[str, Any]:
    """Fold consecutive turns into one row wherever the later prompt continues the earlier row.

    This is SkyRL's rule (NovaSky-AI/SkyRL#1532), except that fields which SkyRL drops are kept. A
    field whose entries have a number for each token of their responses has 0 at observations; any
    other keeps the last turn's. A MergeError names the field and the row at fault.

    Parameters
    ----------
    out
        A step-wise GeneratorOutput: a dict of lists with one entry per turn; a trajectory's turns
        are consecutive and in order. Not changed, and shares no list with the result.
    """
    merged: dict[str, Any] = merge(out, MergeConfig(stepwise_output=True))[0]
    return merged
