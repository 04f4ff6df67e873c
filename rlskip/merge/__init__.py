"""Prefix-aware merging: the turns of a trajectory as few rows, each sampled token trained once."""

from rlskip.merge.batch import merge
from rlskip.merge.concat import concatenate_generator_outputs
from rlskip.merge.report import Break, MergeReport
from rlskip.merge.rows import MergeError, TrajectoryID
from rlskip.merge.stepwise import merge_stepwise_output

__all__ = [
    "Break",
    "MergeError",
    "MergeReport",
    "TrajectoryID",
    "concatenate_generator_outputs",
    "merge",
    "merge_stepwise_output",
]
