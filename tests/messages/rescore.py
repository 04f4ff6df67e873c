"""Of scoring again: what the function takes, and what the run records."""

from rlskip import cached_reward
from rlskip.rescore.judge import Judge
from rlskip.rescore.scoring import rescore as score_again
from rlskip.runs.opened import Run
from rlskip.store import StepStore


def judge(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def other(text):
    return 0.0


def of_trl(completions):
    return [0.0] * len(completions)


def rescore(folder, columns, judge=judge):
    run = Run(folder / "e_p" / "GBS1_N1_in1_out1")
    StepStore(run.directory).save(3, columns)
    score_again(Judge(judge, folder / "verdicts", version="1"), [run])


CASES = [
    ("a function without a version", lambda folder: cached_reward(judge, directory=folder)),
    (
        "a function of something else",
        lambda folder: cached_reward(other, version="1", directory=folder),
    ),
    (
        "a run without the ground truth",
        lambda folder: rescore(folder, {"uid": ["a"], "output": ["x"], "score": [1.0]}),
    ),
    (
        "a run without text",
        lambda folder: rescore(folder, {"responses": [[1]], "gts": ["x"], "uid": ["a"]}),
    ),
    (
        "a run of fields with other names",
        lambda folder: rescore(folder, {"said": ["x"], "uid": ["a"]}, of_trl),
    ),
]
