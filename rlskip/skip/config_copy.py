"""The run's config, kept next to its dumps, so that a later run can name what has changed.

::

    {run}/.config/{hash}.json

One file per content. Values that may be secrets are masked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlskip._files import open_folder
from rlskip.config.check import leaves

FOLDER = ".config"
MASKED = "<masked>"
_MAX_FILE = 1 << 24
_SECRET = re.compile(r"secret|passw|credential|(^|[._])(\w+_)?(auth|token|api_?key|key)$")
_NAMES_A_FIELD = re.compile(r"(prompt|response|image|video|audio|reward_fn)_key$")
_LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")
_ENVIRONMENT = re.compile(r"\$\{\s*(oc\.)?(env|decode)\b")


def flat_config(config: Any) -> dict[str, Any]:
    """Every leaf of a config as plain JSON by its dotted key, secrets masked.

    The values of keys that look like secrets, look-ups of environment variables, and every text
    that contains one of these values are masked.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    found = {key: _plain(value) for key, value in leaves(config)}
    raw = dict(leaves(config, resolve=False))
    masked = {
        key
        for key in found
        if _is_secret(key)
        or _ENVIRONMENT.search(str(raw.get(key, ""))) is not None
        or _LOGIN.search(str(found[key])) is not None
    }
    secrets = {str(found[key]) for key in masked if len(str(found[key])) >= 4}
    for key, value in found.items():
        if value is not None and (key in masked or any(s in str(value) for s in secrets)):
            found[key] = MASKED
    return found


def keep(directory: Path, flat: Mapping[str, Any]) -> str:
    """Write the config to the run's directory unless it is there; returns its hash.

    Raises
    ------
    OSError
        It cannot be written.
    """
    data = json.dumps(flat, sort_keys=True, indent=1).encode()
    name = xxhash.xxh3_128_hexdigest(data)
    with open_folder(directory, FOLDER, create=True) as folder:
        if f"{name}.json" not in folder.names():
            staged = f".{name}.{os.getpid()}"
            with folder.open(staged, "w") as file:
                file.write(data)
            os.replace(staged, f"{name}.json", src_dir_fd=folder.handle, dst_dir_fd=folder.handle)
    return name


def read(directory: Path, name: str) -> dict[str, Any]:
    """A kept config.

    Raises
    ------
    OSError, ValueError
        It cannot be read.
    """
    with open_folder(directory, FOLDER) as folder:
        flat = json.loads(folder.read(f"{name}.json", _MAX_FILE))
    if not isinstance(flat, dict):
        raise ValueError(f"{name}.json does not hold a mapping")
    return flat


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ between two kept configs; masked ones cannot be compared."""
    return sorted(
        key
        for key in {*then, *now}
        if then.get(key) != now.get(key) and MASKED not in (then.get(key), now.get(key))
    )


def _is_secret(key: str) -> bool:
    key = key.lower()
    return _SECRET.search(key) is not None and _NAMES_A_FIELD.search(key) is None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): MASKED if _is_secret(str(k)) else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__qualname__}>"  # its text might hold an address, new in every run
