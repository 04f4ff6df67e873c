"""The `record` node: which stages are recorded, at which steps, and how much of their values."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlskip.config.check import look_up
from rlskip.config.dump_dir import DEFAULT_DUMP_DIR, parse_directory
from rlskip.config.nodes import chosen_options, find_node, read_node
from rlskip.config.steps import Steps
from rlskip.errors import ConfigError, RlskipError

log = logging.getLogger(__name__)


def _parse_stages(value: Any, key: str) -> list[str]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(n, str) and n for n in names):
        return ["*"] if names == ["all"] else names
    what = f"expected names or patterns, got {value!r}"
    raise ConfigError(what, key, "write [advantages, actor/*], or all")


@dataclass
class RecordConfig:
    """What :func:`rlskip.record` keeps."""

    # Whether anything is recorded.
    enable: bool = False

    # Names of stages, or patterns such as ``actor/*``; a list, a string with commas, or all.
    stages: Any = field(default="all", metadata={"parse": _parse_stages})

    # Steps that are recorded: a list of ints, a string such as "1-128,200,300-400:10", or all.
    steps: Any = field(default="all", metadata={"parse": Steps.parse})

    # all: whole values, so that a difference is named by row and token. digest: of each row a
    # checksum and moments, which take a few bytes.
    values: str = field(default="all", metadata={"choices": ("all", "digest")})

    # How many steps of a job to keep, the last written; null: all.
    keep_last: int | None = field(default=None, metadata={"min": 1})

    # Directory of the records; null: skip.dump_dir. ~ is expanded; a relative path starts at the
    # original working directory.
    dump_dir: str | None = field(default=None, metadata={"parse": parse_directory})


def read_record(config: Any) -> RecordConfig:
    """The `record` node of a config, as :func:`~rlskip.config.nodes.read_node` reads it.

    If it is on, it is complete: ``stages`` is a list of names and patterns, ``steps`` a
    :class:`Steps`, ``dump_dir`` an absolute path.
    """
    settings = read_node(RecordConfig, "record", config)
    if settings.enable and settings.dump_dir is None:
        dumps = look_up(config, "skip.dump_dir") or DEFAULT_DUMP_DIR
        settings.dump_dir = parse_directory(str(dumps), "skip.dump_dir")
    return settings


def read_record_of(config: Any) -> RecordConfig | None:
    """As :func:`read_record`; None without such a node, or with one that is not rlskip's.

    A DictConfig is an application's, whose own key may be called `record`. Which options were
    chosen is not known here.
    """
    try:
        return None if find_node(config, "record") is None else read_record(config)
    except RlskipError as error:
        if not isinstance(config, DictConfig):
            raise
        log.warning("rlskip: `record` is taken for the application's own key: %s", error)
        return None


def record_chosen_by(config: Any, *, enabled: bool = False) -> str | None:
    """The option or key by which the node `record` of a job is rlskip's; None where it is not.

    Without an option, a node with a key that rlskip does not know is the application's own.
    `config` is the job's, or Hydra's runtime config, where the parent of `hydra` is the job's. With
    `enabled`, a node that does not enable recording is none.
    """
    node = OmegaConf.select(config["hydra"], "..record", throw_on_resolution_failure=False)
    if enabled and look_up(node, "enable") is not True:
        return None
    if chosen := chosen_options(config, "record"):
        return f"record: {chosen[0][0]}"
    known = {field.name for field in dataclasses.fields(RecordConfig)}
    return "record.enable: true" if OmegaConf.is_dict(node) and known.issuperset(node) else None
