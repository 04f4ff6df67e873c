"""The run's config, kept next to its dumps: a later run names from it what has changed since.

    {run}/.config/{hash}.json

One file per content. Values that may be secrets are masked.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlskip._files import open_folder
from rlskip.config.check import leaves, readable
from rlskip.store.identity import ABSENT

FOLDER = ".config"
MASKED = "<masked>"
_MAX_FILE = 1 << 24
_SECRET = re.compile(r"secret|passw|credential|(^|[._])(\w+_)?(auth|token|api_?key|key)$")
# Keys that name a field of the data, or one of the tokenizer's tokens.
_NO_SECRET = re.compile(
    r"(prompt|response|image|video|audio|reward_fn|(in|out)put|text|question|answer|label)_key$"
    r"|(bos|eos|pad|unk|mask|sep|cls|stop|special|image|video|audio)_token$"
)
# What is masked wherever it occurs is at least as long: a short text is in many others.
_LONG = 8
_REFERENCE = re.compile(r"\$\{\s*(hydra:)?([\w.]+)\s*\}")
_LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")
_ENVIRONMENT = re.compile(r"\$\{\s*(oc\.)?(env|decode)\b")


def flat_config(config: Any) -> dict[str, Any]:
    """Every leaf of a config as plain JSON by its dotted key.

    Masked are the values of keys that look like secrets, look-ups of environment variables, and
    whatever contains one of these texts, if that is long.
    """
    found = {key: _plain(value) for key, value in leaves(readable(config))}
    raw = dict(leaves(config, resolve=False))
    masked = {
        key
        for key, value in found.items()
        if _is_secret(key) or _ENVIRONMENT.search(str(raw.get(key))) or _LOGIN.search(str(value))
    }
    texts = [text for key in masked if isinstance(text := found[key], str) and len(text) >= _LONG]
    for key, value in found.items():
        if value is not None and (key in masked or any(text in str(value) for text in texts)):
            found[key] = MASKED
    return found


def value_in(flat: Mapping[str, Any], key: str) -> Any:
    """A key or a node of such a config; ``ABSENT`` if it is not there, or masked."""
    below = {k.removeprefix(f"{key}."): v for k, v in flat.items() if k.startswith(f"{key}.")}
    value = flat.get(key, below or ABSENT)
    return ABSENT if MASKED in str(value) else value


def holds_time(config: Any, key: str) -> bool:
    """Whether the value of a key has in it what ``${now:}`` gives, by way of other keys, too."""
    raw = dict(leaves(config, resolve=False))
    due = [key]
    many = "MULTIRUN" in str(raw.get("hydra.mode"))
    raw["hydra.runtime.output_dir"] = "${hydra.%s.dir}" % ("sweep" if many else "run")
    for name in due:  # grows
        found = _REFERENCE.findall(str(raw.get(name)))
        others = (f"{of_hydra and 'hydra.'}{other}" for of_hydra, other in found)
        due += [other for other in others if other not in due]
    return any("${now:" in str(raw.get(name)) for name in due)


def keep_config(directory: Path, flat: Mapping[str, Any]) -> str:
    """Write the config to the run's directory unless it is there; returns its hash."""
    data = json.dumps(flat, sort_keys=True, indent=1).encode()
    name = xxhash.xxh3_128_hexdigest(data)
    with open_folder(directory, FOLDER, create=True) as folder:
        if f"{name}.json" not in folder.names():
            staged = f".{name}.{secrets.token_hex(4)}"  # calls may be side by side
            with folder.open(staged, "x") as file:
                file.write(data)
            os.replace(staged, f"{name}.json", src_dir_fd=folder.handle, dst_dir_fd=folder.handle)
    return name


@functools.lru_cache(maxsize=8)
def read_config(directory: Path, name: str) -> dict[str, Any]:
    """A kept config; raises OSError or ValueError if it cannot be read."""
    with open_folder(directory, FOLDER) as folder:
        flat = json.loads(folder.read(f"{name}.json", _MAX_FILE))
    if not isinstance(flat, dict):
        raise ValueError(f"{name}.json does not hold a mapping")
    return flat


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ between two kept configs; masked ones cannot be compared."""
    pairs = {key: (then.get(key), now.get(key)) for key in {*then, *now}}
    return sorted(key for key, (a, b) in pairs.items() if a != b and MASKED not in (a, b))


def _is_secret(key: str) -> bool:
    key = key.lower()
    return bool(_SECRET.search(key) and not _NO_SECRET.search(key))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): MASKED if _is_secret(str(k)) else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    return f"<{type(value).__qualname__}>"  # its text might hold an address, new in every run
