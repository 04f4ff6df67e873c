"""A reward function of two values, so that the groups of some prompts have no variance.

It writes a line to $REWARDED per call, if that is set.
"""

import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    score = float(sum(map(ord, solution_str)) % 2)
    if "REWARDED" in os.environ:
        with open(os.environ["REWARDED"], "a") as file:
            file.write(f"{(extra_info or {}).get('split')} {score}\n")
    return {"score": score, "acc": len(solution_str) % 2}
