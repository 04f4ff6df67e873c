"""A reward function that writes a line to $REWARDED per call; verl loads it by its path.

A line is the split and the names of all that it is told of the session.
"""

import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    with open(os.environ["REWARDED"], "a") as file:
        told = extra_info or {}
        file.write(f"{told.get('split')} {','.join(sorted(told))}\n")
    n = len(solution_str) or 1
    score = sum(ord(c) % 10 for c in solution_str) / (10 * n)
    return {"score": score, "n_chars": len(solution_str)}
