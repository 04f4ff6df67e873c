"""Of scoring again: what the function takes, what the run records, what is there already."""

from rlskip import cached_reward
from rlskip.rescore.judge import Judge
from rlskip.rescore.scoring import Rescoring
from rlskip.rescore.writing import RescoredRun
from rlskip.runs.opened import Run
from rlskip.store import StepStore


def judge(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def other(text):
    return 0.0


def rescore(folder, columns, *outs):
    run = Run(folder / "e_p" / "GBS1_N1_in1_out1")
    StepStore(run.directory).save(3, columns)
    asked = Judge(judge, folder / "verdicts", version="1")
    for repeat in range(1, len(outs) + 1):
        out = RescoredRun(folder / outs[repeat - 1], asked, repeat)
        Rescoring(asked, repeat=repeat, out=out).run([run])


TEXT = {"uid": ["a"], "output": ["x"], "gts": ["x"]}

CASES = [
    ("a function without a version", lambda folder: cached_reward(judge, directory=folder)),
    (
        "a function of something else",
        lambda folder: cached_reward(other, version="1", directory=folder),
    ),
    (
        "a run without the ground truth",
        lambda folder: rescore(folder, {"uid": ["a"], "output": ["x"], "score": [1.0]}, "new"),
    ),
    (
        "a run without text",
        lambda folder: rescore(folder, {"responses": [[1]], "gts": ["x"], "uid": ["a"]}, "new"),
    ),
    ("a run without rewards", lambda folder: rescore(folder, TEXT, "new")),
    (
        "a dump with other scores",
        lambda folder: rescore(folder, {**TEXT, "score": [0.0]}, "new", "new"),
    ),
]
