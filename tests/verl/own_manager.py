"""A user's agent-loop manager: it makes its workers, and changes the rollouts."""

import json
import os

from verl.experimental.agent_loop import AgentLoopManager
from verl.utils.ray_utils import auto_await


class OwnManager(AgentLoopManager):
    async def _init_agent_loop_workers(self):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps({"made": True}) + "\n")
        await super()._init_agent_loop_workers()

    @auto_await
    async def generate_sequences(self, prompts):
        rollouts = await super().generate_sequences(prompts)
        rollouts.batch["rm_scores"] = rollouts.batch["rm_scores"] * 2 + 1
        return rollouts
