"""Of scoring again: what the function takes, what the run records, what is there already."""

from rlskip import cached_reward
from rlskip.errors import RlskipError
from rlskip.rescore.judge import Judge, RewardError
from rlskip.rescore.scoring import Rescoring
from rlskip.rescore.writing import RescoredRun, WriteError
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
    (
        "a function without a version",
        lambda folder: cached_reward(judge, directory=folder),
        RewardError,
        "rescore.judge",
        """\
rescore.judge: it has no version, so verdicts of its older code would count
  -> give one, another after each edit: rlskip.cached_reward(function, version="1")""",
    ),
    (
        "a function of something else",
        lambda folder: cached_reward(other, version="1", directory=folder),
        RewardError,
        "rescore.other",
        """\
rescore.other: its parameters are text
  -> it takes solution_str (one session, as verl calls it), solution_strs (all), or \
completions or completion_ids (as TRL does)""",
    ),
    (
        "a run without the ground truth",
        lambda folder: rescore(folder, {"uid": ["a"], "output": ["x"], "score": [1.0]}, "new"),
        RewardError,
        "step 3, group a",
        """\
step 3, group a: the function takes ground_truth, which the run does not record
  -> name the data set: --data FILE (the fields are output, score)""",
    ),
    (
        "a run without text",
        lambda folder: rescore(folder, {"responses": [[1]], "gts": ["x"], "uid": ["a"]}, "new"),
        RlskipError,
        "step 3, group a",
        """\
step 3, group a: its answer is not text, and there is no tokenizer
  -> name one: --tokenizer DIRECTORY""",
    ),
    (
        "a run without rewards",
        lambda folder: rescore(folder, TEXT, "new"),
        WriteError,
        "step 3",
        """\
step 3: the run records no rewards, because its trainer computes them later
  -> give the trainer the function as rlskip.cached_reward(function, version="1")""",
    ),
    (
        "a dump with other scores",
        lambda folder: rescore(folder, {**TEXT, "score": [0.0]}, "new", "new"),
        WriteError,
        "DIR/new/e_p/GBS1_N1_in1_out1/3",
        """\
DIR/new/e_p/GBS1_N1_in1_out1/3: the dump that is there has other rollouts or other scores
  -> write to another directory""",
    ),
]
