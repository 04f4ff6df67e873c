"""Step dumps on disk: complete or absent, verified, compressed, and never pickled.

>>> store = StepStore(run_directory("dumps", "exp", "proj", 32, 8, 1024, 4096))
>>> store.save(3, rollouts, identity=Identity(prompts_hash=fingerprint(prompts), n=8))
>>> store.load(3)

``docs/store.md`` describes the format. Importing the package is light: torch loads when a name that
needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlskip.format.codec import register_codec
    from rlskip.format.dump_errors import (
        AbsentDumpError,
        CorruptDumpError,
        DumpError,
        NewerFormatError,
        UnknownTypeError,
        UnsupportedTypeError,
    )
    from rlskip.format.fingerprint import VOLATILE, fingerprint
    from rlskip.jobs.lease import Lease, SingleFlight
    from rlskip.jobs.ranks import RankGroup, RankTimeoutError
    from rlskip.store.identity import Identity
    from rlskip.store.layout import run_directory
    from rlskip.store.meta import DumpMeta
    from rlskip.store.step_store import StepStore
    from rlskip.store.writer import Writer, WriterTimeoutError

__all__ = [
    "VOLATILE",
    "AbsentDumpError",
    "CorruptDumpError",
    "DumpError",
    "DumpMeta",
    "Identity",
    "Lease",
    "NewerFormatError",
    "RankGroup",
    "RankTimeoutError",
    "SingleFlight",
    "StepStore",
    "UnknownTypeError",
    "UnsupportedTypeError",
    "Writer",
    "WriterTimeoutError",
    "fingerprint",
    "register_codec",
    "run_directory",
]

_ERRORS = "rlskip.format.dump_errors"
_HOME = {  # of the names that are not among these errors
    "VOLATILE": "rlskip.format.fingerprint",
    "DumpMeta": "rlskip.store.meta",
    "Identity": "rlskip.store.identity",
    "Lease": "rlskip.jobs.lease",
    "RankGroup": "rlskip.jobs.ranks",
    "RankTimeoutError": "rlskip.jobs.ranks",
    "SingleFlight": "rlskip.jobs.lease",
    "StepStore": "rlskip.store.step_store",
    "Writer": "rlskip.store.writer",
    "WriterTimeoutError": "rlskip.store.writer",
    "fingerprint": "rlskip.format.fingerprint",
    "register_codec": "rlskip.format.kinds",
    "run_directory": "rlskip.store.layout",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, _ERRORS)), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
