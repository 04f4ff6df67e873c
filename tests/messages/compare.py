"""Of records and their comparison: what cannot be recorded, and what cannot be compared."""

import logging
from pathlib import Path

import torch

from rlskip import record, stages
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Side, compare_sides, find_side
from rlskip.config.nodes import read_record
from rlskip.config.steps import Steps


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


RECORDER = "rlskip.stages.recorder"
CASES = [
    ("no step", lambda folder: recorded(folder, step=None, loss=1.0), logging.WARNING, RECORDER),
    (
        "a mask of another length",
        lambda folder: recorded(
            folder,
            loss=torch.ones(2),
            rows={"responses": torch.ones(2, 4).long(), "response_mask": torch.ones(2, 3)},
        ),
        logging.WARNING,
        RECORDER,
    ),
    ("nothing recorded", find),
    ("records that are gone", lambda folder: find(folder, gone)),
    ("other steps", other_steps),
]
