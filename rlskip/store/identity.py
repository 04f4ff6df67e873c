"""Whether a dump's rollouts are those that this run would generate.

Content counts, circumstance does not: the prompts, how many sessions each gets, the lengths
and the sampling must be equal; the model's name and the versions are recorded and only warn;
weights, step and learning rate never count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import xxhash

from rlskip.store.codec import Packer
from rlskip.store.errors import UnsupportedTypeError

VOLATILE = frozenset(
    {
        "uid",
        "uids",
        "request_id",
        "request_ids",
        "sample_id",
        "global_step",
        "global_steps",
        "meta_info",
        "timing",
    }
)
"""Fields of a batch that say when it was made, not what is in it."""


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in order, tuples as lists: as it reads back from JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(value[key]) for key in sorted(value, key=str)}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, np.generic):
            return value.item()
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    out: dict[str, Any] = plain(mapping)
    return out


@attrs.frozen
class Identity:
    """What a step was generated from. Values are plain JSON once constructed.

    Parameters
    ----------
    prompts
        :func:`fingerprint` of the prompts; None where they are not compared.
    n
        Sessions per prompt.
    prompt_len, response_len
        Limits in tokens.
    sampling
        Sampling parameters, e.g. ``{"temperature": 1.0, "top_p": 0.9}``.
    extra
        What a role or a user adds.
    model, versions
        Recorded; a difference only warns.
    """

    prompts: str | None = None
    n: int | None = None
    prompt_len: int | None = None
    response_len: int | None = None
    sampling: Mapping[str, Any] = attrs.field(factory=dict, converter=_plain)
    extra: Mapping[str, Any] = attrs.field(factory=dict, converter=_plain)
    model: str | None = None
    versions: Mapping[str, Any] = attrs.field(factory=dict, converter=_plain)

    def differences(self, other: Identity) -> tuple[list[str], list[str]]:
        """What keeps `other` (the dump's, say) from standing for this one, and what only warns.

        Each is a readable line such as ``sampling.temperature: 1.0 now, 0.7 in the dump``.
        """
        must: list[str] = []
        for name in ("n", "prompt_len", "response_len", "sampling", "extra"):
            must += _compare(name, getattr(self, name), getattr(other, name))
        if self.prompts != other.prompts:
            must.insert(
                0, f"prompts: {_short(self.prompts)} now, {_short(other.prompts)} in the dump"
            )
        warn = _compare("model", self.model, other.model)
        warn += _compare("versions", self.versions, other.versions)
        return must, warn

    def as_json(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        return cls(**data)


def _compare(name: str, now: Any, then: Any) -> list[str]:
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        return [
            line
            for key in sorted({*now, *then})
            for line in _compare(f"{name}.{key}", now.get(key, _ABSENT), then.get(key, _ABSENT))
        ]
    same = now == then and isinstance(now, bool) == isinstance(then, bool)
    return [] if same else [f"{name}: {_short(now)} now, {_short(then)} in the dump"]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- fingerprints ------------------------------------------------------------------------


def fingerprint(prompts: Any, volatile: Iterable[str] = VOLATILE) -> str:
    """Content hash of prompts of any kind that dumps keep; 32 hex digits.

    Independent of the order of a mapping's keys, of device, strides and of the `volatile` fields
    of the outermost mapping, or of its rows where the outermost is a sequence of mappings.
    Tensors and numpy arrays of one dtype and content are equal, and so are lists, tuples and
    object arrays; a DataProto counts by its fields, a TensorDict like a dict. Another dtype is
    another content: int32 prompts are not int64's.

    Raises
    ------
    UnsupportedTypeError
        Naming the place in the prompts of what has no codec.
    """
    try:
        return _hash(_without(frozenset(volatile), prompts))
    except UnsupportedTypeError as error:
        raise UnsupportedTypeError(
            error.what,
            f"prompts{error.where}",
            "leave it out of what is compared: annotate(prompts=...) names the argument that holds "
            "the prompts, or computes them; or teach the store this type: "
            "rlskip.store.register_codec(type, name, encode, decode)",
        ) from error


def _without(volatile: frozenset[str], prompts: Any) -> Any:
    if _is_batch_pair(prompts):
        prompts = {**_items(prompts.batch), **prompts.non_tensor_batch}
    if _is_mapping(prompts):
        return {key: value for key, value in _items(prompts).items() if key not in volatile}
    rows = _rows(prompts)
    if rows and all(_is_mapping(row) for row in rows):
        return [_without(volatile, row) for row in rows]
    return prompts


def _rows(value: Any) -> Sequence[Any]:
    """The parts of a sequence of any kind; none of anything else."""
    if hasattr(value, "tensordicts"):
        return value.tensordicts  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value.reshape(-1))
    return value if isinstance(value, list | tuple) else ()


def _hash(value: Any) -> str:
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.hexdigest()


def _is_batch_pair(value: Any) -> bool:
    return hasattr(value, "non_tensor_batch") and hasattr(value, "batch")


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not hasattr(value, "tensordicts")


def _items(mapping: Any) -> dict[Any, Any]:
    if mapping is None:
        return {}
    if isinstance(mapping, Mapping) and not hasattr(mapping, "_get_str"):
        return dict(mapping)
    return {key: mapping._get_str(key, None) for key in list(mapping.keys())}


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    """Append `value`, each part prefixed with its sort and length so that none run together."""

    def put(sort: str, *data: Any) -> None:
        views = [memoryview(part).cast("B") for part in data if len(part)]
        digest.update(f"{sort}:{sum(map(len, views))};".encode())
        for view in views:
            digest.update(view)

    def put_all(sort: str, parts: Sequence[Any]) -> None:
        put(f"{sort} {len(parts)}")
        for i, part in enumerate(parts):
            _feed_part(digest, i, part)

    if isinstance(value, torch.Tensor) and value.is_nested:
        put_all("nested", list(value.unbind()))
    elif isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        put(f"array {name} {list(value.shape)}", plain.view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        flat = np.ascontiguousarray(value).reshape(-1)
        name = value.dtype.name if value.dtype.kind in "biufc" else value.dtype.str
        put(f"array {name} {list(value.shape)}", flat.view(np.uint8))
    elif _is_mapping(value):
        items = _items(value)
        put(f"mapping {len(items)}")
        for key in sorted(items, key=lambda key: (type(key).__name__, str(key))):
            _feed(digest, key)
            _feed_part(digest, key, items[key])
    elif hasattr(value, "tensordicts"):
        put_all("sequence", _rows(value))
    elif hasattr(value, "data") and hasattr(value, "batch_size"):  # NonTensorData
        _feed(digest, value.data)
    elif isinstance(value, list | tuple | np.ndarray):
        put_all("sequence", _rows(value))
    elif isinstance(value, set | frozenset):
        put("set", "".join(sorted(map(_hash, value))).encode())
    elif isinstance(value, str):
        put("str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        put("bytes", value)
    elif isinstance(value, np.generic):
        _feed(digest, np.asarray(value))
    elif value is None or isinstance(value, bool | int | float | complex):
        put(type(value).__name__, repr(value).encode())
    else:
        # Of any other type what a dump would keep of it.
        packer = Packer()
        put(type(value).__qualname__, json.dumps(packer.node(value)).encode())
        for array in packer.arrays:
            put(array.spec, *(part.view(np.uint8) for part in array.parts))


def _feed_part(digest: xxhash.xxh3_128, place: Any, part: Any) -> None:
    try:
        _feed(digest, part)
    except UnsupportedTypeError as error:
        raise UnsupportedTypeError(error.what, f"[{place!r}]{error.where}") from error
