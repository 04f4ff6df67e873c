"""Agent loops for verl: one that records in $NOTES who ran what, one that also fails."""

import contextlib
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
    """One session fails once in step 1, as if by the machine; one fails always in step 2."""

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        which = kwargs["global_steps"], int(kwargs["index"]), kwargs["session_id"]
        if which == (1, 2, 0):
            with contextlib.suppress(FileExistsError):
                open(os.environ["NOTES"] + ".reset", "x").close()
                raise ConnectionError("connection reset")
        if which == (2, 5, 1):
            raise ValueError("the sandbox is gone")
        return output
