"""The readers of foreign files: damage, archives that torch.save does not write, small bombs."""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.pickles import read_data_proto, read_queue_batch
from tests.interop.crafting import proto, saved


def batch(rows: int = 3, tags: int = 3, keys: int = 3) -> dict[str, Any]:
    fields = TensorDict({"x": torch.arange(rows)}, [rows])
    return {"tensordict": fields, "tags": [{}] * tags, "keys": ["u_0_0"] * keys}


@pytest.mark.parametrize("more", ["rows", "tags", "keys"])
def test_rows_tags_and_keys_of_a_queue_batch_are_as_many(tmp_path: Path, more: str) -> None:
    counts = {"rows": 2, "tags": 2, "keys": 2, more: 3}
    (tmp_path / "tq_batch.pt").write_bytes(saved(batch(**counts)))
    with pytest.raises(ForeignDumpError, match="differ in number"):
        read_queue_batch(tmp_path / "tq_batch.pt")


def test_scripted_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tq_batch.pt"
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(file))
    with pytest.raises(ForeignDumpError, match="holds code"):
        read_queue_batch(file)


FORMS = {
    "as torch.save writes it": None,
    "compressed": "a form that torch.save does not write",
    "with a record twice": "a form that torch.save does not write",
    "with false sizes": "a form that torch.save does not write",
    "big-endian": "another byte order",
    "with a record cut short": "a storage of another size than its record",
    "with a short record": "a storage of another size than its record",
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("form", FORMS)
def test_an_archive_has_the_form_that_torch_writes(tmp_path: Path, form: str) -> None:
    written = io.BytesIO()
    data = saved(batch())
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(written, "w") as new:
        compression = zipfile.ZIP_DEFLATED if form == "compressed" else zipfile.ZIP_STORED
        for name in [*old.namelist(), *old.namelist()[: form == "with a record twice"]]:
            content = old.read(name)
            if form == "big-endian" and name.endswith("byteorder"):
                content = b"big"
            cut = form in ("with a record cut short", "with a short record")
            new.writestr(name, content[:8] if cut and "data/" in name else content, compression)
            if form != "with a short record":
                new.infolist()[-1].file_size = len(content)
        if form == "with false sizes":
            new.infolist()[-1].file_size = 1 << 20
        new.comment = bytes(60_000)  # so that the file is larger than its content
    file = tmp_path / "tq_batch.pt"
    file.write_bytes(written.getvalue())
    refused = FORMS[form]
    with pytest.raises(ForeignDumpError, match=refused) if refused else contextlib.nullcontext():
        read_queue_batch(file)


def mutated(data: bytes, random: random.Random) -> bytes:
    """`data` with a few bytes changed, removed, repeated, or made an opcode of pickle; or torn."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(made))
        part = made[at : at + random.randint(1, 40)]
        change = random.randrange(5)
        if change == 0:
            made[at] ^= 1 << random.randrange(8)
        elif change == 1:
            made[at] = random.choice(b"Rb}](.0123QstuaehjqrG\x81\x85\x86\x8f\x90\x92\x93\x94")
        elif change == 2:
            del made[at : at + len(part)]
        elif change == 3:
            return bytes(made[:at])  # torn
        else:
            made[random.randrange(len(made)) : 0] = part * random.randint(1, 3)
    return bytes(made)


@pytest.mark.parametrize(
    "files", [300, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_any_file_is_read_or_refused_by_name(verl_files: Path, tmp_path: Path, files: int) -> None:
    generator = random.Random(files)
    samples = [*sorted(verl_files.glob("*.dp")), verl_files / "verl-0.9.1-queue.pt"]
    refused = 0
    for i in range(files):
        sample = samples[i % len(samples)]
        file = tmp_path / "file"
        file.write_bytes(mutated(sample.read_bytes(), generator))
        read = read_data_proto if sample.suffix == ".dp" else read_queue_batch
        began = time.process_time()
        try:
            read(file)
        except ForeignDumpError:
            refused += 1
        assert time.process_time() - began < 10
    assert 0.2 * files < refused < files


def _branches(n: int) -> dict[str, Any]:
    """A trace of `n` messages, one after the other, and `n` that follow the last of them."""
    message = {"role": "user", "content": "a"}
    parents = [None, *range(n - 1), *[n - 1] * n]
    return {"traces": [{"nodes": [{"parent": at, "message": message} for at in parents]}]}


_ONE = {"tokens": list(range(5000)), "response_length": 2}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("7.pt", {"rollout_id": 7, "samples": [_ONE] * 5000}),
        ("7.pt", {"rollout_id": 7, "samples": [{f"k{i}": 0} for i in range(20_000)]}),
        ("7_0.pt", {"rollout_id": 7, "rank": 0, "rollout_data": {"tokens": [_ONE] * 5000}}),
        ("gen_batch.dp", (None, {"x": np.array(["x" * 50_000] * 5000, object)}, {})),
        ("traces.jsonl", _branches(3000)),
    ],
    ids=["samples", "columns", "train", "verl", "traces"],
)
def test_a_small_file_does_not_become_a_large_dump(
    rlskip: Any, tmp_path: Path, name: str, content: Any
) -> None:
    """What it names many times would be copied as often."""
    file = tmp_path / name
    if isinstance(content, tuple):
        file.write_bytes(proto(content))
    elif name.endswith(".jsonl"):
        file.write_text(json.dumps(content))
    else:
        torch.save(content, file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = ("--run", "e_p/GBS1_N2_in1_out4", "--trust-pickle")
    done = rlskip("import", file, "-d", tmp_path / "in", "--step", 7, *run)
    assert (done.code, "more than 1024 times the file's" in done.err) == (2, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"
