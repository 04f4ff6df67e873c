"""Of merging: fields that do not fit together."""

from rlskip.merge import merge_stepwise_output


def merge(**change):
    turns = {
        "prompt_token_ids": [[1], [1, 2]],
        "response_ids": [[2], [3]],
        "rewards": [[0.0], [1.0]],
        "loss_masks": [[1], [1]],
        "stop_reasons": None,
        "rollout_logprobs": None,
        "trajectory_ids": ["a", "a"],
        "is_last_step": [False, True],
    }
    merge_stepwise_output({**turns, **change})


CASES = [
    ("a last turn that is not the last", lambda _: merge(is_last_step=[True, True])),
    ("a mask of another length", lambda _: merge(loss_masks=[[1], [1, 1]])),
    (
        "a field that has no place in a merged row",  # in SkyRL's words, which its users look for
        lambda _: merge(pixel_values=[1, 2]),
    ),
]
