"""Of a decorated stage: no dump, another dump, no step, no manager."""

import logging

from rlskip import SkipManager
from rlskip.queue import MemoryQueue
from rlskip.skip.role import register_skip


@SkipManager.annotate(role="rollout")
def generate(prompts, **sampling):
    return [10 * prompt for prompt in prompts]


@SkipManager.annotate(role="rollout")
def masked(prompts):
    return {"response_ids": [[5, 6], [7]], "loss_masks": [[1, 1, 0], [1]]}


def start(folder, **skip):
    """A new run with the role `rollout`."""
    skip = {"dump_dir": str(folder), "rollout": {"enable": True}, **skip}
    config = {"trainer": {"project_name": "p", "experiment_name": "e"}, "skip": skip}
    SkipManager.init(config)


def step(number, prompts, **sampling):
    SkipManager.set_step(number)
    return generate(prompts, **sampling)


def again(folder, prompts=(1, 2), **sampling):
    """Dump step 1, of the prompts 1 and 2; then a new run, whose step 1 has `prompts`."""
    start(folder)
    step(1, [1, 2])
    start(folder)
    step(1, list(prompts), **sampling)


def miss(folder):
    start(folder, on_miss="error")
    step(1, [1])


def no_step(folder):
    start(folder)
    generate([1])


def asked_again(folder):
    again(folder)
    start(folder, match="prompt", on_miss="error")
    step(1, [2])
    step(2, [2, 3])


def unknown_field(folder):
    start(folder)
    SkipManager.set_step(1)
    SkipManager.annotate(role="rollout", rows={"reward": "won"})(lambda prompts: {"said": [5]})([1])


def odd_mask(folder):
    start(folder)
    SkipManager.set_step(1)
    masked([1, 2])


def only_uids_in_a_queue(folder):
    SkipManager.init({"skip": {"dump_dir": str(folder), "rollout_tq": {"enable": True}}})
    SkipManager.set_step(1)
    submit = SkipManager.annotate(role="rollout_tq", queue=MemoryQueue())(lambda prompts: None)
    submit({"uid": ["a", "b"]})


CASES = [
    ("groups by position", only_uids_in_a_queue, logging.WARNING, "rlskip.skip.notices"),
    ("a mask of another length", odd_mask, logging.WARNING, "rlskip.skip.stage_runner"),
    ("prompts that the run lacks", asked_again),
    ("a description of rows that does not fit", unknown_field),
    ("a step without a dump", miss),
    ("another call", lambda folder: again(folder, [1, 3])),
    ("another argument", lambda folder: again(folder, temperature=0.5)),
    (
        "prompts that have only uids",
        lambda folder: (start(folder), step(1, [{"uid": "a"}, {"uid": "b"}])),
    ),
    ("the first replay", again, logging.WARNING, "rlskip.skip.notices"),
    ("a role that is on", start, logging.INFO, "rlskip.skip.manager"),
    ("no step", no_step),
    ("a config without the node", lambda _: SkipManager.init({"trainer": {}})),
    ("an unknown role", lambda _: SkipManager.annotate(role="rolout")(print)),
    ("a role of rlskip's", lambda _: register_skip("rollout")(int)),
]
