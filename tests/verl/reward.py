"""A reward function that writes a line to $REWARDED per call; verl loads it by its path."""

import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    with open(os.environ["REWARDED"], "a") as file:
        file.write(f"{(extra_info or {}).get('split')}\n")
    n = len(solution_str) or 1
    score = sum(ord(c) % 10 for c in solution_str) / (10 * n)
    return {"score": score, "n_chars": len(solution_str)}
