"""Agent loops for verl: some record in $NOTES who ran what, one fails."""

import asyncio
import contextlib
import json
import os
import random

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Noting(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        ran = {"pid": os.getpid(), "step": kwargs["global_steps"], "uid": str(kwargs["uid"])}
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps({**ran, "session": kwargs["session_id"]}) + "\n")
        return await super().run(sampling_params, **kwargs)


class Failing(Noting):
    """One session fails once in step 1, as if by the machine; one fails always in step 2.

    The data are shuffled: step 1 has the questions 10, 1, 26 and 5, step 2 has 23, 7, 24 and 13.
    """

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        which = kwargs["global_steps"], int(kwargs["index"]), kwargs["session_id"]
        if which == (1, 26, 0):
            with contextlib.suppress(FileExistsError):
                open(os.environ["NOTES"] + ".reset", "x").close()
                raise ConnectionError("connection reset")
        if which == (2, 7, 1):
            raise ValueError("the sandbox is gone")
        return output


class Seeded(SingleTurnAgentLoop):
    """Samples by prompt, session and weights.

    $STOP_AT sessions run, and later ones once there is a file `$NOTES.go`. Each leaves a file
    `$NOTES.{number}` when it begins, and a line in `$NOTES` when it has sampled.
    """

    async def run(self, sampling_params, **kwargs):
        stop_at = int(os.environ.get("STOP_AT", 10**6))
        for number in range(10**6):
            while number >= stop_at and not os.path.exists(f"{os.environ['NOTES']}.go"):
                await asyncio.sleep(0.2)
            with contextlib.suppress(FileExistsError):
                open(f"{os.environ['NOTES']}.{number}", "x").close()
                break
        while True:
            try:
                output = await super().run(sampling_params, **kwargs)
                break
            except Exception as error:  # the harness's server does not pause
                if "asleep" not in str(error):
                    raise
                await asyncio.sleep(0.1)
        weights = output.extra_fields["max_global_steps"]
        seed = f"{kwargs['raw_prompt']} {kwargs['session_id']} {weights}"
        draw = random.Random(seed)
        output.response_ids = [draw.randrange(4, 250) for _ in range(draw.randrange(4, 17))]
        output.response_mask = [1] * len(output.response_ids)
        output.response_logprobs = [-4.0] * len(output.response_ids)
        with open(os.environ["NOTES"], "a") as file:
            prompt = kwargs["raw_prompt"][0]["content"]
            file.write(f"{prompt} {kwargs['session_id']}\n")
        return output
