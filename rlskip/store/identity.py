"""Whether a dump's rollouts are those that this run would generate.

The prompts, the number of sessions per prompt, the lengths, the sampling, the stage's other
arguments and what a role adds must be equal. The model's name and the versions are recorded, and a
difference is only logged. Weights, step and learning rate do not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import repeat
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip._human import short
from rlskip.batch.columns import is_tensor
from rlskip.format.codec import MAX_DEPTH, Sharing
from rlskip.format.dump_errors import UnsupportedTypeError, text_of
from rlskip.format.scalars import scalar_of

_COMPARED = ("role", "stage", "n", "prompt_len", "response_len", "sampling", "extra")
_ONLY_LOGGED = ("model", "versions")
_DRAW = "seed"  # in an argument, at any depth: which sample is drawn does not count
_LONG = 1 << 16  # characters
_NAN = math.nan  # one object for all, so that equal identities are equal
_REMEDY = (
    "give numbers, strings, arrays, or lists and mappings of these; or register a codec for its "
    "type: rlskip.store.register_codec(type, name, encode, decode)"
)


def _plain(value: Any, where: str, sharing: Sharing, levels: int) -> Any:
    """`value` as JSON that differs for any two values that are not equal."""
    try:
        return _convert(value, where, sharing, levels)
    except (UnsupportedTypeError, MemoryError):
        raise
    except Exception as error:  # an interpolation that fails, an object that is broken
        raise UnsupportedTypeError(
            f"cannot be compared: {text_of(error)}", where, _REMEDY
        ) from error


def _convert(value: Any, where: str, sharing: Sharing, levels: int) -> Any:
    value = scalar_of(value)
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float):
        return _NAN if math.isnan(value) else float(value)
    if isinstance(value, Set):
        levels -= 1  # it is read back as a list in a mapping
    if levels <= 0 or sharing.is_endless(value):
        raise UnsupportedTypeError("nested without end", where, _REMEDY)

    def part(value: Any, at: str) -> Any:
        return _plain(value, f"{where}{at}", sharing, levels - 1)

    if isinstance(value, Mapping):
        keys = {key: _key(key, where) for key in value}
        return {keys[k]: part(value[k], f".{keys[k]}") for k in sorted(keys, key=keys.__getitem__)}
    if isinstance(value, Set):
        items = (part(item, "{...}") for item in value)
        return {"<set>": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [part(item, f"[{i}]") for i, item in enumerate(value)]
    return f"<{_sort(value)} {_hash(value, where)}>"


def _sort(value: Any) -> str:
    """What a value is, for readers: its content is in the hash."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} {list(value.shape)}"
    if is_tensor(value) and not value.is_nested:
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "bytes" if isinstance(value, bytearray) else type(value).__qualname__


def _key(key: Any, where: str) -> str:
    """A mapping's key as a string; the keys 1 and "1" stay two."""
    key = scalar_of(key)
    if isinstance(key, str):
        return _text(key)
    if key is None or isinstance(key, bool | int | float):
        return f"<{type(key).__name__} {key!r}>"
    return f"<{type(key).__qualname__} {_hash(key, f'{where}.keys()')}>"


def _text(value: str) -> str:
    """As JSON gives it back: a pair of surrogates becomes one character."""
    text = str.__str__(value)
    return text if text.isascii() else str(json.loads(json.dumps(text)))


def _hash(value: Any, where: str) -> str:
    # Here, because values from meta.json need no torch.
    from rlskip.format.fingerprint import fingerprint

    try:
        return fingerprint(value, volatile=())
    except UnsupportedTypeError as error:
        at = error.where.removeprefix("prompts")
        raise UnsupportedTypeError(error.what, f"{where}{at}", _REMEDY) from error


def to_comparable(value: Any, where: str) -> Any:
    """`value` as plain JSON, as an identity keeps it; JSON stays as it is.

    Raises
    ------
    UnsupportedTypeError
        It cannot be compared; `where` names it in the error.
    """
    return _plain(value, where, Sharing(), MAX_DEPTH)


def _shortened(value: Any) -> Any:
    """Plain JSON with a hash of each long text and list, because each dump records it."""
    if isinstance(value, dict):
        return {key: _shortened(part) for key, part in value.items()}
    if isinstance(value, str | list):
        text = json.dumps(_as_compared(value), sort_keys=True)
        if len(text) > _LONG:
            sort, digest = type(value).__name__, xxhash.xxh3_128_hexdigest(text.encode())
            return f"<{sort} of {len(value)}: {digest}>"
    return value


def _as_compared(value: Any) -> Any:
    """Plain JSON with one form for numbers that are equal, as `1` and `1.0` are."""
    if isinstance(value, dict):
        return {key: _as_compared(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_as_compared, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(name: str, default: Any = None, **options: Any) -> Any:
    return attrs.field(
        default=default,
        converter=lambda value: _shortened(to_comparable(value, name)),
        **options,
    )


def _mapping(name: str) -> Any:
    return _field(name, attrs.Factory(dict), validator=attrs.validators.instance_of(dict))


@attrs.frozen
class Identity:
    """What a step was generated from.

    All values are plain JSON once constructed. Python's, numpy's and 0-d scalars of one value are
    the same; an array or another object that JSON lacks becomes its type and a hash of its content,
    and so does a text or a list of more than 64 KiB.

    Parameters
    ----------
    prompts_hash
        :func:`~rlskip.store.fingerprint` of the prompts; None if they are not compared.
    n
        Sessions per prompt.
    prompt_len, response_len
        Limits in tokens.
    sampling
        Sampling parameters, e.g. ``{"temperature": 1.0, "top_p": 0.9}``.
    extra
        What a role, a host or a user adds.
    model, versions
        Recorded; a difference is only logged.
    role, stage
        Whose call made the rollouts: the role, and the name of the stage's function.
    arguments, defaults
        The stage's other arguments by name: those with another value than their default, and those
        that have it. One that the other identity lacks is equal to it if it is at its default.
        None: not known.
    ignored
        Names of arguments that are not compared, also where the other identity has them; ``*`` is
        all. No dump records them.

    Raises
    ------
    UnsupportedTypeError
        A value cannot be compared; the error names its field.
    """

    prompts_hash: str | None = _field("prompts_hash")
    n: int | None = _field("n")
    prompt_len: int | None = _field("prompt_len")
    response_len: int | None = _field("response_len")
    sampling: Mapping[str, Any] = _mapping("sampling")
    extra: Mapping[str, Any] = _mapping("extra")
    model: str | None = _field("model")
    versions: Mapping[str, Any] = _mapping("versions")
    role: str | None = _field("role")
    stage: str | None = _field("stage")
    arguments: Mapping[str, Any] | None = _field("arguments")
    defaults: Mapping[str, Any] = _mapping("defaults")
    ignored: Collection[str] = attrs.field(default=(), eq=False, repr=False)

    def differences(self, other: Identity) -> tuple[list[str], list[str]]:
        """What makes `other`, a dump's, unfit for this call, and what is only logged.

        Returns
        -------
        must, warn
            Readable lines such as ``sampling.temperature: 1.0 now, 0.7 in the dump``.
        """
        must = []
        if self.prompts_hash != other.prompts_hash:
            must.append(_line("prompts", self.prompts_hash, other.prompts_hash))
        for name in _COMPARED:
            for key, now, then in _compare(name, getattr(self, name), getattr(other, name)):
                if key in ("role", "stage") and None in (now, then):
                    continue  # a role used by hand: whose call it was is not known
                must.append(_line(key, now, then))
        warn = [
            _line(*difference)
            for name in _ONLY_LOGGED
            for difference in _compare(name, getattr(self, name), getattr(other, name))
        ]
        if self.arguments is not None and other.arguments is not None:
            must += self._other_arguments(other)
        elif self.arguments:
            names = ", ".join(f"arguments.{name}" for name in sorted(self.arguments))
            warn.append(f"the dump does not record {names}")
        return must, warn

    def _other_arguments(self, other: Identity) -> list[str]:
        """The arguments that differ. One at its default is equal to one that is not there."""
        now, then = self._all_arguments(), other._all_arguments()
        return [
            _line(*difference)
            for name in sorted({*now, *then})
            if {"*", name.partition(".")[0]}.isdisjoint(self.ignored)
            and (name in now or name not in other.defaults)
            and (name in then or name not in self.defaults)
            for difference in _compare(
                f"arguments.{name}", now.get(name, _ABSENT), then.get(name, _ABSENT)
            )
        ]

    def _all_arguments(self) -> dict[str, Any]:
        found = {**self.defaults, **(self.arguments or {})}
        return {name: _without_draws(value) for name, value in found.items()}

    def digest(self) -> str:
        """A hash of all that must be equal."""
        compared = [self.prompts_hash, *(getattr(self, name) for name in _COMPARED)]
        compared.append(_without_draws(self.arguments or {}))
        return xxhash.xxh3_64_hexdigest(json.dumps(compared, sort_keys=True).encode())

    def as_json(self) -> dict[str, Any]:
        plain = attrs.asdict(self, filter=lambda field, _: field.name != "ignored")
        return {"prompts": plain.pop("prompts_hash"), **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        """The identity that :meth:`as_json` gave.

        Raises
        ------
        TypeError, ValueError
            `data` is not an identity.
        RecursionError
            The stack of this process is exhausted, which says nothing about `data`.
        """
        if not isinstance(data, Mapping) or "prompts" not in data or "ignored" in data:
            raise ValueError("not an identity")
        others = {key: value for key, value in data.items() if key != "prompts"}
        try:
            return cls(prompts_hash=data["prompts"], **others)
        except UnsupportedTypeError as error:
            if isinstance(error.__cause__, RecursionError):
                raise error.__cause__ from error
            raise


def _without_draws(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_draws(part) for key, part in value.items() if key != _DRAW}
    return [*map(_without_draws, value)] if isinstance(value, list) else value


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _compare(name: str, now: Any, then: Any) -> list[tuple[str, Any, Any]]:
    """The differences between two plain values: where, and both values."""
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            difference
            for key in sorted({*now, *then})
            for difference in _compare(
                f"{name}.{key}", now.get(key, _ABSENT), then.get(key, _ABSENT)
            )
        ]
    if isinstance(now, list) and isinstance(then, list):
        same = len(now) == len(then) and not any(map(_compare, repeat(name), now, then))
    elif isinstance(now, bool) != isinstance(then, bool):
        same = False
    else:
        same = bool(now == then) or (now is _NAN and then is _NAN)
    return [] if same else [(name, now, then)]


def _line(name: str, now: Any, then: Any) -> str:
    now, then = repr(now), repr(then)
    # Of long values, show the part that differs.
    alike = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), 0)
    if start := max(0, alike - 20) if max(len(now), len(then)) > 60 else 0:
        now, then = f"...{now[start:]}", f"...{then[start:]}"
    return f"{name}: {short(now, 60)} now, {short(then, 60)} in the dump"
