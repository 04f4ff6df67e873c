"""Of other programs' files: names that no rollouts need, what is no dump, what has no text."""

import os
import pickle

import torch

from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.content import Into
from rlskip.interop.exports import chats
from rlskip.interop.imports import find, import_files
from rlskip.interop.pickles import read_data_proto, read_queue_batch
from rlskip.interop.to_verl import ExportError
from rlskip.runs.opened import Run
from rlskip.store import StepStore


class Call:
    def __reduce__(self):
        return os.getenv, ("x",)


def read(folder, value):
    file = folder / "gen_batch.dp"
    file.write_bytes(pickle.dumps(value))
    read_data_proto(file)


def read_queue(folder, value):
    torch.save(value, folder / "tq_batch.pt")
    read_queue_batch(folder / "tq_batch.pt")


def read_samples(folder, name, value):
    file = folder / name
    torch.save(value, file) if name.endswith(".pt") else file.write_text(value)
    list(import_files(find(file, None), Into(folder / "in", "a")))


def export_chats(folder):
    run = folder / "e_p" / "GBS1_N1_in1_out1"
    StepStore(run).save(3, [{"uid": "a", "prompt_ids": [1], "completion_ids": [2]}])
    list(chats(Run(run)))


CASES = [
    (
        "an archive without samples of slime",
        lambda folder: read_samples(folder, "a.pt", {"rollout_id": 1, "data": {}}),
        ForeignDumpError,
        "DIR/a.pt",
        """\
DIR/a.pt: it does not hold samples of slime or miles
  -> give a file of --save-debug-rollout-data or --save-debug-train-data""",
    ),
    (
        "samples of no step",
        lambda folder: read_samples(folder, "a.pt", {"samples": []}),
        ForeignDumpError,
        "DIR/a.pt",
        """\
DIR/a.pt: neither it nor its name tells the step
  -> give it with --step""",
    ),
    (
        "a line that is not JSON",
        lambda folder: read_samples(folder, "1.jsonl", "{"),
        ForeignDumpError,
        "DIR/1.jsonl",
        "DIR/1.jsonl: line 1 is not JSON",
    ),
    (
        "no text",
        export_chats,
        ExportError,
        "3-a-0",
        """\
3-a-0: it records no chat messages, and token ids are not text
  -> give the tokenizer: --tokenizer DIRECTORY""",
    ),
    (
        "a function",
        lambda folder: read(folder, Call()),
        ForeignDumpError,
        "DIR/gen_batch.dp",
        """\
DIR/gen_batch.dp: it names os.getenv, which no dump of rollouts needs: nothing of it was run
  -> if you wrote this file yourself, drop that field and dump again""",
    ),
    (
        "no DataProto",
        lambda folder: read(folder, {"a": 1}),
        ForeignDumpError,
        "DIR/gen_batch.dp",
        "DIR/gen_batch.dp: it is a pickle, but not of a DataProto",
    ),
    (
        "no batch of a queue",
        lambda folder: read_queue(folder, {"a": 1}),
        ForeignDumpError,
        "DIR/tq_batch.pt",
        "DIR/tq_batch.pt: it does not hold a sampled batch of a queue",
    ),
]
