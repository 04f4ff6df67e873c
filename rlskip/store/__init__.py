"""Step dumps on disk: whole or absent, verified, compressed, and never pickled.

>>> store = StepStore(run_directory("dumps", "exp", "proj", 32, 8, 1024, 4096))
>>> store.save(3, rollouts, identity=Identity(prompts=fingerprint(prompts), n=8))
>>> store.load(3)

``docs/store.md`` has the format.
"""

from rlskip.store import batches, plain, tensors  # noqa: F401 - they add their kinds
from rlskip.store.codec import register_codec
from rlskip.store.errors import (
    AbsentDumpError,
    CorruptDumpError,
    DumpError,
    NewerFormatError,
    UnknownTypeError,
    UnsupportedTypeError,
)
from rlskip.store.identity import VOLATILE, Identity, fingerprint
from rlskip.store.layout import run_directory
from rlskip.store.lease import Lease, SingleFlight
from rlskip.store.meta import DumpMeta
from rlskip.store.ranks import RankGroup, RankTimeoutError
from rlskip.store.steps import StepStore
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
