"""Whether a role can keep what it has to generate: checked when the job starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlskip.errors import ConfigError
from rlskip.skip.role import BaseSkip, SkipAction


def check_writable(skip: BaseSkip) -> None:
    """Refuse a directory that cannot be written, unless every listed step can be replayed from it.

    Roles without a directory of dumps and roles that never generate (``on_miss: error``) pass.

    Raises
    ------
    ConfigError
        Names ``skip.dump_dir`` and what the file system reported.
    """
    local = skip.local_config
    directory = getattr(skip, "directory", None)
    if directory is None or local.on_miss == "error":
        return
    reason = cannot_write(directory)
    if reason is not None and not _replays_everything(skip):
        raise ConfigError(
            f"{local.dump_dir} cannot be written ({reason}), and role {skip.role} has steps "
            "without a dump there",
            "skip.dump_dir",
            "name a directory that can be written; to use only the dumps that are there, set "
            "skip.on_miss=error",
        )


def refuse_shared_directories(instances: Mapping[str, BaseSkip]) -> None:
    """Refuse two roles whose dumps would be in one directory."""
    owners: dict[Any, str] = {}
    for role, instance in instances.items():
        directory = getattr(instance, "directory", None)
        if directory is not None and owners.setdefault(directory, role) != role:
            raise ConfigError(
                f"roles {owners[directory]} and {role} would both have their dumps in {directory}",
                f"skip.{role}.dump_dir",
                f"give one of them another directory: skip.{role}.dump_dir=/another/directory",
            )


def cannot_write(directory: Path) -> str | None:
    """Why `directory`, or the part of it that exists, cannot be written; None if it can."""
    while not os.path.lexists(directory) and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".rlskip-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _replays_everything(skip: BaseSkip) -> bool:
    store = getattr(skip, "store", None)
    if store is None:
        return False
    there = {*store.steps(), *store.steps(part=0)}
    if skip.local_config.action == SkipAction.REPEAT:
        return bool(there)
    steps = skip.local_config.steps
    return not steps.everything and not steps.ranges and steps.singles <= there
