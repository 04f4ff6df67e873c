"""Dispatch over Ray and in this process, and the length of the tail.

ray_dispatch_ratio  seconds from the call to the last marker: 128 prompts of 2048 tokens x 8
                    sessions, round robin, 4 Ray actors whose workers return at once. The peer, in
                    the same run, makes one remote call per session with a cloned prompt.
journal_ms          milliseconds to append a session to its step's journal: one row of 512 + 1024
                    tokens with the 26 fields that verl's agent-loop worker writes. The best of 500
                    appends, without fsync, as in a run.
sessions_per_s      sessions that `collect` runs in a second, 1 024 prompts x 8 on 8 local async
                    workers that return at once, their rows as one batch included.
makespan_*          simulated: when the last session finishes, over the lower bound
                    max(longest session, total work / slots); 128 prompts x 16 sessions, 16
                    workers x 8 slots, mean of 160 draws and of three settings of the tail.
                    *_history knows one earlier draw, *_oracle the true lengths.

verl already balances *requests* over engines. Dispatching sessions shortens the work that
is bound to a worker (CPU, event loop, tools, sandboxes), and helps pools whose workers are
themselves the engines.

Needs Ray in the same environment: pip install "rlskip[ray]"
"""

from __future__ import annotations

import heapq
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip.dispatch import POLICIES, Policy
from rlskip.dispatch.journal import Journaled, append_sessions
from rlskip.dispatch.scheduler import Scheduler, SessionGroup, least_loaded, longest_first
from rlskip.store import Identity

WORKERS, SLOTS = 16, 8
DRAWS = 160
TAILS = (0.8, 1.2, 1.6)
MEDIAN, LONGEST = 1500, 32_768  # tokens: with these, chunk comes out as long as measured elsewhere


# -- makespan --------------------------------------------------------------------------------


def draw(sigma: float, seed: int, prompts: int = 128, n: int = 16) -> tuple[Any, Any]:
    """Return two independent draws of lengths (prompts, n) of the same prompts.

    Lognormal: `sigma` between prompts, 0.6 within a group, cut off at the response limit.
    """
    rng = np.random.default_rng(seed)
    middle = np.log(MEDIAN) + rng.normal(0, sigma, (prompts, 1))
    both = np.exp(middle + rng.normal(0, 0.6, (2, prompts, n)))
    return tuple(np.minimum(both, LONGEST))


def makespan(lengths: np.ndarray, policy: Policy, history: np.ndarray | None = None) -> float:
    """Return when the last of `lengths` (prompts, n) finishes on a simulated pool."""
    prompts, n = lengths.shape
    scheduler = Scheduler(WORKERS, policy, per_worker=SLOTS)
    for i in range(prompts):
        known = [0.0, 0.0] if history is None else [n, n * float(history[i])]
        scheduler.add(SessionGroup(i, prompts, n, known), dict.fromkeys(range(n), 0))
    running: list[tuple[Any, ...]] = []
    now = 0.0
    while True:
        while (job := scheduler.next()) is not None:
            length = float(lengths[job.group.prompt, job.session_id])
            heapq.heappush(running, (now + length, job.number, length, job))
        if not running:
            return now
        now, _, length, job = heapq.heappop(running)
        scheduler.done(job, length)


def makespans() -> dict[str, list[float]]:
    """Return each policy's makespan over the lower bound, by setting of the tail."""
    found: dict[str, list[float]] = {}
    for sigma in TAILS:
        sums: dict[str, float] = {}
        for seed in range(DRAWS):
            lengths, earlier = draw(sigma, seed)
            bound = max(lengths.max(), lengths.sum() / (WORKERS * SLOTS))

            spans = {name: makespan(lengths, policy) for name, policy in POLICIES.items()}
            spans["longest_first_history"] = makespan(lengths, longest_first, earlier.mean(1))
            # The true lengths in order, each as its own group.
            ordered = -np.sort(-lengths.reshape(-1, 1), axis=0)
            spans["oracle"] = makespan(ordered, least_loaded)
            for name, span in spans.items():
                sums[name] = sums.get(name, 0.0) + span / bound / DRAWS
        for name, figure in sums.items():
            found.setdefault(name, []).append(figure)
    return found


def plot(found: dict[str, list[float]], path: Path) -> None:
    """Draw the makespans as a PNG, one line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in sorted(found, key=lambda name: -found[name][-1]):
        (line,) = axes.plot(TAILS, found[name], marker="o")
        axes.annotate(
            name.replace("_", " "),
            (TAILS[-1], found[name][-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
        )
    axes.set_xticks(TAILS)
    axes.set_xlim(right=TAILS[-1] + 0.45)
    axes.set_ylim(bottom=0.95)
    axes.set_xlabel("spread of lengths between prompts (lognormal sigma)")
    axes.set_ylabel("makespan / lower bound")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


# -- sessions of this process ------------------------------------------------------------------


async def trivial(prompt: Any, sampling: Any, session: Any) -> dict[str, Any]:
    return {"responses": torch.tensor([session.session_id])}


def sessions_per_s(rounds: int, prompts: int = 1024, n: int = 8) -> Row:
    """Return how many sessions `collect` runs in a second, their rows as one batch included."""
    from rlskip.dispatch import LocalPool, RolloutDispatcher

    batch = [{"uid": f"prompt-{i}"} for i in range(prompts)]
    config = {"dispatch": {"rollout_level": True, "n": n}}
    with RolloutDispatcher(LocalPool(trivial, 8), config=config) as dispatcher:

        def collect() -> None:
            rows, _ = dispatcher.collect(batch, step=1)
            assert len(rows) == prompts * n

        collect()
        (seconds,) = best_of(rounds, collect)
    return Row("sessions_per_s", prompts * n / seconds, "1/s", goal=Goal(">=", 10_000))


# -- over Ray ----------------------------------------------------------------------------------


async def at_once(prompt: Any, sampling: Any, session: Any) -> None:
    return None


def ray_dispatch(rounds: int, prompts: int = 128, n: int = 8) -> Row:
    """Return the seconds for all sessions, ours and one remote call per session."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from rlskip.dispatch import RayPool, RolloutDispatcher
    from rlskip.queue import MemoryQueue, ReplayBuffer

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))
    tokens = torch.randint(0, 151_936, (prompts, 2048), generator=torch.Generator().manual_seed(0))
    uids = [f"prompt-{i}" for i in range(prompts)]
    batch = TensorDict({"input_ids": tokens, "uid": NonTensorStack(*uids)}, batch_size=[prompts])

    class Worker:
        async def run(self, session_id: int, **prompt: Any) -> None:
            return None

    workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(4)]

    def peer() -> None:
        calls = [
            workers[(i * n + session) % 4].run.remote(
                session, uid=uids[i], input_ids=tokens[i].clone()
            )
            for i in range(prompts)
            for session in range(n)
        ]
        ray.get(calls)

    config = {"dispatch": {"rollout_level": True, "policy": "round_robin", "n": n}}
    queue = MemoryQueue()
    with RolloutDispatcher(RayPool(at_once, 4), queue, config) as dispatcher:

        def ours() -> None:
            report = dispatcher.submit(batch, step=1).result()
            assert report.succeeded == prompts * n
            ReplayBuffer(queue).evict(uids, "train")

        peer()  # the first round starts processes
        ours()
        theirs, mine = best_of(rounds, peer, ours)
    ray.shutdown()
    return Row("ray_dispatch_ratio", mine, "s", theirs, Goal("<=", 1 / 8))


# -- the journal -------------------------------------------------------------------------------


def journal(rounds: int = 500, prompt: int = 512, response: int = 1024) -> Row:
    """Return the milliseconds to journal one session."""
    tokens = torch.randint(0, 151_936, (prompt + response,))
    ones = torch.ones(response, dtype=torch.int64)
    text = [{"role": "user", "content": "x" * 4 * prompt}]
    row = {
        "prompts": tokens[:prompt].clone(), "responses": tokens[prompt:].clone(),
        "input_ids": tokens, "position_ids": torch.arange(prompt + response),
        "response_mask": ones, "loss_mask": ones, "rollout_log_probs": torch.randn(response),
        "rm_scores": torch.zeros(response), "raw_prompt": text, "prompt": text,
        "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"index": 3},
        "extra_fields": {"min_global_steps": 6, "max_global_steps": 6, "turn_scores": []},
        "metrics": {"generate_sequences": 1.2, "tool_calls": 0.0}, "data_source": "math",
        "ability": "math", "uid": "8d7c", "index": 3, "session_id": 1, "global_steps": 7,
        "num_turns": 2, "dummy_tensor": torch.zeros(1, dtype=torch.uint8), "tools_kwargs": {},
        "interaction_kwargs": {}, "multi_modal_inputs": {}, "mm_processor_kwargs": {},
    }  # fmt: skip
    tag = {"status": "success", "seq_len": prompt + response, "min_global_steps": 6}
    entry = Journaled([row], [tag], "8d7c").packed()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder, "7.journal"), Identity.of({"n": 16})
        (seconds,) = best_of(rounds, lambda: append_sessions(*where, {("7-content-0", 1): entry}))
    return Row("journal_ms", seconds * 1e3, "ms", goal=Goal("<=", 1.0))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of dispatch and collect")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the makespans here")
    args = parser.parse_args()

    rows = [journal(), sessions_per_s(args.rounds), ray_dispatch(args.rounds)]
    goals: dict[str, Goal] = {
        "least_loaded": Goal("<=", 1.46),
        "longest_first": Goal("<=", 1.20),
        "longest_first_history": Goal("<=", 1.09),
    }
    found = makespans()
    for name, figures in found.items():
        mean = sum(figures) / len(figures)
        rows.append(Row(f"makespan_{name}", mean, "x bound", goal=goals.get(name)))
    if args.plot is not None:
        plot(found, args.plot)
    report(rows, versions("ray", "tensordict"), args.json)


if __name__ == "__main__":
    main()
