"""Step dumps on disk: complete or absent, verified, compressed, and never pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip.format.dump_errors import (
    AbsentDumpError,
    CorruptDumpError,
    DumpError,
    OtherFormatError,
    TooLargeDumpError,
    UnknownTypeError,
    UnsupportedTypeError,
)
from rlskip.jobs.ranks import RankTimeoutError
from rlskip.store.identity import Identity
from rlskip.store.layout import run_directory
from rlskip.store.meta import DumpMeta

if TYPE_CHECKING:
    from rlskip.format.fingerprint import fingerprint
    from rlskip.format.kinds import register_codec
    from rlskip.store.step_store import StepStore
    from rlskip.store.writer import WriterTimeoutError

__all__ = [
    "AbsentDumpError",
    "CorruptDumpError",
    "DumpError",
    "DumpMeta",
    "Identity",
    "OtherFormatError",
    "RankTimeoutError",
    "StepStore",
    "TooLargeDumpError",
    "UnknownTypeError",
    "UnsupportedTypeError",
    "WriterTimeoutError",
    "fingerprint",
    "register_codec",
    "run_directory",
]
__getattr__ = load_on_use(
    __name__,
    {
        "rlskip.format.fingerprint": ["fingerprint"],
        "rlskip.format.kinds": ["register_codec"],
        "rlskip.store.step_store": ["StepStore"],
        "rlskip.store.writer": ["WriterTimeoutError"],
    },
)
