"""What Hydra must know before an application composes its config, and the job's own.

Every Hydra application of the environment imports this at its start, so it imports almost nothing
else of rlskip.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rlskip_conf

#: rlskip's keys at the top of a config, each a mapping, with a group of options that set it.
NODES = ("skip", "dispatch", "replay", "merge", "record")

#: The group of the nodes' schemas, and of what the options start from.
SCHEMAS = "rlskip_schema"


def options(group: str) -> list[str]:
    """The names of rlskip's own options of a group."""
    return [file.stem for file in Path(rlskip_conf.__file__).parent.glob(f"{group}/*.yaml")]


def hydra_config() -> Any:
    """Hydra's runtime config of the present job; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    return None if module is None else module.HydraConfig.instance().cfg
