"""What ReMax of verl 0.7.1 needs beside rlskip: an engine that stays awake, and a silent reward.

It puts its engines to sleep and generates the baselines after that, which works where the engine
ignores the former, as vLLM does under ``free_cache_engine=False``. VERLCPU_EXTRA_MODULES loads this
module, so that the harness's token server does, too. And it cannot unite the answers' batch with
the baselines' if the reward function returned more than the score.
"""

import os

from verlcpu.postimport import after_import


async def _stay_awake(self):
    pass


def _patch(module):
    module.RolloutReplica.sleep = _stay_awake


after_import("verl.workers.rollout.replica", _patch)


class _Score(dict):
    def items(self):
        return ()


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    if "REWARDED" in os.environ:
        with open(os.environ["REWARDED"], "a") as file:
            file.write(f"{(extra_info or {}).get('split')}\n")
    return _Score(score=sum(ord(c) % 10 for c in solution_str) / (10 * (len(solution_str) or 1)))
