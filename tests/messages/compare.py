"""Of records and their comparison: what cannot be recorded, and what cannot be compared."""

import logging
from pathlib import Path

import torch

from rlskip import record, stages
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Side, compare_sides, find_side
from rlskip.config.record import read_record
from rlskip.config.steps import Steps
from rlskip.runs.opened import NoSuchPlaceError


def recorded(folder, step=1, **values):
    """What a job recorded of these values at a step; `rows` is their batch."""
    rows = values.pop("rows", None)
    node = {"enable": True, "dump_dir": str(folder)}
    stages.start(read_record({"record": node}), lambda: step)
    for name, value in values.items():
        record(name, value, rows=rows)
    stages.stop()
    return folder / "stages" / "job"


def other_steps(folder):
    sides = (recorded(folder / name, step, loss=1.0) for name, step in (("a", 1), ("b", 2)))
    compare_sides(*map(Side, "ab", sides), Rounding(), Steps.parse("all"))


def find(folder, make=lambda folder: None):
    make(folder)
    find_side(str(folder), Path())


def gone(folder):
    (folder / "rlskip_summary.json").write_text('{"stages": "/gone/stages/job"}')


RECORDER, NOT_RECORDED = "rlskip.stages.recorder", "is NOT recorded, training goes on (said once)"
CASES = [
    (
        "no step",
        lambda folder: recorded(folder, step=None, loss=1.0),
        logging.WARNING,
        RECORDER,
        f"""\
rlskip: loss {NOT_RECORDED}: RecordError: no step was set
  -> call SkipManager.set_step before""",
    ),
    (
        "other rows",
        lambda folder: recorded(
            folder, advantages=torch.ones(3), rows={"responses": torch.ones(2, 4).long()}
        ),
        logging.WARNING,
        RECORDER,
        f"""\
rlskip: advantages {NOT_RECORDED}: RecordError: a value of shape [3] has no part for each of 2 rows
  -> give it 2 entries, or one for each of the 8 sampled tokens""",
    ),
    (
        "rows without tokens",
        lambda folder: recorded(folder, loss=torch.ones(2), rows={"score": torch.ones(2)}),
        logging.WARNING,
        RECORDER,
        f"""\
rlskip: loss {NOT_RECORDED}: RecordError: rlskip.record(rows=...): \
these rows have no field of tokens, only score
  -> give the batch with the tokens of its rows""",
    ),
    (
        "a mask of another length",
        lambda folder: recorded(
            folder,
            loss=torch.ones(2),
            rows={"responses": torch.ones(2, 4).long(), "response_mask": torch.ones(2, 3)},
        ),
        logging.WARNING,
        RECORDER,
        f"""\
rlskip: loss {NOT_RECORDED}: LengthError: rlskip.record(rows=...): \
response_mask has 3 values in row 0, and its response has 4 tokens, and 1 other rows do not fit, too
  -> give response_mask one value for each token, or None in a row without values""",
    ),
    (
        "an object",
        lambda folder: recorded(folder, loss=object()),
        logging.WARNING,
        RECORDER,
        f"""\
rlskip: loss {NOT_RECORDED}: RecordError: a value of type object cannot be recorded
  -> give a tensor or an array of numbers, a number, or a mapping of these""",
    ),
    (
        "nothing recorded",
        find,
        NoSuchPlaceError,
        "DIR",
        """\
DIR: no stages were recorded here
  -> record them: run the job again with +record=stages""",
    ),
    (
        "records that are gone",
        lambda folder: find(folder, gone),
        NoSuchPlaceError,
        "DIR",
        """\
DIR: the records of this job are gone
  -> they were in /gone/stages/job""",
    ),
    (
        "other steps",
        other_steps,
        NoSuchPlaceError,
        "a, b",
        "a, b: they have no common step: A has 1, B has 2",
    ),
]
