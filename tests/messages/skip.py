"""Of a decorated stage: no dump, another dump, no step, no manager."""

import logging

from rlskip import SkipManager
from rlskip.batch.row_fields import RowsError
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.queue import MemoryQueue
from rlskip.skip.role import RoleError, register_skip
from rlskip.skip.stage import StepNotSetError
from rlskip.store import UnsupportedTypeError


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
    (
        "groups by position",
        only_uids_in_a_queue,
        logging.WARNING,
        "rlskip.skip.notices",
        """\
rlskip: role rollout_tq: nothing but uids tells the prompts apart, so each is served by the group \
at its position in the batch""",
    ),
    (
        "a mask of another length",
        odd_mask,
        logging.WARNING,
        "rlskip.skip.stage_runner",
        """\
rlskip: step 1 of role rollout was NOT dumped, training goes on (said once; the summary of the job \
counts such steps): LengthError: <run_path>.masked: loss_masks has 3 values in row 0, and \
its response has 2 tokens
  -> give loss_masks one value for each token, or None in a row without values; or, where it holds \
something else: annotate(rows={'mask': None})""",
    ),
    (
        "prompts that the run lacks",
        asked_again,
        MissError,
        "skip.rollout.on_miss=error",
        """\
skip.rollout.on_miss=error: step 2 has no usable dump for this call (1 of 2 prompts are in no dump \
of the run, 1 of 2 prompts are asked for more often than they were dumped), and the stage must not \
run
  -> generate it once with skip.on_miss=generate, or name other steps than 2; dumps are looked \
for in DIR""",
    ),
    (
        "a description of rows that does not fit",
        unknown_field,
        RowsError,
        "annotate(rows=...)",
        """\
annotate(rows=...): the stage's result has no field won
  -> name some of its fields: said""",
    ),
    (
        "a step without a dump",
        miss,
        MissError,
        "skip.rollout.on_miss=error",
        """\
skip.rollout.on_miss=error: step 1 has no usable dump, and the stage must not run
  -> generate it once with skip.on_miss=generate, or name other steps than 1; dumps are looked \
for in DIR""",
    ),
    (
        "another call",
        lambda folder: again(folder, [1, 3]),
        MismatchError,
        "DIR/e_p/GBSany_Nany_inany_outany/1",
        """\
DIR/e_p/GBSany_Nany_inany_outany/1: the dump of step 1 was made for another call: prompts: row \
1 is 3 now, 2 in the dump
  -> choose one: skip.rollout.on_mismatch=regenerate runs the stage and replaces the dump (the old \
one is quarantined); another skip.dump_dir or trainer.experiment_name starts from nothing""",
    ),
    (
        "another argument",
        lambda folder: again(folder, temperature=0.5),
        MismatchError,
        "DIR/e_p/GBSany_Nany_inany_outany/1",
        """\
DIR/e_p/GBSany_Nany_inany_outany/1: the dump of step 1 was made for another call: \
arguments.temperature: 0.5 now, absent in the dump
  -> choose one: skip.rollout.on_mismatch=regenerate runs the stage and replaces the dump (the old \
one is quarantined); another skip.dump_dir or trainer.experiment_name starts from nothing""",
    ),
    (
        "prompts that have only uids",
        lambda folder: (start(folder), step(1, [{"uid": "a"}, {"uid": "b"}])),
        UnsupportedTypeError,
        "prompts",
        """\
prompts: nothing tells the prompts of <run_path>.generate apart: they have only uid, which no \
replay compares
  -> give them a field with their content, or name what does: annotate(prompts=lambda ...: ...)""",
    ),
    (
        "the first replay",
        again,
        logging.WARNING,
        "rlskip.skip.notices",
        "rlskip: role rollout: replayed rollouts are off-policy for the present weights",
    ),
    (
        "a role that is on",
        start,
        logging.INFO,
        "rlskip.skip.manager",
        "rlskip: role rollout is on: cache at steps all, dumps in DIR",
    ),
    (
        "no step",
        no_step,
        StepNotSetError,
        "<run_path>.generate",
        """\
<run_path>.generate: skip.rollout is enabled, but no step is set
  -> call SkipManager.set_step(step) in the training loop, before the stage""",
    ),
    (
        "a config without the node",
        lambda _: SkipManager.init({"trainer": {}}),
        ConfigError,
        "SkipManager.init",
        """\
SkipManager.init: the config has no entry skip, only trainer
  -> give the full config, e.g. SkipManager.init({'skip': {'rollout': {'enable': True}}})""",
    ),
    (
        "an unknown role",
        lambda _: SkipManager.annotate(role="rolout")(print),
        ConfigError,
        "SkipManager.annotate",
        """\
SkipManager.annotate: there is no role 'rolout'
  -> did you mean 'rollout'? A role of your own needs a name that is less alike""",
    ),
    (
        "a role of rlskip's",
        lambda _: register_skip("rollout")(int),
        RoleError,
        "register_skip('rollout')",
        """\
register_skip('rollout'): rollout is a role of rlskip's
  -> choose another name""",
    ),
]
