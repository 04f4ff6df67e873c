"""A stage's arguments besides the prompts: which of them count, as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import inspect
import numbers
import os
import re
import types
import uuid
from argparse import Namespace
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import attrs

from rlskip.config.facts import SHAPING_NAMES

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "seed", "validate", "timing", "timing_raw", "timeout", "timeout_s", "device", "devices", "rank",
    "local_rank", "world_size", "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm",
)  # fmt: skip

#: All names, in ``annotate(ignore=...)``.
ALL = "*"

# Larger ones are data, and hashing them would take longer than a look at the dumps.
_MAX_ARRAY = 1 << 16  # bytes
_MAX_PARTS = 10_000
_MAX_KEPT = 256  # parts
_MAX_TEXT = 4096
_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
_OF_ARRAYS = ("dtype", "nbytes", "tolist")
_AS_TEXT = (
    numbers.Number, range, slice, re.Pattern, uuid.UUID, datetime.date, datetime.time,
    datetime.timedelta,
)  # fmt: skip
_KINDS = inspect.Parameter


class _NotPlain(Exception):
    """A value that is not plain data."""


@attrs.frozen
class Arguments:
    """The arguments of one call that count.

    Parameters
    ----------
    given, defaults
        Those that have another value than their default, and the others, by name.
    left_out
        Those that are not plain data, by name: what each is. Of their parts only those count that
        shape rollouts by their names (:data:`~rlskip.config.facts.SHAPING_NAMES`).
    """

    given: dict[str, Any] = attrs.field(factory=dict)
    defaults: dict[str, Any] = attrs.field(factory=dict)
    left_out: dict[str, str] = attrs.field(factory=dict)


def read_arguments(
    signature: inspect.Signature,
    ignored: Collection[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    prompts: Any,
) -> Arguments:
    """The arguments that count of a call whose prompts are `prompts`.

    Those of the names in `ignored` do not; ``*`` is all names.
    """
    found = Arguments()
    if ALL in ignored:
        return found
    arguments = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if name in ignored or name in ("self", "cls"):
            continue
        if parameter.kind is _KINDS.VAR_KEYWORD:
            for key, value in arguments.get(name, {}).items():
                if key not in ignored and value is not prompts:
                    _add(found, key, value, _KINDS.empty)
            continue
        default = () if parameter.kind is _KINDS.VAR_POSITIONAL else parameter.default
        value = arguments.get(name, default)
        if value is not prompts or value is None:
            _add(found, name, value, default)
    return found


def likely_prompts(parameters: Iterable[str]) -> list[str]:
    """The name of the argument that holds the prompts, where nothing names it; empty: none."""
    names = [name for name in parameters if name not in ("self", "cls")]
    return ["prompts"] if "prompts" in names else names[:1]


def plain_entries(values: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """The entries that are plain data, but those of the names in `without`."""
    found = Arguments()
    for name, value in values.items():
        if name not in without:
            _add(found, str(name), value, _KINDS.empty)
    return found.given


def _add(found: Arguments, name: str, value: Any, default: Any) -> None:
    try:
        value = _compact(value)
    except _NotPlain as error:
        found.left_out[name] = str(error)
        for inner, part in _shaping_parts(value):
            _add(found, f"{name}.{inner}", part, _KINDS.empty)
        return
    is_default = False
    if default is not _KINDS.empty:
        with contextlib.suppress(_NotPlain):
            is_default = repr(_compact(default)) == repr(value)
    (found.defaults if is_default else found.given)[name] = value


def _shaping_parts(value: Any, levels: int = 3) -> Iterator[tuple[str, Any]]:
    """By dotted name what shapes rollouts in a value that is not plain as a whole.

    Sampling parameters may hold a callback, say, and still have a temperature.
    """
    fields: Any = None
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        fields = _fields_of(value)
    if isinstance(fields, Mapping) and len(fields) <= _MAX_KEPT and not _is_whole_config(fields):
        for name, part in fields.items():
            if name in SHAPING_NAMES:
                yield name, part
            elif levels and isinstance(name, str):
                yield from ((f"{name}.{i}", p) for i, p in _shaping_parts(part, levels - 1))


def _is_whole_config(fields: Mapping[Any, Any]) -> bool:
    return bool(_WHOLE_CONFIG & {key for key in fields if isinstance(key, str)})


def _compact(value: Any) -> Any:
    """`value` as JSON; of much of it a hash, because each dump records it."""
    from rlskip.format.fingerprint import fingerprint  # needs torch
    from rlskip.store.identity import to_comparable

    budget = [_MAX_PARTS]
    try:
        data = _plain(value, budget)
        long_text = isinstance(data, str) and len(data) > _MAX_TEXT
        if _MAX_PARTS - budget[0] <= _MAX_KEPT and not long_text:
            return to_comparable(data, "")
        return f"<{type(value).__name__} of {len(data)}: {fingerprint(data, ())}>"
    except _NotPlain:
        raise
    except Exception as error:  # it is nested too deep, or an object of the user's raises anything
        raise _NotPlain(f"a {type(value).__qualname__} that cannot be compared") from error


def _plain(value: Any, budget: list[int]) -> Any:
    """`value` as numbers, texts, small arrays, and lists and mappings of these.

    `budget` holds how many parts it may still have.

    Raises
    ------
    _NotPlain
        It is something else.
    """
    budget[0] -= 1
    if budget[0] < 0:
        raise _NotPlain("large data")
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # No mapping is asked: a DictConfig takes long to say that it has no such attribute.
    if not isinstance(value, Mapping) and all(hasattr(value, name) for name in _OF_ARRAYS):
        if not getattr(value, "shape", ()):
            return value.tolist()
        if value.nbytes > _MAX_ARRAY:
            raise _NotPlain(f"an array of {value.nbytes} bytes")
        return value
    if isinstance(value, _AS_TEXT) or type(value).__name__.lower().endswith("dtype"):
        return repr(value)
    if isinstance(value, bytes | bytearray) and len(value) <= _MAX_ARRAY:
        return value
    value = _fields_of(value)
    if isinstance(value, Mapping):
        if _is_whole_config(value):
            raise _NotPlain("the application's config")
        return {_plain_key(key, budget): _plain(part, budget) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(part, budget) for part in value]
    if isinstance(value, Set):
        return {"<set>": sorted((_plain(part, budget) for part in value), key=repr)}
    raise _NotPlain(f"a {type(value).__qualname__}")


def _plain_key(key: Any, budget: list[int]) -> Any:
    """A mapping's key as plain data that is a key; a tuple would become a list."""
    data = _plain(key, budget)
    return data if isinstance(data, Hashable) else repr(data)


def _fields_of(value: Any) -> Any:
    """The fields of an object whose class says which it has, by name; else `value` itself.

    Parameters for sampling often are such objects: dataclasses, attrs' classes, vLLM's
    SamplingParams (msgspec), pydantic's models, transformers' GenerationConfig.
    """
    kind = type(value)
    if isinstance(value, type | Mapping):
        return value
    if isinstance(value, types.SimpleNamespace | Namespace):
        return vars(value)
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if attrs.has(kind):
        return {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple):
        return {name: getattr(value, name) for name in names}
    for method in ("model_dump", "to_dict"):
        if callable(getattr(kind, method, None)):
            fields = getattr(value, method)()
            return {name: part for name, part in fields.items() if name != "transformers_version"}
    return value
