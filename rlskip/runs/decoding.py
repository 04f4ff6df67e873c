"""Tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlskip.errors import RlskipError


class Decoder:
    """Tokens as text, by a local tokenizer.

    Raises
    ------
    RlskipError
        transformers is not installed, or the path is not that of a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RlskipError(
                "decoding needs transformers", "--tokenizer", "pip install transformers"
            ) from error
        if not path.is_dir():
            raise RlskipError("no such directory", str(path), "give a local tokenizer's directory")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise RlskipError(f"it is not a tokenizer: {reason}", str(path)) from error

    def __call__(self, tokens: Sequence[int]) -> str:
        known = [t for t in tokens if 0 <= t < len(self._tokenizer)]
        return str(self._tokenizer.decode(known))
