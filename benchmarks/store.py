"""Dump and load of a step next to verl's DataProto.save_to_disk / load_from_disk.

1024 rows of up to 1024 prompt and 4096 response tokens, 218 MB, in the fields that verl's
rollouts have. There are two workloads: *padded*, which looks like a real step, and *dense* (suffix
``_dense``), the hard case with no padding and ids uniform over the vocabulary.

hold   how long the training thread waits for a dump: verl's whole save, our writer's snapshot
save   until the dump is complete on disk (ours is also synced, verl's is not)
load   from a warm page cache to usable tensors; ours verifies checksums
bytes  on disk
save_vs_NAME, load_vs_NAME, bytes_vs_NAME  next to another container (benchmarks/containers.py) for
       the arrays alone
record_hold_ratio  how long the training thread waits while ten stages of a step are recorded, each
        float32 of 1024 rows and 8192 tokens (335 MB), next to verl's dump of the same values
many_calls_us  replaying one of 10 000 calls of a step, next to one of 100, in microseconds
many_calls_us_verl  replaying one of 200 steps of 8 short rows, a DataProto each, next to verl's own
       SkipManager, which compares no prompts and verifies nothing

Needs verl from PyPI in the same environment: pip install verl==0.9.1. verl is imported without its
plug-ins: rlskip's would replace its SkipManager.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks import containers
from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip import SkipManager
from rlskip.config.other_nodes import RecordConfig
from rlskip.config.steps import Steps
from rlskip.hosts.verl.handshake import PLUGINS_VARIABLE
from rlskip.stages.recorder import Recorder
from rlskip.store import StepStore
from rlskip.store.writer import Writer

ROWS, PROMPT, RESPONSE, VOCABULARY = 1024, 1024, 4096, 151_936


def rollouts(dense: bool, rows: int = ROWS) -> Any:
    """Return the workload as a verl DataProto, from a fixed seed."""
    from verl.protocol import DataProto

    rng = np.random.default_rng(0)
    if dense:
        prompt_len, response_len = np.full(rows, PROMPT), np.full(rows, RESPONSE)
    else:
        prompt_len = rng.integers(64, PROMPT, rows, endpoint=True)
        response_len = np.clip(rng.lognormal(np.log(1200), 0.8, rows).astype(int), 1, RESPONSE)
    real_prompt = np.arange(PROMPT) >= (PROMPT - prompt_len)[:, None]
    real_response = np.arange(RESPONSE) < response_len[:, None]

    def ids(real: np.ndarray) -> np.ndarray:
        if dense:
            return rng.integers(0, VOCABULARY, real.shape)
        return np.asarray(np.minimum(rng.zipf(1.2, real.shape) - 1, VOCABULARY - 1) * real)

    prompts, responses = ids(real_prompt), ids(real_response)
    mask = np.concatenate([real_prompt, real_response], axis=1)
    log_probs = -rng.exponential(0.5, real_response.shape) * real_response
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": mask.astype(np.int64),
        "position_ids": np.clip(mask.cumsum(axis=1) - 1, 0, None),
        "response_mask": real_response.astype(np.int64),
        "rollout_log_probs": log_probs.astype(np.float32),
    }
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(value) for name, value in tensors.items()},
        non_tensors={"uid": np.array([f"{i // 8:032x}" for i in range(rows)], dtype=object)},
    )


def measure(dense: bool, rounds: int, folder: Path) -> list[Row]:
    """Measure the rows of one workload."""
    from verl.protocol import DataProto

    batch = rollouts(dense)
    pickled = folder / "verl.dp"
    store = StepStore(folder / "ours", keep_last=2)
    writer = Writer(store)
    steps = itertools.count()

    # The skip role waits for the previous step's write in the same way before each step.
    (hold,) = in_turns(rounds, lambda: writer.save(next(steps), batch), between=writer.wait)
    their_save, save = in_turns(
        rounds,
        lambda: batch.save_to_disk(pickled),
        lambda: store.save(next(steps), batch),
    )
    step = store.steps()[-1]

    their_load, load = in_turns(
        rounds, lambda: DataProto.load_from_disk(pickled), lambda: store.load(step)
    )
    check(store.load(step), batch)
    meta = store.read_meta(step)
    assert meta is not None
    suffix = "_dense" if dense else ""
    less = 1 / 5 if dense else 1 / 12
    return [
        Row(f"hold_ratio{suffix}", hold, "s", their_save, Goal("<=", 1 / 15)),
        Row(f"save_ratio{suffix}", save, "s", their_save, Goal("<=", 1 / 4)),
        Row(f"load_ratio{suffix}", load, "s", their_load, Goal("<=", 1 / 7)),
        Row(
            f"bytes_ratio{suffix}",
            meta.stored / 1e6,
            "MB",
            pickled.stat().st_size / 1e6,
            Goal("<=", less),
        ),
        *compared(batch, store, step, rounds, folder, suffix),
    ]


def compared(
    batch: Any, store: StepStore, step: int, rounds: int, folder: Path, suffix: str
) -> list[Row]:
    """Measure other containers beside ours, in one process and in turns."""
    arrays = [tensor.numpy().reshape(-1) for tensor in batch.batch.values()]
    steps = itertools.count(step + 1)
    rows = []
    for name, (write, read) in containers.known().items():
        file = folder / name
        save, other_save = in_turns(
            rounds,
            lambda: store.save(next(steps), batch),
            functools.partial(write, file, arrays),
        )
        last = store.steps()[-1]
        load, other_load = in_turns(
            rounds, functools.partial(store.load, last), functools.partial(read, file, arrays)
        )
        for found, array in zip(read(file, arrays), arrays, strict=True):
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)
        meta = store.read_meta(last)
        assert meta is not None
        size = file.stat().st_size / 1e6
        rows += [
            Row(f"save_vs_{name}{suffix}", save, "s", other_save),
            Row(f"load_vs_{name}{suffix}", load, "s", other_load),
            Row(f"bytes_vs_{name}{suffix}", meta.stored / 1e6, "MB", size),
        ]
    return rows


def recording(folder: Path, rounds: int, rows: int = ROWS, width: int = 8192) -> Row:
    """Measure how long recording a step's stages holds the thread."""
    from verl.protocol import DataProto

    made = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=made)
    mask = (torch.arange(width) < lengths).long()
    batch = {
        "prompts": torch.randint(0, VOCABULARY, (rows, 256), generator=made),
        "responses": torch.randint(0, VOCABULARY, (rows, width), generator=made) * mask,
        "response_mask": mask,
    }
    values = {f"stage{i}": torch.randn(rows, width, generator=made) * mask for i in range(10)}
    theirs = DataProto.from_dict(tensors=values)
    step = itertools.count(1)
    settings = RecordConfig(
        enable=True, stages=["*"], steps=Steps.parse("all", ""), keep_last=2, dump_dir=str(folder)
    )
    now = [0]
    recorder = Recorder(settings, lambda: now[0])

    def ours() -> None:
        now[0] = next(step)
        fresh = {name: column.clone() for name, column in batch.items()}  # as each step has
        start.append(time.perf_counter())
        for name, value in values.items():
            recorder.record(name, value, fresh)
        held.append(time.perf_counter() - start[-1])

    start: list[float] = []
    held: list[float] = []
    peer = in_turns(rounds, lambda: theirs.save_to_disk(folder / "verl.dp"))[0]
    for _ in range(rounds):
        ours()
        recorder.flush()
    return Row("record_hold_ratio", min(held), "s", peer, Goal("<=", 1 / 15))


def many_calls(folder: Path, few: int = 100, many: int = 10_000) -> Row:
    """Measure what replaying a call costs in a step of few calls and in one of many."""

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> list[int]:
        return prompts

    def seconds(n: int, rounds: int) -> float:
        skip = {"dump_dir": str(folder / str(n)), "wait_s": 0, "rollout": {"enable": True}}
        took = []
        # The first round dumps; only the replays after it are measured.
        for syncs in (lambda handle: None, *[os.fsync] * rounds):
            SkipManager.init({"skip": skip})
            SkipManager.set_step(1)
            with mock.patch("os.fsync", syncs):
                took += best_of(1, lambda: [generate([call]) for call in range(n)])
        SkipManager.reset()
        return min(took[1:]) / n

    ours, peer = seconds(many, 2), seconds(few, 5)
    return Row("many_calls_us", ours * 1e6, "us", peer * 1e6, Goal("<=", 2))


def replaying(folder: Path, rounds: int, steps: int = 200) -> Row:
    """Measure what replaying a small step costs with our manager and with verl's."""
    from verl.protocol import DataProto
    from verl.utils.skip import SkipManager as VerlSkipManager

    tensors = {"input_ids": torch.arange(128).reshape(8, 16)}
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    uids = {"uid": np.array([f"{i:08x}" for i in range(8)], dtype=object)}
    prompts = DataProto.from_dict(tensors=tensors, non_tensors=uids)
    managers = [SkipManager, VerlSkipManager]
    assert VerlSkipManager is not SkipManager, "verl's manager is replaced by rlskip's"

    def replay(manager: Any, generate: Callable[[Any], Any], place: str) -> None:
        role = {"enable": True, "steps": [*range(steps)], "dump_dir": place, "action": "cache"}
        trainer = {"v1": {"trainer_mode": "colocate_sync"}}
        manager.init(OmegaConf.create({"skip": {"rollout": role}, "trainer": trainer, "data": {}}))
        began = time.perf_counter()
        for step in range(steps):
            manager.set_step(step)
            generate(prompts)
        took.append(time.perf_counter() - began)

    best = []
    stages = [manager.annotate(role="rollout")(lambda prompts: prompts) for manager in managers]
    for _ in range(1 + rounds):  # the first one dumps
        took: list[float] = []
        for manager, stage in zip(managers, stages, strict=True):
            with contextlib.redirect_stdout(io.StringIO()):  # verl's prints a line a step
                replay(manager, stage, str(folder / manager.__module__))
        best.append(took)
    SkipManager.reset()
    ours, peer = (min(figures) / steps * 1e6 for figures in zip(*best[1:], strict=True))
    return Row("many_calls_us_verl", ours, "us", peer, Goal("<=", 0.7))


def in_turns(
    rounds: int, *functions: Callable[[], Any], between: Callable[[], Any] = gc.collect
) -> list[float]:
    """Return the best wall time of each; results are freed between calls, untimed."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            kept: list[Any] = []
            (seconds,) = best_of(1, lambda f=function, k=kept: k.append(f()))  # type: ignore[misc]
            best[i] = min(best[i], seconds)
            kept.clear()
            between()
    return best


def check(loaded: Any, batch: Any) -> None:
    """Check that every bit came back; otherwise the figures mean nothing."""
    for name, tensor in batch.batch.items():
        assert loaded.batch[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.batch[name], tensor), name
    assert (loaded.non_tensor_batch["uid"] == batch.non_tensor_batch["uid"]).all()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to dump (default: the temporary one)")
    options = parser.parse_args()
    os.environ[PLUGINS_VARIABLE] = "none"
    rows = []
    for dense in (False, True):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows += measure(dense, options.rounds, Path(folder))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        rows += [recording(place, options.rounds), many_calls(place)]
        rows.append(replaying(place, options.rounds))
    report(rows, versions("verl", "tensordict", "blosc2", "xxhash"), options.json)


if __name__ == "__main__":
    main()
