"""Agent loops for verl: one that notes who ran what in $NOTES, one that fails at step 2."""

import json
import os

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Noting(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        ran = {"pid": os.getpid(), "step": kwargs["global_steps"], "uid": str(kwargs["uid"])}
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps({**ran, "session": kwargs["session_id"]}) + "\n")
        return await super().run(sampling_params, **kwargs)


class Failing(Noting):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        if kwargs["global_steps"] == 2 and kwargs["session_id"] == 1 and kwargs["index"] == 5:
            raise ValueError("the sandbox is gone")
        return output
