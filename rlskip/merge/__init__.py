"""Prefix-aware merging: turns that continue one another become one row."""

from rlskip.merge.generator_outputs import concatenate_generator_outputs
from rlskip.merge.merge_report import Break, MergeReport
from rlskip.merge.merging import merge, merge_stepwise_output
from rlskip.merge.turns import MergeError, TrajectoryID

__all__ = [
    "Break",
    "MergeError",
    "MergeReport",
    "TrajectoryID",
    "concatenate_generator_outputs",
    "merge",
    "merge_stepwise_output",
]
