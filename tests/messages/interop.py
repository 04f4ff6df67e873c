"""Of verl's files: names that no rollouts need, and what is no dump."""

import os
import pickle

import torch

from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.pickles import read_data_proto, read_queue_batch


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


CASES = [
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
