"""A user's stages under verl 0.9's decorator, run twice: `python own_stages.py DUMP_DIR`."""

import asyncio
import json
import sys

from omegaconf import OmegaConf
from verl.utils.skip import SkipManager

generated = []


@SkipManager.annotate(role="async_rollout", anything="verl ignores this")
async def sample(sample_id, prompt):
    generated.append(sample_id)
    return {"answer": [f"{prompt}!"]}


class Trainer:
    @SkipManager.annotate(role="rollout")
    def generate(self, prompts):
        generated.append(SkipManager.step)
        return {"answers": [f"{prompt}!" for prompt in prompts]}


def run():
    names = ("rollout", "async_rollout")
    roles = {name: {"enable": True, "dump_dir": f"{sys.argv[1]}/{name}"} for name in names}
    SkipManager.init(OmegaConf.create({"skip": roles}))
    SkipManager.set_step(1)
    answers = Trainer().generate(["a", "b"]), asyncio.run(sample("sample_0_7", "c"))
    print("RUN" + json.dumps([generated, answers]))
    generated.clear()


run()
run()
