"""Stages, trainers and ranks of the tests of skip."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlskip import SkipManager
from rlskip.jobs.ranks import RankGroup
from rlskip.jobs.served import forget_served
from rlskip.keys import prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import KVBatchMeta, MemoryQueue, ReplayBuffer, to_rows
from rlskip.skip.agreement import SeveralRanks
from rlskip.skip.call_role import CallRole

_generated = itertools.count(1)


def visit(step: int) -> None:
    """Begin a visit of `step`, also where it is the present step."""
    SkipManager.set_step(step + 1)
    SkipManager.set_step(step)


class Stage:
    """A stage that counts its calls and never returns the same twice."""

    def __init__(self) -> None:
        self.calls = 0

    @SkipManager.annotate(role="rollout")
    def generate(self, prompts: dict[str, Any], scale: int = 1) -> dict[str, Any]:
        self.calls += 1
        return {
            "tokens": torch.full((2, 3), self.calls * scale),
            "rm_scores": np.arange(2.0) + self.calls,
        }

    def at(self, step: int, prompts: Any = None, **kwargs: Any) -> int:
        """Call it in a new visit of `step`; which call's result came back."""
        visit(step)
        prompts = {"ids": torch.arange(3) + step} if prompts is None else prompts
        got = self.generate(prompts, **kwargs)
        return int(got["tokens"][0, 0])


def role_of(name: str = "rollout") -> Any:
    return SkipManager.skip_instances[name]


def steps_on_disk(dump_dir: Path) -> list[str]:
    return sorted(p.parent.name for p in dump_dir.rglob("gen_batch.dp"))


def leases(dumps: Path) -> list[Path]:
    """The leases that are held under a dump_dir."""
    return [*dumps.rglob(".work/lease-*")]


# -- a trainer with a queue ---------------------------------------------------------------


_uids = itertools.count()


def prompts(*texts: str) -> dict[str, Any]:
    """A batch under uids that were never used before (with an underscore)."""
    return {"uid": [f"u_{next(_uids)}" for _ in texts], "text": list(texts)}


class Loop:
    """A trainer whose stage writes a finished row with `fields` for each prompt, after a `wait`.

    `options` are those of the annotation of `submit`.
    """

    def __init__(self, fields: str = "x", wait: Callable[[], object] = int, **options: Any) -> None:
        self.queue, self.fields, self.wait = MemoryQueue(), fields.split(), wait
        self.submitted: list[str] = []
        self.seen: list[dict[str, Any]] = []  # the queue at each call of the stage
        annotate = functools.partial(SkipManager.annotate, role="rollout_tq", queue=self.queue)
        self.submit = annotate(**options)(self._submit)
        self.sample = annotate(phase="sample")(self._sample)

    def _submit(self, prompts: dict[str, Any]) -> None:
        self.wait()
        self.seen.append(self.queue.list("train"))
        for uid in prompts["uid"]:
            self.submitted.append(uid)
            row = {name: torch.arange(2) for name in self.fields}
            self.queue.put([uid], "train", tags=[status_tag(1, "finished")])
            self.queue.put([f"{uid}_0_0"], "train", [row], [row_tag(1)])

    def _sample(self) -> KVBatchMeta:
        self.wait()
        keys = [key for key in self.queue.list("train") if key.endswith("_0_0")]
        return KVBatchMeta(keys, [{}] * len(keys), "train")


class Trainer:
    """Submits prompts to threads that write rows and markers; samples the real buffer."""

    def __init__(self, queue: Any, model: str = "counted", **replay: Any) -> None:
        self.queue, self.model, self.n = queue, model, 2
        self.buffer = ReplayBuffer(queue, {"replay": {"timeout_s": 20.0, **replay}})
        self.threads: list[threading.Thread] = []
        self.submitted: list[str] = []
        self.fails: set[tuple[str, int]] = set()  # (text, session id)

    @SkipManager.annotate(role="rollout_tq", queue=lambda self, *_, **__: self.queue)
    def submit(self, prompts: dict[str, Any], style: str = "plain") -> str:
        step = SkipManager.step or 0
        uids, texts = list(prompts["uid"]), list(prompts.get("text", prompts["uid"]))
        self.submitted += texts
        counted = self.model == "counted"
        tag = prompt_tag(step, self.n) if counted else status_tag(step, "pending", self.n)
        self.queue.put(uids, "train", tags=[tag] * len(uids))
        for uid, text in zip(uids, texts, strict=True):
            self.threads.append(threading.Thread(target=self._prompt, args=(step, uid, text)))
            self.threads[-1].start()
        return "submitted"

    def _prompt(self, step: int, uid: str, text: str) -> None:
        for session_id in range(self.n):
            error = "tool died" if (text, session_id) in self.fails else None
            rows = range(0 if error else 1 + session_id)  # session 1 writes two rows
            if rows:
                fields = [
                    {
                        "uid": uid,
                        "text": f"{text}/{session_id}/{index}",
                        "responses": torch.full((2 + index,), next(_generated)),
                        "rm_scores": torch.tensor(float(session_id)),
                    }
                    for index in rows
                ]
                keys = [f"{uid}_{session_id}_{index}" for index in rows]
                tags = [row_tag(step, length=2 + index) for index in rows]
                self.queue.put(keys, "train", fields, tags)
            if self.model == "counted" or error:
                marker = session_tag(session_id, error=error)
                self.queue.put([f"{uid}_sess{session_id}"], "train", tags=[marker])
        if self.model != "counted":
            failed = any((text, s) in self.fails for s in range(self.n))
            status = "failure" if failed else "finished"
            self.queue.put([uid], "train", tags=[{"status": status}])

    @SkipManager.annotate("rollout_tq", phase="sample", queue=lambda self, *_, **__: self.queue)
    def sample(self, batch_size: int | None = None, partition_id: str = "train") -> Any:
        return self.buffer.sample(SkipManager.step or 0, partition_id, batch_size)

    def step(self, step: int, prompts: Any, *sizes: int | None) -> list[dict[str, Any]]:
        """One step of training, in a visit of its own; what it would train on, row by row."""
        visit(step)
        self.submit(prompts)
        asked = dict(zip(prompts["uid"], prompts.get("text", prompts["uid"]), strict=True))
        rows = []
        for size in sizes or (None,):
            if len(sizes) > 1:
                [thread.join() for thread in self.threads]  # so that each takes what it can
            batch, _ = self.sample(size)
            data = to_rows(self.queue.get(batch.keys, "train"))
            for key, tag, row in zip(batch.keys, batch.tags, data, strict=True):
                uid, session_id, index = key.rsplit("_", 2)
                assert row.pop("uid") == uid, "the field follows the key"
                row["responses"] = row["responses"].tolist()
                row["rm_scores"] = float(row.get("rm_scores", -1))
                rows.append(
                    {**row, **tag, "key": (int(session_id), int(index)), "prompt": asked[uid]}
                )
            self.buffer.clear(batch)
        [thread.join() for thread in self.threads]
        assert not any(self.queue.list("train")), "the clean-up leaves nothing behind"
        return sorted(rows, key=lambda row: row["text"])


# -- simulated ranks --------------------------------------------------------------------------


class Hub:
    """What the simulated ranks share: an exchange ends when all of them have taken part."""

    def __init__(self, world: int, timeout_s: float = 600.0) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.sent: list[list[int]] = [[]] * world
        self.rounds: list[int] = []  # how many numbers each rank sent in it


class Rank(RankGroup):
    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__()
        self.hub, self.rank, self.world_size = hub, rank, hub.world

    def _gathered(self, numbers: list[int], what: str) -> list[list[int]]:
        self.hub.sent[self.rank] = numbers
        if self.hub.barrier.wait() == 0:
            self.hub.rounds.append(len(numbers))
        self.hub.barrier.wait()
        answers = list(self.hub.sent)
        self.hub.barrier.wait()
        return answers


def on_ranks(hub: Hub, role: str = "rollout", **skip: Any) -> list[CallRole]:
    """The role on each of the simulated ranks, with a store of its own."""
    on_miss = skip.pop("on_miss", "generate")  # SkipManager's own check knows of no ranks
    SkipManager.init({"skip": {**skip, role: {"enable": True}}})
    read = SkipManager.settings
    assert read is not None
    local = read.roles[role]
    local.on_miss = on_miss
    roles = []
    for _ in range(hub.world):
        forget_served()  # each is a process of its own, with a ledger of its own
        roles.append(CallRole(role, local, read.facts))
    for rank, one in enumerate(roles):
        one.__dict__["ranks"] = SeveralRanks(Rank(hub, rank), one.dumps)
    return roles
