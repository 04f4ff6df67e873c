"""Of merging: fields that do not fit together."""

from rlskip.merge import merge_stepwise_output
from tests.merge.batches import turns


def merge(**change):
    two = turns(([1], [2]), ([1, 2], [3]))
    merge_stepwise_output({**two, "trajectory_ids": ["a", "a"], **change})


CASES = [
    ("a last turn that is not the last", lambda _: merge(is_last_step=[True, True])),
    ("a mask of another length", lambda _: merge(loss_masks=[[1], [1, 1]])),
    (
        "a field that has no place in a merged row",  # in SkyRL's words, which its users look for
        lambda _: merge(pixel_values=[1, 2]),
    ),
]
