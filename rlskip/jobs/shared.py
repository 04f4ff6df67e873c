"""Whether several processes see one directory: one writes a token, and the others look for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

TOKEN = ".rlskip-shared-"
PATIENCE_S = 5.0
"""A network file system may show a new file that late."""


@contextlib.contextmanager
def token_in(directory: str | Path) -> Iterator[int]:
    """Within the block `directory` holds a token; its number, 0 where none can be written."""
    number = secrets.randbits(60) + 1
    token = _path(directory, number)
    try:
        os.makedirs(directory, exist_ok=True)
        token.touch(exist_ok=False)
    except OSError:
        number = 0
    try:
        yield number
    finally:
        if number:
            with contextlib.suppress(OSError):
                token.unlink()


def sees_token(directory: str | Path, number: int) -> bool:
    """Whether the token is there; waits `PATIENCE_S` seconds for it. True for number 0."""
    deadline = time.monotonic() + PATIENCE_S
    # Looked at again and again: NFS keeps for seconds that a file was not there.
    while number and not os.path.exists(_path(directory, number)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _path(directory: str | Path, number: int) -> Path:
    return Path(directory) / f"{TOKEN}{number:015x}"
