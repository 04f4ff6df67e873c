"""A reward function with ties: all answers to a question get the same, unless it is one of $DIFFER.

DIFFER="8:0,2" stands for the questions whose number modulo 8 is 0 or 2.
"""

import hashlib
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    modulus, _, kept = os.environ["DIFFER"].partition(":")
    if str(extra_info["index"] % int(modulus)) not in kept.split(","):
        return {"score": 0.5}
    digest = hashlib.sha256(solution_str.encode(errors="replace")).digest()
    return {"score": int.from_bytes(digest[:4], "little") / 2**32}
