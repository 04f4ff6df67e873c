"""The replay buffer next to verl's own (`verl.trainer.ppo.v1.replay_buffer`), on the same keys.

sync_ratio
    One poll after 1 000 changes among 450 000 live keys: ours on a MemoryQueue, which reports
    what changed, and verl's, which reads the whole listing again.
sync_full_ratio
    The same poll on a queue that can only list everything, as TransferQueue does. Both get the same
    freshly unpickled listing. Neither figure includes the time to send it.
sync_full_first
    The very first poll of such a queue, when all 450 000 keys are new to ours.
wake_ms
    From the put of the last session marker to the return of `sample`, on a MemoryQueue; median.
wake_verl_ms
    The same for verl's buffer with its own polling interval.
"""

from __future__ import annotations

import pickle
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import transfer_queue
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import replay_buffer as verl_replay

from benchmarks._report import Goal, Row, arguments, report, versions
from rlskip.keys import prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import MemoryQueue, ReplayBuffer
from rlskip.queue.transfer_queue import PollingWatch

SESSIONS = 8
CHANGES = 1000

Listing = dict[str, dict[str, dict[str, Any]]]


def live_keys(prompts: int) -> Listing:
    """Return `prompts` running prompts with one row per session, tagged as verl tags them."""
    tags: dict[str, dict[str, Any]] = {}
    for i in range(prompts):
        uid = f"{i:032x}"
        tags[uid] = status_tag(i // 512, "running")
        for session_id in range(SESSIONS):
            lengths = {"prompt_len": 512, "response_len": 1024, "seq_len": 1536}
            tags[f"{uid}_{session_id}_0"] = row_tag(i // 512, **lengths)
    return {"train": tags}


def finish_some(listing: Listing, round_: int) -> dict[str, dict[str, Any]]:
    """Finish some prompts: the next 1 000 changed keys, prompts and their rows."""
    keys = list(listing["train"])[round_ * CHANGES : (round_ + 1) * CHANGES]
    return {key: {"response_len": round_} if "_" in key else {"status": "finished"} for key in keys}


class Listed(MemoryQueue):
    """A queue that can only list all of its keys, as TransferQueue can."""

    def watch(self) -> PollingWatch:
        return PollingWatch(lambda: transfer_queue.kv_list())


def verl_buffer(poll_interval: float = 2.0) -> Any:
    return verl_replay.ReplayBufferAsync(
        trainer_mode="separate_async",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=poll_interval,
    )


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def syncs(prompts: int, rounds: int) -> list[Row]:
    listing = live_keys(prompts)
    keys = len(listing["train"])

    queue = MemoryQueue()
    queue.put(list(listing["train"]), "train", None, list(listing["train"].values()))
    told = ReplayBuffer(queue)
    told._sync()

    shipped: list[Listing] = []
    # Both read the listing from here: what kv_list returns, without the cost of sending it.
    transfer_queue.kv_list = lambda *_: shipped[-1]
    listed = ReplayBuffer(Listed())
    peer = verl_buffer()

    def ship() -> None:
        shipped[:] = [pickle.loads(pickle.dumps(listing))]

    ship()
    first = seconds(listed._sync)
    best = {"told": float("inf"), "listed": float("inf"), "peer": float("inf")}
    for round_ in range(rounds):
        changed = finish_some(listing, round_)
        queue.put(list(changed), "train", None, list(changed.values()))
        for key, tag in changed.items():
            listing["train"][key].update(tag)
        ship()
        for name, sync in (
            ("told", told._sync),
            ("listed", listed._sync),
            ("peer", peer._sync_metadata_from_transfer_queue),
        ):
            best[name] = min(best[name], seconds(sync))
    count = told.get_sampleable_count(0, "train")
    assert count == listed.get_sampleable_count(0, "train") == len(peer.finished_keys["train"])
    print(f"{keys} live keys, {CHANGES} changes a poll, {count} prompts finished\n")
    ms = {name: 1e3 * s for name, s in best.items()}
    return [
        Row("sync_ratio", ms["told"], "ms", ms["peer"], Goal("<=", 1 / 50)),
        Row("sync_full_ratio", ms["listed"], "ms", ms["peer"], Goal("<=", 1)),
        Row("sync_full_first", 1e3 * first, "ms", ms["peer"]),
    ]


def wake_ms(rounds: int) -> float:
    """Return the median over `rounds` of the time from the last marker to the batch."""
    queue = MemoryQueue()
    buffer = ReplayBuffer(queue)
    waits = []
    for step in range(rounds):
        uids = [f"{step}-{i}" for i in range(16)]
        sessions = [(uid, s) for uid in uids for s in range(SESSIONS)]
        queue.put(uids, "train", None, [prompt_tag(step, SESSIONS)] * len(uids))
        queue.put(
            [f"{uid}_{s}_0" for uid, s in sessions], "train", None, [row_tag(step)] * len(sessions)
        )
        *markers, last = [f"{uid}_sess{s}" for uid, s in sessions]
        tags = [session_tag(s) for _, s in sessions]
        queue.put(markers, "train", None, tags[:-1])
        waits.append(
            delay(
                partial(buffer.sample, step, "train"),
                partial(queue.put, [last], "train", None, tags[-1:]),
            )
        )
        buffer.evict(uids, "train")
    return 1e3 * statistics.median(waits)


def wake_verl_ms(rounds: int) -> float:
    waits = []
    for _ in range(rounds):
        listing: Listing = {"train": {"u": status_tag(1, "running"), "u_0_0": row_tag(1)}}
        transfer_queue.kv_list = lambda *_, listing=listing: listing
        transfer_queue.kv_clear = lambda **_: None
        buffer = verl_buffer()
        waits.append(
            delay(
                partial(buffer.sample, 1, "train", 1),
                partial(listing["train"]["u"].update, status="finished"),
            )
        )
    return 1e3 * statistics.median(waits)


def delay(wait: Callable[[], Any], act: Callable[[], Any]) -> float:
    """Return the seconds from `act` until `wait`, started earlier in a thread, returns."""
    returned: list[float] = []

    def waiter() -> None:
        wait()
        returned.append(time.perf_counter())

    thread = threading.Thread(target=waiter)
    thread.start()
    time.sleep(0.1)
    acted = time.perf_counter()
    act()
    thread.join()
    return returned[0] - acted


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=50_000, help="of nine live keys each")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = [
        *syncs(options.prompts, options.rounds),
        Row("wake_ms", wake_ms(50), "ms", goal=Goal("<=", 5)),
        Row("wake_verl_ms", wake_verl_ms(3), "ms"),
    ]
    report(rows, versions("verl", "TransferQueue"), options.json)


if __name__ == "__main__":
    main()
