"""A stage's arguments besides the prompts: which of them count, as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import os
import types
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

import attrs

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "seed", "validate", "timing", "timing_raw", "timeout", "timeout_s", "device", "devices", "rank",
    "local_rank", "world_size", "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm",
)  # fmt: skip

#: What stands for all names in ``annotate(ignore=...)``.
ALL = "*"

# Larger ones are data, and hashing them would take longer than a look at the dumps.
_MAX_ARRAY = 1 << 16  # bytes
_MAX_PARTS = 10_000
_MAX_KEPT = 256  # parts
_MAX_TEXT = 4096
_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
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
        Those that are not plain data, by name: what each is.
    """

    given: dict[str, Any] = attrs.field(factory=dict)
    defaults: dict[str, Any] = attrs.field(factory=dict)
    left_out: dict[str, str] = attrs.field(factory=dict)


class ArgumentReader:
    """Reads the arguments of calls of `func` that count.

    Parameters
    ----------
    prompts
        The name of the argument that holds the prompts; None: the one called `prompts`, else the
        first after self.
    ignore
        Names of further arguments that do not count; ``*`` stands for all.

    Attributes
    ----------
    unknown
        Those of the names that are no argument of the function.
    """

    def __init__(
        self, func: Callable[..., Any], prompts: str | None, ignore: Collection[str]
    ) -> None:
        self._signature = inspect.signature(func)
        parameters = self._signature.parameters
        takes_any = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters.values())
        self.unknown = [n for n in ignore if n != ALL and n not in parameters and not takes_any]
        self._ignored = {*IGNORED, *ignore, *({prompts} - {None}), *likely_prompts(parameters)}
        self._counting = [
            parameter
            for name, parameter in parameters.items()
            if name not in self._ignored and name not in ("self", "cls") and ALL not in ignore
        ]

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], prompts: Any) -> Arguments:
        """The arguments of a call whose prompts are `prompts`."""
        found = Arguments()
        if not self._counting:
            return found
        arguments = self._signature.bind(*args, **kwargs).arguments
        for parameter in self._counting:
            name, default = parameter.name, parameter.default
            if parameter.kind is _KINDS.VAR_KEYWORD:
                for key, value in arguments.get(name, {}).items():
                    if key not in self._ignored and value is not prompts:
                        _add(found, key, value, _KINDS.empty)
                continue
            if parameter.kind is _KINDS.VAR_POSITIONAL:
                default = ()
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
        return
    is_default = False
    if default is not _KINDS.empty:
        with contextlib.suppress(_NotPlain):
            is_default = repr(_compact(default)) == repr(value)
    (found.defaults if is_default else found.given)[name] = value


def _compact(value: Any) -> Any:
    """`value` as plain data; of much of it a hash, because each dump records it."""
    budget = [_MAX_PARTS]
    data = _plain(value, budget)
    long_text = isinstance(data, str) and len(data) > _MAX_TEXT
    if _MAX_PARTS - budget[0] <= _MAX_KEPT and not long_text:
        return data
    from rlskip.format.fingerprint import fingerprint  # needs torch

    return f"<{type(value).__name__} of {len(data)}: {fingerprint(data, ())}>"


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
    if hasattr(value, "dtype") and hasattr(value, "nbytes") and hasattr(value, "tolist"):
        if not getattr(value, "shape", ()):
            return value.tolist()
        if value.nbytes > _MAX_ARRAY:
            raise _NotPlain(f"an array of {value.nbytes} bytes")
        return value
    if isinstance(value, bytes) and len(value) <= _MAX_ARRAY:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, types.SimpleNamespace | Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        if _WHOLE_CONFIG & {key for key in value if isinstance(key, str)}:
            raise _NotPlain("the application's config")
        return {_plain(key, budget): _plain(part, budget) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, budget) for part in value]
    if isinstance(value, Set):
        return {_plain(part, budget) for part in value}
    if type(value).__name__ == "ListConfig":
        return [_plain(part, budget) for part in value]
    raise _NotPlain(f"a {type(value).__qualname__}")
