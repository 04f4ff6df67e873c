"""The reader of each node and its dataclass, for tests that hold for every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlskip import DispatchConfig, MergeConfig, RecordConfig, ReplayConfig, SkipManagerConfig
from rlskip.config.dispatch import read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.record import read_record
from rlskip.config.replay import read_replay
from rlskip.config.settings import read_skip

READERS: dict[str, Callable[[Any], Any]] = {
    "skip": read_skip,
    "dispatch": read_dispatch,
    "replay": read_replay,
    "merge": read_merge,
    "record": read_record,
}
SCHEMAS: dict[str, type] = {
    "skip": SkipManagerConfig,
    "dispatch": DispatchConfig,
    "replay": ReplayConfig,
    "merge": MergeConfig,
    "record": RecordConfig,
}
