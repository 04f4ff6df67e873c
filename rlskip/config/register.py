"""What Hydra must know before an application composes its config, and the job's own.

Every Hydra application of the environment imports this at its start, so it imports almost nothing
else of rlskip.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import rlskip_conf

#: rlskip's keys at the top of a config, each a mapping, with a group of options that set it.
NODES = ("skip", "dispatch", "replay", "merge", "record")

#: The directory of the option files.
OPTIONS = os.path.dirname(rlskip_conf.__file__)

#: The group of the nodes' schemas, and of what the options start from.
SCHEMAS = "rlskip_schema"


def options(group: str) -> list[str]:
    """The names of rlskip's own options of a group."""
    return [name.removesuffix(".yaml") for name in os.listdir(f"{OPTIONS}/{group}")]


def hydra_config() -> Any:
    """Hydra's runtime config of the present job; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    return None if module is None else module.HydraConfig.instance().cfg
