"""The ways to compose rlskip's node, and the values that win: a table for every version of Hydra.

As a module it prints, as JSON, what this environment's Hydra composes (`test_ways.py`).
"""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrs
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from rlskip import SkipManagerConfig
from rlskip.config.settings import read_skip


@dataclass
class Host:
    """An application that declares the node with its type, and defaults of its own."""

    a: int = 1
    skip: SkipManagerConfig = field(
        default_factory=lambda: SkipManagerConfig(steps="9", dump_dir="/host", wait_s=5.0)
    )


@dataclass
class OptionalHost:
    a: int = 1
    skip: SkipManagerConfig | None = None


OWN = """
skip:
  steps: 1-3
  dump_dir: /own
  action: repeat
  rollout: {n: 4, action: cache}
  reward: {enable: true, n: 2}
"""
OPTION = "{skip: rollout_repeat}"
EXPERIMENT = """
# @package _global_
defaults: [override /skip: rollout_repeat]
skip: {steps: 7, rollout: {action: repeat}}
"""


@attrs.frozen
class Way:
    """A defaults list, with further configs, and what wins: steps, directory and action."""

    defaults: str
    steps: str
    action: str
    dump_dir: str = "/own"
    chosen: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


WAYS = {
    "command line": Way(
        "_self_", "5,7-9:2", "repeat", chosen=("+skip=rollout_repeat", 'skip.steps="5,7-9:2"')
    ),
    "before _self_": Way(f"{OPTION}, _self_", "1-3", "cache"),
    "after _self_": Way(f"_self_, {OPTION}", "1-3", "repeat"),
    "experiment": Way(
        "{skip: rollout_cache}, _self_, {experiment: e}", "7", "repeat",
        files=(("experiment/e", EXPERIMENT),),
    ),
    "experiment, by the command": Way(
        "{skip: rollout_cache}, _self_", "7", "repeat",
        chosen=("+experiment=e",), files=(("experiment/e", EXPERIMENT),),
    ),
    "typed host": Way(f"ways_host, {OPTION}, _self_", "1-3", "cache"),
    "typed host, optional": Way(f"ways_optional_host, {OPTION}, _self_", "1-3", "cache"),
    "another package": Way(
        "_self_, {skip: rollout_cache}, {trainer: long}", "1-3", "repeat",
        files=(("trainer/long", "defaults: [override /skip@_global_.skip: rollout_repeat]\n"),),
    ),
}  # fmt: skip
# Typed by the command, in every way.
TYPED = (
    "skip.action=cache", "skip.prompt_len=64", "skip.rollout.keep_last=2",
    "skip.rollout.enable=true", "skip.values.enable=true",
)  # fmt: skip


def won(way: Way, *, schema: bool) -> dict[str, Any]:
    """What is read, with or without `rlskip_schema/skip` as the first entry."""
    for name, host in (("ways_host", Host), ("ways_optional_host", OptionalHost)):
        ConfigStore.instance().repo.pop(f"{name}.yaml", None)  # Hydra 1.4 warns of a second one
        ConfigStore.instance().store(name, host)
    defaults = f"rlskip_schema/skip, {way.defaults}" if schema else way.defaults
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("config", f"defaults: [{defaults}]{OWN}"), *way.files):
            file = Path(folder, f"{name}.yaml")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.lstrip(), encoding="utf-8")
        with initialize_config_dir(folder, version_base=None):
            config = compose("config", [*way.chosen, *TYPED], return_hydra_config=True)
            settings = read_skip(config)
    rollout, reward, values = (settings.roles[name] for name in ("rollout", "reward", "values"))
    return {
        "rollout": [str(rollout.steps), rollout.dump_dir, rollout.action, rollout.n],
        "typed": [rollout.prompt_len, rollout.keep_last, values.prompt_len],
        "reward": [str(reward.steps), reward.n, reward.action],
        "callback": "rlskip" in config.hydra.callbacks,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {way: [won(WAYS[way], schema=schema) for schema in (False, True)] for way in WAYS}
    print(json.dumps(found))
