"""Tokens as text."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlskip.errors import RlskipError

Decode = Callable[[Sequence[int]], str]


class Decoder:
    """Tokens as text, by the tokenizer in a local directory, or an object with ``decode``.

    A tokenizer that has a length is not given larger ids. `skip_special` leaves special tokens
    out, as verl's and TRL's trainers do for their reward functions. Raises RlskipError where
    transformers is not installed, or the path is not that of a tokenizer.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool = False) -> None:
        is_path = isinstance(tokenizer, str | os.PathLike)
        self._tokenizer = _loaded(Path(tokenizer)) if is_path else tokenizer
        self._options = {"skip_special_tokens": True} if skip_special else {}

    def __call__(self, tokens: Sequence[int]) -> str:
        size = len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else math.inf
        known = [t for t in tokens if 0 <= t < size]
        return str(self._tokenizer.decode(known, **self._options))


decoder_at = functools.lru_cache(maxsize=1)(Decoder)
"""The decoder of the tokenizer in a directory; a second call for it loads nothing."""


def _loaded(path: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RlskipError(
            "decoding needs transformers", "--tokenizer", "pip install transformers"
        ) from error
    if not path.is_dir():
        raise RlskipError("no such directory", str(path), "give a local tokenizer's directory")
    try:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise RlskipError(f"it is not a tokenizer: {reason}", str(path)) from error
