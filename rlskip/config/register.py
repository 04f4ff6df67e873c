"""What Hydra and OmegaConf must know before an application composes its config.

Every Hydra application of the environment imports this at its start, so it imports almost
nothing else of rlskip: the schema with every default is a file,
``rlskip_conf/rlskip_schema/skip.yaml``, which is read only by an application that uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import rlskip_conf
from rlskip._compat import register_resolver, store_config

#: rlskip's keys at the top of a config, each a mapping, with a group of options that set it.
NODES = ("skip", "dispatch", "replay", "merge", "record")

# Not a group that users choose from, so that nothing in it is listed as an option.
GROUP = "rlskip_schema"


def register() -> None:
    """Put the open node into Hydra's ConfigStore and the resolvers into OmegaConf.

    ``rlskip_schema/open`` is an empty node whose struct flag is off. An option that starts from
    it makes ``skip.steps=...`` work without ``++`` and sets nothing, so the values in a user's
    own YAML are kept. rlskip's validation finds typos, not struct mode. The node is untyped,
    because hosts convert theirs with their own classes.

    May be called several times.
    """
    store_config(GROUP, "open", OmegaConf.create({}, flags={"struct": False}), "rlskip")
    register_steps()


def options(group: str) -> list[str]:
    """The names of rlskip's own options of a group."""
    return [file.stem for file in Path(rlskip_conf.__file__).parent.glob(f"{group}/*.yaml")]


def register_steps() -> None:
    """Make ``${rlskip.steps:1-3,7}`` resolve, also where Hydra looks for no plug-in."""
    register_resolver("rlskip.steps", _resolve_steps)


def _resolve_steps(*items: Any) -> Any:
    from rlskip.config.steps import resolve_steps

    return resolve_steps(*items)
