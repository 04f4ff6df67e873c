"""Prefix-aware merging and packing: each token trained once, and each shared one computed once."""

from rlskip.merge.concat import concatenate_generator_outputs
from rlskip.merge.merge_report import Break, MergeReport
from rlskip.merge.merging import merge, merge_stepwise_output
from rlskip.merge.packed_forward import PackingError, packed_forward, refuse_inexact
from rlskip.merge.packing import Pack, pack
from rlskip.merge.turns import MergeError, TrajectoryID

__all__ = [
    "Break",
    "MergeError",
    "MergeReport",
    "Pack",
    "PackingError",
    "TrajectoryID",
    "concatenate_generator_outputs",
    "merge",
    "merge_stepwise_output",
    "pack",
    "packed_forward",
    "refuse_inexact",
]
