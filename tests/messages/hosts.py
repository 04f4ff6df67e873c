"""Of the hosts: a trainer that rlskip cannot attach to, what a replay cannot restore."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import patch

from rlskip import SkipManager
from rlskip.hosts import trl
from rlskip.hosts.trl import _Hidden
from rlskip.hosts.verl.facts import refuse_old_release

ON = {"rollout": {"enable": True}}


def trainer(name):
    """As much of TRL's trainer of that name as is looked at."""
    return type(name, (SimpleNamespace,), {})(args=SimpleNamespace(output_dir="out"))


def attach(name, **skip):
    return lambda folder: trl.attach(trainer(name), {"skip": {"dump_dir": str(folder), **skip}})


def reads_environments(folder):
    _Hidden()[0]


def old_verl(folder):
    with patch.dict(sys.modules, verl=SimpleNamespace(__version__="0.8.0")):
        refuse_old_release()


def changed_keys(folder):
    generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    for n, rate in ((4, 0.1), (2, 0.2)):
        loop = {"sampling": {"n": n, "top_p": 1 / n}, "optim": {"lr": rate}}
        SkipManager.init({"skip": {"dump_dir": str(folder), **ON}, **loop})
        SkipManager.set_step(1)
        generate([1])


CASES = [
    ("a trainer whose generation cannot be replaced", attach("GOLDTrainer", **ON)),
    ("a reward that reads an environment's state", reads_environments),
    ("a verl that loads no plug-ins", old_verl),
    (
        "keys of an application that shape rollouts",
        changed_keys,
        logging.WARNING,
        "rlskip.skip.notices",
    ),
]
