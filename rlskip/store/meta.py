"""``meta.json``: what a dump is, sealed against edits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs
import xxhash

from rlskip.format.dump_errors import (
    DAMAGE,
    VERSION,
    CorruptDumpError,
    UnsupportedTypeError,
    check_version,
)
from rlskip.store.identity import Identity

MAX_META = 1 << 24
"""Bytes of a ``meta.json``."""
# Of the identity and the info together: what else there is takes less than the rest.
_MAX_BOTH = MAX_META - (1 << 12)
_GENERATION = re.compile(r"[0-9a-f]{1,15}")
_encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def kept_info(info: Mapping[str, Any], identity: Identity | None) -> dict[str, Any]:
    """`info` as ``meta.json`` keeps it beside `identity`, or UnsupportedTypeError."""
    try:
        text = json.dumps(dict(info))
        plain: dict[str, Any] = json.loads(text)
        _check_info(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedTypeError(f"cannot keep this info: {error}", "info") from error
    nbytes = len(text) + len(json.dumps(identity.as_json() if identity else None))
    if nbytes > _MAX_BOTH:
        raise UnsupportedTypeError(
            f"the identity and the info take {nbytes} bytes, and meta.json holds {_MAX_BOTH}",
            "info" if 2 * len(text) > nbytes else "identity",
            "record a hash of what is large, or store it with the rollouts",
        )
    return plain


def _check_info(info: Mapping[str, Any]) -> None:
    """Raise ValueError where entries that rlskip itself reads are not of their type."""
    seconds, generation = info.get("seconds", 0), info.get("generation", "0")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"info['seconds'] is {seconds!r:.80}, not a number of seconds")
    if type(place := info.get("place", 0)) is not int or place < 0:
        raise ValueError(f"info['place'] is {place!r:.80}, not a number of calls before")
    if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
        raise ValueError(f"info['generation'] is {generation!r:.80}, not up to 15 hex digits")


@attrs.frozen
class DumpMeta:
    """A dump's ``meta.json``; `step`, `call`, `rank` and `world_size` are its place."""

    step: int
    #: The one in the tail of ``gen_batch.dp``.
    checksum: str
    #: Size of the rollouts' arrays in memory, and of the file, in bytes.
    nbytes: int
    stored: int
    #: UTC, ISO 8601.
    created: str
    call: str = ""
    rank: int = 0
    world_size: int = 1
    #: What the rollouts were generated from; None when the caller gave none.
    identity: Identity | None = None
    #: JSON that the caller adds, such as the job's id. rlskip itself reads ``seconds`` (what the
    #: stage took, a finite number from 0 on), ``place`` (of the call among those of its step) and
    #: ``generation`` (of several ranks, up to 15 hex digits).
    info: Mapping[str, Any] = attrs.field(factory=dict)
    version: int = VERSION

    def __attrs_post_init__(self) -> None:
        """Raise ValueError or TypeError for an entry of another type: a file's may be anything."""
        numbers = self.step, self.nbytes, self.stored, self.rank, self.world_size, self.version
        kinds = {*map(type, numbers)}, {type(self.checksum), type(self.call)}, {type(self.info)}
        if kinds != ({int}, {str}, {dict}) or not 0 <= min(numbers) <= max(numbers) < 1 << 63:
            raise ValueError("an entry is of another type")
        if datetime.fromisoformat(self.created).tzinfo is None:
            raise ValueError(f"{self.created!r} has no time zone")
        _check_info(self.info)

    def to_bytes(self) -> bytes:
        plain = attrs.asdict(self, recurse=False)
        if self.identity is not None:
            plain["identity"] = self.identity.as_json()
        return json.dumps({**plain, "seal": _seal(plain)}).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> DumpMeta:
        """Read it back.

        Raises :class:`CorruptDumpError` or :class:`OtherFormatError`; RecursionError if the stack
        of this process is exhausted.
        """
        try:
            plain = json.loads(data)
            version = plain["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptDumpError("meta.json cannot be read", where=where) from error
        check_version(version, where)
        if plain.pop("seal", None) != _seal(plain):
            raise CorruptDumpError("meta.json was altered", where=where)
        try:
            if plain.get("identity") is not None:
                plain["identity"] = Identity.from_json(plain["identity"])
            return cls(**plain)
        except DAMAGE as error:  # a file's entries may be anything
            raise CorruptDumpError("meta.json has invalid entries", where=where) from error


def _seal(plain: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_encoded(plain).encode())
