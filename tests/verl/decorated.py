"""What verl decorates in trainers that need several GPUs, genuine classes, and what a user does.

`python decorated.py DUMPS`: each generates and dumps three steps, then replays them in a run of
another seed. Prints as JSON how many sessions each run generated, and whether rollouts were equal.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncAgentLoopManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.utils.skip import SkipManager

STEPS, PROMPTS, N = (1, 2, 3), 2, 2
generated = 0


def bare(cls: type, **attributes: Any) -> Any:
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def batch(number: int, **meta: Any) -> DataProto:
    """Prompts of the data loader's batch `number`, under new uids."""
    tokens = torch.arange(PROMPTS)[:, None] + 10 * number
    uids = [f"uid_sample_0_{number}"] * PROMPTS
    return DataProto.from_dict({"input_ids": tokens}, {"uid": np.array(uids, object)}, meta)


def rollouts(prompts: DataProto) -> DataProto:
    global generated
    generated += len(prompts)
    times = dict.fromkeys(("generate_sequences", "tool_calls", "compute_score"), 1.0)
    tensors = {
        "prompts": prompts.batch["input_ids"],
        "responses": torch.randint(99, (len(prompts), 3)),
    }
    metrics = [{**times, "num_preempted": 0}] * len(prompts)
    return DataProto.from_dict(tensors, meta_info={"metrics": metrics})


# -- one-step-off: the next batch is generated while a step trains -------------------------------


async def one_step_off() -> list[Any]:
    async def generate(prompts: DataProto) -> DataProto:
        await asyncio.sleep(0.01)
        return rollouts(prompts)

    worker = SimpleNamespace(generate_sequences=SimpleNamespace(remote=generate))
    manager, step, seen = bare(AgentLoopManager, agent_loop_workers=[worker]), 1, []

    async def ahead(number: int) -> DataProto:
        return await manager.generate_sequences(batch(number, global_steps=step))

    following = asyncio.create_task(ahead(1))
    for step in STEPS:
        present = await following
        following = asyncio.create_task(ahead(step + 1))
        seen.append(present.batch["responses"].tolist())
    seen.append((await following).batch["responses"].tolist())
    return seen


# -- fully async: samples side by side -----------------------------------------------------------


async def fully_async() -> list[Any]:
    def generate(prompts: DataProto) -> Any:
        done: Future[DataProto] = Future()
        done.set_result(rollouts(prompts))
        return SimpleNamespace(future=lambda: done)

    worker = SimpleNamespace(generate_sequences=SimpleNamespace(remote=generate))
    manager = bare(FullyAsyncAgentLoopManager, agent_loop_workers=[worker])
    done = await asyncio.gather(*(manager.generate_sequences_single(batch(n)) for n in STEPS))
    return [sample.batch["responses"].tolist() for sample in done]


# -- separate_async: a step is sampled once for each parameter-sync step --------------------------


class Trainer(PPOTrainer):
    """The genuine submission of prompts, of a data loader that counts."""

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def _fetch_one_gen_batch(self) -> Any:
        self.fetched += 1
        uids = [f"{id(self):x}-{self.fetched}-{i}" for i in range(PROMPTS)]
        fields = {
            "input_ids": torch.arange(PROMPTS)[:, None] + 10 * self.fetched,
            "uid": np.array(uids, object),
            "raw_prompt": np.array([f"{self.fetched} {i}" for i in range(PROMPTS)], object),
        }
        return tensordict_utils.get_tensordict(fields)


def answer(prompts: Any) -> None:
    """As verl's agent-loop workers write a group."""
    global generated
    for uid in map(str, prompts["uid"]):
        keys = [f"{uid}_{session}_0" for session in range(N)]
        rows = {"responses": torch.randint(99, (N, 3))}
        tags = [{"global_steps": 1, "status": "success"}] * N
        fields = tensordict_utils.get_tensordict(rows)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": "finished"}])
        generated += N


def separate_async() -> list[Any]:
    buffer = ReplayBufferAsync("separate_async", {}, None, "drop", {}, poll_interval=0.05)
    trainer = bare(
        Trainer,
        config=OmegaConf.create({"data": {"train_batch_size": PROMPTS}}),
        trainer_mode="separate_async",
        fetched=0,
        replay_buffer=buffer,
        agent_loop_manager=SimpleNamespace(generate_sequences=answer),
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=None),
    )
    seen = []
    for trainer.global_steps in STEPS:
        SkipManager.set_step(trainer.global_steps)
        trainer._add_batch_to_generate()
        for _ in range(PROMPTS):
            found, _ = buffer.sample(
                global_steps=trainer.global_steps, partition_id="train", batch_size=1
            )
            data = tq.kv_batch_get(
                keys=found.keys, partition_id="train", select_fields=["responses"]
            )
            seen.append(sorted(row.tolist() for row in data["responses"]))
            tq.kv_clear(keys=found.keys, partition_id="train")
    return seen


# -- stages of the user's own --------------------------------------------------------------------


def answers(prompts: list[str]) -> dict[str, Any]:
    global generated
    generated += len(prompts)
    return {"answers": torch.randint(99, (len(prompts), 3)).tolist()}


@SkipManager.annotate(role="async_rollout", anything="verl ignores this")
async def sample(sample_id: str, prompt: str) -> dict[str, Any]:
    return answers([prompt])


class Own:
    @SkipManager.annotate(role="rollout")
    def generate(self, prompts: list[str]) -> dict[str, Any]:
        return answers(prompts)


def own_stages() -> list[Any]:
    SkipManager.set_step(1)
    return [Own().generate(["a", "b"]), asyncio.run(sample("sample_0_7", "c"))]


def run(roles: str, name: str, train: Any) -> dict[str, Any]:
    global generated
    counts, seen = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        generated = 0
        on = {"enable": True, "n": N}
        skip = {role: {**on, "dump_dir": f"{sys.argv[1]}/{name}/{role}"} for role in roles.split()}
        SkipManager.init(OmegaConf.create({"skip": skip}))
        seen.append(train())
        counts.append(generated)
    return {"generated": counts, "equal": seen[0] == seen[1]}


if __name__ == "__main__":
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    cases = {
        "one_step_off": ("rollout", lambda: asyncio.run(one_step_off())),
        "fully_async": ("async_rollout", lambda: asyncio.run(fully_async())),
        "separate_async": ("rollout_tq", separate_async),
        "own_stages": ("rollout async_rollout", own_stages),
    }
    print(json.dumps({name: run(roles, name, train) for name, (roles, train) in cases.items()}))
    ray.shutdown()
