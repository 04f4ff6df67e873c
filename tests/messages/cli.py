"""Of the command line: a step, a run, a limit or text that is missing."""

from rlskip.runs.find import find_target
from rlskip.runs.opened import Run
from rlskip.runs.tables import chats
from rlskip.store import StepStore


def select(folder, name="9", runs=1):
    """What `name` means where this many runs have the steps 1 and 2."""
    for number in range(runs):
        for step in (1, 2):
            StepStore(folder / f"e{number}_p" / "GBSany_Nany_inany_outany").save(step, "x")
    find_target(name, folder).dumps()


def read_field(folder, fields):
    run = folder / "e_p" / "GBS1_N1_in1_out1"
    StepStore(run).save(1, {"responses": [[1]], "score": [1.0]})
    list(Run(run).iter_rows(fields))


def export_chats(folder):
    run = folder / "e_p" / "GBS1_N1_in1_out1"
    StepStore(run).save(3, [{"uid": "a", "prompt_ids": [1], "completion_ids": [2]}])
    list(chats(Run(run).sessions()))


CASES = [
    ("a field that no row has", lambda folder: read_field(folder, ["reward", "socre"])),
    ("text without a tokenizer", lambda folder: read_field(folder, ["response_text"])),
    ("several runs", lambda folder: select(folder, "1", runs=2)),
    ("no text", export_chats),
]
