"""Values that name a directory: where dumps are stored."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from rlskip.errors import ConfigError

DEFAULT_DUMP_DIR = "~/.rlskip/rollout_dump"

# For the processes that a job starts: the directory that a relative dump_dir refers to.
DIRECTORY_VARIABLE = "RLSKIP_DIRECTORY"

_MAX_NAME = 255  # bytes, on Linux's file systems
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def parse_dump_dir(value: str | Path, key: str = "skip.dump_dir") -> Path:
    """`value`, that of config key `key`, as a path with ``~`` expanded; a relative one stays so."""
    text = str(value)
    if not text.strip():
        raise ConfigError("it is empty", key, "name a directory (is a shell variable unset?)")
    if _URL.match(text):
        what = f"{text!r} is a URL, and not a directory of a file system"
        raise ConfigError(what, key, "mount the storage and name its path, e.g. /mnt/dumps")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ConfigError(f"{text!r}: {error}", key, "name the directory in full") from error
    if long := [part for part in path.parts if len(os.fsencode(part)) > _MAX_NAME]:
        what = f"the name {long[0]:.40}... in it is longer than {_MAX_NAME} bytes"
        raise ConfigError(what, key, "shorten it")
    return path


def parse_directory(value: str | Path, key: str) -> str:
    """As :func:`parse_dump_dir`; a relative path starts at :func:`original_directory`."""
    return str(original_directory() / parse_dump_dir(value, key))


def hydra_config() -> Any:
    """Hydra's runtime config of the present job; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    return None if module is None else module.HydraConfig.instance().cfg


def original_directory() -> Path:
    """Where the user typed the command: Hydra may have changed the working directory since."""
    job = hydra_config()
    # In a process that the job started, the callback has set the variable.
    typed_in = job.hydra.runtime.cwd if job else os.environ.get(DIRECTORY_VARIABLE)
    return Path(typed_in or os.getcwd())
