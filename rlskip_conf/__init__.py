"""Option files; a package, because Hydra finds configs through imports (pkg://)."""

import os

#: The directory of the option files.
OPTIONS = os.path.dirname(__file__)

#: rlskip's keys at the top of a config, each a mapping, with a group of options that set it.
NODES = ("skip", "dispatch", "replay", "merge", "record")

#: The group of the nodes' schemas, and of what the options start from.
SCHEMAS = "rlskip_schema"


def options(group: str) -> list[str]:
    """The names of rlskip's own options of a group."""
    return [name.removesuffix(".yaml") for name in os.listdir(f"{OPTIONS}/{group}")]
