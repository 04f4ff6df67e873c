"""``meta.json``: what a dump says about itself, sealed against edits."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs
import xxhash
from attrs.validators import ge, instance_of, optional

from rlskip.store.container import VERSION, check_version
from rlskip.store.errors import CorruptDumpError
from rlskip.store.identity import Identity

MAX_META = 1 << 24
_COUNT = [instance_of(int), ge(0)]


def _is_time(meta: DumpMeta, field: attrs.Attribute, value: str) -> None:
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError(f"{value!r} names no time zone")


@attrs.frozen
class DumpMeta:
    """A dump's ``meta.json``.

    Parameters
    ----------
    step, inner, rank, world_size
        The place it was written for.
    checksum
        Of ``gen_batch.dp``.
    nbytes, stored
        Size of the rollouts' arrays in memory, and of the file, in bytes.
    created
        UTC, ISO 8601.
    identity
        What the rollouts were generated from; None when the caller gave none.
    info
        JSON that the caller keeps beside: generation seconds, run id, ...
    version
        Of the format.
    """

    step: int = attrs.field(validator=_COUNT)
    checksum: str = attrs.field(validator=instance_of(str))
    nbytes: int = attrs.field(validator=_COUNT)
    stored: int = attrs.field(validator=_COUNT)
    created: str = attrs.field(validator=_is_time)
    inner: int | None = attrs.field(default=None, validator=optional(_COUNT))
    rank: int = attrs.field(default=0, validator=_COUNT)
    world_size: int = attrs.field(default=1, validator=_COUNT)
    identity: Identity | None = attrs.field(default=None, validator=optional(instance_of(Identity)))
    info: Mapping[str, Any] = attrs.field(factory=dict, validator=instance_of(dict))
    version: int = attrs.field(default=VERSION, validator=_COUNT)

    def to_bytes(self) -> bytes:
        plain = attrs.asdict(self)
        plain["seal"] = _seal(plain)
        return json.dumps(plain, indent=2, allow_nan=True).encode() + b"\n"

    @classmethod
    @functools.lru_cache(maxsize=4)  # a hit reads it twice: to look, and to load
    def from_bytes(cls, data: bytes, where: str) -> DumpMeta:
        """Read it back; raises :class:`CorruptDumpError` or :class:`NewerFormatError`."""
        try:
            plain = json.loads(data)
            version = plain["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptDumpError("meta.json cannot be read", where=where) from error
        check_version(version, where)
        try:
            if plain.pop("seal", None) != _seal(plain):
                raise CorruptDumpError("meta.json was altered", where=where)
            if plain["identity"] is not None:
                plain["identity"] = Identity.from_json(plain["identity"])
            return cls(**plain)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, CorruptDumpError):
                raise
            raise CorruptDumpError("meta.json has other entries", where=where) from error


def _seal(plain: Mapping[str, Any]) -> str:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())
