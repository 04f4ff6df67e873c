"""The reader of each node and its dataclass, for tests that hold for every node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlskip import DispatchConfig, MergeConfig, RecordConfig, ReplayConfig, SkipManagerConfig
from rlskip.config.nodes import read_node, read_record
from rlskip.config.settings import read_skip

READERS: dict[str, Callable[[Any], Any]] = {
    "skip": read_skip,
    "dispatch": partial(read_node, DispatchConfig),
    "replay": partial(read_node, ReplayConfig),
    "merge": partial(read_node, MergeConfig),
    "record": read_record,
}
SCHEMAS: dict[str, type] = {
    "skip": SkipManagerConfig,
    "dispatch": DispatchConfig,
    "replay": ReplayConfig,
    "merge": MergeConfig,
    "record": RecordConfig,
}
