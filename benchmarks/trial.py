"""A large step: 10 000 prompts x 8 sessions x 10 turns through every room.

Simulated sessions (their worker slices prepared tokens) go through dispatcher, queue, replay
buffer, merge and store in this process, as in a trainer. Each row is a stage:

trial_dispatch   from submit to the last marker: 80 000 sessions run, 800 000 rows in the queue
trial_sample     the replay buffer finds 10 000 complete groups
trial_get        the rows as one batch of jagged fields
trial_clear      rows, roots and markers removed
trial_merge      800 000 turns become 80 000 rows
trial_save       the merged step as a dump, synced
trial_load       the same back, verified

The column `peer` has the stage's lower limit, measured in the same run: its inner loop and nothing
else. For dispatch this is calling the worker and copying its rows once, for sample parsing every
key, for get joining the rows' tensors, for clear freeing them, for merge comparing each turn with
the previous one and joining the rest, and for save and load writing (synced) and reading the bytes
of the merged step. Rows in MB are the stage's peak of resident memory above its start (Linux).
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks._report import Goal, Row, arguments, report, versions
from rlskip import MergeConfig
from rlskip.dispatch import LocalPool, RolloutDispatcher, Session
from rlskip.keys import split_trajectory
from rlskip.merge import merge
from rlskip.queue import MemoryQueue, ReplayBuffer
from rlskip.store import StepStore

PROMPT, RESPONSE, OBSERVATION = 64, 32, 16  # tokens; a turn's prompt holds all turns before it
SESSIONS, TURNS = 8, 10
FEW = 4.0  # times its lower limit that a stage may take
# Dispatch has goals of its own: for its time, and for its memory in MB.
GOALS = {"trial_dispatch": 1.5, "trial_dispatch_memory": 4000.0}


def worker_of(turns: int) -> Callable[..., Any]:
    """Return a worker that slices its sessions from one long run of tokens."""
    length = PROMPT + turns * (RESPONSE + OBSERVATION)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 151_936, 1 << 20, dtype=np.int32))
    log_probs = torch.from_numpy(-rng.exponential(0.5, RESPONSE).astype(np.float32))
    mask, nothing = torch.ones(RESPONSE, dtype=torch.int8), torch.zeros(RESPONSE)
    reward = torch.nn.functional.one_hot(torch.tensor(RESPONSE - 1), RESPONSE).float()

    async def worker(prompt: Any, sampling: Any, session: Session) -> list[dict[str, Any]]:
        trajectory = session.sample_index * session.n + session.session_id
        at = trajectory * 997 % (len(tokens) - length)
        rows = []
        for turn in range(turns):
            start = at + PROMPT + turn * (RESPONSE + OBSERVATION)
            last = turn == turns - 1
            rows.append(
                {
                    "prompt_token_ids": tokens[at:start],
                    "response_ids": tokens[start : start + RESPONSE],
                    "loss_masks": mask,
                    "rollout_logprobs": log_probs,
                    "rewards": reward if last else nothing,
                    "trajectory_ids": torch.tensor(trajectory),
                    "is_last_step": torch.tensor(last),
                }
            )
        return rows

    return worker


class Stages:
    """Run one stage after another; records time, peak memory above the start, and limit."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def __call__(self, name: str, stage: Callable[[], Any], limit: Callable[[], Any]) -> Any:
        gc.collect()
        before = _peak(reset=True)
        start = time.perf_counter()
        result = stage()
        seconds, peak = time.perf_counter() - start, _peak() - before
        start = time.perf_counter()
        kept = limit()
        least = time.perf_counter() - start
        del kept
        goal = Goal("<=", GOALS.get(f"trial_{name}", FEW))
        self.rows.append(Row(f"trial_{name}", seconds, "s", least, goal))
        what = f"trial_{name}_memory"
        most = Goal("<=", GOALS[what]) if what in GOALS else None
        self.rows.append(Row(what, peak / 1e6, "MB", goal=most))
        print(f"{name:<10}{seconds:8.2f} s, limit {least:.2f} s, {peak / 1e6:8.0f} MB", flush=True)
        return result


def _peak(reset: bool = False) -> int:
    """Return the process's peak resident memory in bytes; `reset` clears the peak first."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    field = "VmRSS:" if reset else "VmHWM:"
    return 1024 * int(status.split(field, 1)[1].split(None, 1)[0])


def trial(prompts: int, turns: int, folder: Path) -> list[Row]:
    queue, worker, stages = MemoryQueue(), worker_of(turns), Stages()
    buffer = ReplayBuffer(queue)
    settings = {"dispatch": {"rollout_level": True, "n": SESSIONS, "policy": "least_loaded"}} | {
        "actor_rollout_ref": {"rollout": {"n": SESSIONS}}
    }
    batch = TensorDict(
        {
            "uid": NonTensorStack(*(f"prompt-{i}" for i in range(prompts))),
            "input_ids": torch.randint(0, 151_936, (prompts, PROMPT), dtype=torch.int32),
        },
        batch_size=[prompts],
    )

    kept: list[Any] = []

    def workers_alone() -> None:
        for index, session in itertools.product(range(prompts), range(SESSIONS)):
            who = _Who(index, session)
            kept.extend(
                {name: value.clone() for name, value in row.items()}
                for row in _run(worker(None, None, who))
            )

    with RolloutDispatcher(LocalPool(worker, 16), queue, settings) as dispatcher:
        stages("dispatch", lambda: dispatcher.submit(batch, step=1).result(), workers_alone)
    found, _ = stages(
        "sample",
        lambda: buffer.sample(1, "train"),
        lambda: [split_trajectory(key) for key in queue.list("train")],
    )
    rows = [
        stages(
            "get",
            lambda: queue.get(found.keys, "train"),
            lambda: joined(kept),
        )
    ]
    stages("clear", lambda: buffer.clear(found), kept.clear)
    options = MergeConfig(stepwise_output=True)
    merged, _, _ = stages(
        "merge",
        lambda: merge(rows[0], options),
        lambda: compared_and_joined(rows[0], turns),
    )
    assert len(merged) == prompts * SESSIONS
    rows.clear()
    raw = [
        value.values().numpy() if value.is_nested else value.numpy() for value in merged.values()
    ]
    store = StepStore(folder / "store")
    stages("save", lambda: store.save(1, merged), lambda: write_raw(raw, folder / "raw"))
    stages("load", lambda: store.load(1), lambda: (folder / "raw").read_bytes())
    return stages.rows


class _Who:
    """The part of a Session that the worker reads."""

    n = SESSIONS

    def __init__(self, index: int, session_id: int) -> None:
        self.sample_index, self.session_id = index, session_id


def _run(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value


def joined(rows: list[Any]) -> list[Any]:
    return [torch.cat([row[name].reshape(-1) for row in rows]) for name in rows[0]]


def compared_and_joined(rows: TensorDict, turns: int) -> list[np.ndarray]:
    """Compare each turn's prompt with the previous turn, and join each session's tokens."""
    prompts, responses = (
        [value.numpy() for value in rows[name].unbind()]
        for name in ("prompt_token_ids", "response_ids")
    )
    whole = []
    for first in range(0, len(prompts), turns):
        pieces = [prompts[first], responses[first]]
        for i in range(first + 1, first + turns):
            before = len(prompts[i - 1])
            seen = before + len(responses[i - 1])
            np.array_equal(prompts[i][:before], prompts[i - 1])
            np.array_equal(prompts[i][before:seen], responses[i - 1])
            pieces += [prompts[i][seen:], responses[i]]
        whole.append(np.concatenate(pieces))
    return whole


def write_raw(arrays: list[np.ndarray], file: Path) -> None:
    with file.open("wb") as out:
        for array in arrays:
            out.write(np.ascontiguousarray(array).data)
        out.flush()
        os.fsync(out.fileno())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--folder", type=Path, help="where to dump (default: the temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = trial(options.prompts, options.turns, Path(folder))
    report(rows, versions("tensordict", "blosc2"), options.json)


if __name__ == "__main__":
    main()
