"""Of the hosts: a trainer that rlskip cannot attach to, a role that a trainer never calls."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import patch

from omegaconf import OmegaConf

from rlskip import SkipManager
from rlskip.config.settings import read_skip
from rlskip.hosts import trl
from rlskip.hosts.trl import _Hidden
from rlskip.hosts.verl.facts import refuse_old_release
from rlskip.hosts.verl.trainer_config import judge

ON = {"rollout": {"enable": True}}


def trainer(name):
    """As much of TRL's trainer of that name as is looked at."""
    return type(name, (SimpleNamespace,), {})(args=SimpleNamespace(output_dir="out"))


def attach(name, **skip):
    return lambda folder: trl.attach(trainer(name), {"skip": {"dump_dir": str(folder), **skip}})


def reads_environments(folder):
    _Hidden()[0]


def v1_of_verl(folder):
    config = OmegaConf.create({"trainer": {"use_v1": True}, "skip": {"dump_dir": "/d", **ON}})
    judge(config, read_skip(config))


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
    ("a role that TRL never calls", attach("GRPOTrainer", async_rollout={"enable": True})),
    ("a role that verl's V1 trainer never calls", v1_of_verl),
    ("a verl that loads no plug-ins", old_verl),
    (
        "keys of an application that shape rollouts",
        changed_keys,
        logging.WARNING,
        "rlskip.skip.notices",
    ),
]
