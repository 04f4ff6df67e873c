"""A stage's arguments besides the prompts: which of them count, as plain data."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import attrs
from omegaconf import DictConfig

from rlskip.config.facts import NEUTRAL_WORDS, SHAPING_NAMES
from rlskip.skip.stored import (
    CONFIG,
    DICT,
    FIELDS,
    LEAF,
    LIST,
    MEMBERS,
    NAMESPACES,
    UNREAD,
    attributes_of,
    classes_of,
    is_array_type,
    is_whole_config,
    kind_name,
    kind_of,
    parts_of,
    type_of,
)

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "seed", "validate", "timing", "timing_raw", "timeout", "timeout_s", "device", "devices", "rank",
    "local_rank", "world_size", "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm",
    "pbar", "progress", "progress_bar", "show_progress", "callback", "callbacks", "logger",
    "tracker", "writer", "run_name", "log_dir", "log_file", "log_path", "out_dir", "output_dir",
    "output_file", "output_path", "results_dir", "save_dir", "save_path", "checkpoint_dir",
    "dump_dir", "dump_path",
)  # fmt: skip

#: What a batch's `meta_info` holds that shapes no rollout. All else in it is compared.
NEUTRAL_META = (
    *IGNORED, "eos_token_id", "pad_token_id", "recompute_log_prob", "calculate_entropy", "metrics",
    "micro_batch_size", "max_token_len", "use_dynamic_bsz", "dp_size", "global_token_num",
    "is_last_step", "training_phase", "reward_extra_keys",
)  # fmt: skip

#: All names, in ``annotate(ignore=...)``.
ALL = "*"

# Larger ones are data, and hashing them would take longer than a look at the dumps.
_MAX_ARRAY = 1 << 16  # bytes
_MAX_PARTS = 1_000_000
_DRAW = "seed"
_KINDS = inspect.Parameter
_SCALARS = (str, int, float, bool, type(None))
SHAPING = frozenset(SHAPING_NAMES)
_VARIANTS = frozenset(
    f"{a}{name}{b}"
    for known in SHAPING_NAMES
    for name in (known, known.upper())
    for a, b in (("", ""), ("_", ""), ("", "_"))
)

#: Stands for data that is not compared: it equals other such data, and no value.
NOT_COMPARED = "<not compared>"


class _NotPlain(Exception):
    """A value that is not plain data."""


class _TooLarge(_NotPlain):
    """Plain data that takes too long to compare."""


@attrs.frozen
class Arguments:
    """The arguments of one call that count."""

    #: Names of arguments that do not count; ``*`` is all names.
    ignored: Collection[str] = ()
    #: What is compared, as plain JSON. Data that is not compared is in it as `NOT_COMPARED`, so
    #: that it differs from a default.
    values: dict[str, Any] = attrs.field(factory=dict)
    #: Names of those that have their default.
    usual: set[str] = attrs.field(factory=set)
    #: Those that are not compared as a whole: the value, and what it is.
    opaque: dict[str, tuple[Any, str]] = attrs.field(factory=dict)
    #: Those of them that are left out for their size alone, such as a batch.
    large: list[str] = attrs.field(factory=list)
    #: Attributes of objects that shape rollouts by their names, compared as well.
    attributes: dict[str, Any] = attrs.field(factory=dict)
    #: What is neither compared nor known to be neutral: what each is.
    left: dict[str, str] = attrs.field(factory=dict)
    #: Compared attributes that change while stages run, so that no value is right.
    changing: list[str] = attrs.field(factory=list)


def read_arguments(
    bound: inspect.BoundArguments, ignored: Collection[str], prompts: Any, holder: str
) -> Arguments:
    """The arguments that count of a call whose prompts are `prompts`, or held by `holder`."""
    found = Arguments(ignored)
    for name, parameter in bound.signature.parameters.items() if ALL not in ignored else ():
        if name in ignored:
            continue
        value, default = bound.arguments[name], parameter.default
        given = value if parameter.kind is _KINDS.VAR_KEYWORD else {name: value}
        if parameter.kind is _KINDS.VAR_POSITIONAL:
            default = ()
        for each, one in given.items():
            if each in ignored or each in ("self", "cls", holder):
                continue
            if one is not prompts or is_single(one):
                _add(found, each, one, default)
    return found


def is_single(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds no prompts beside others."""
    cls = type_of(value)
    return kind_of(cls) == LEAF and not (is_array_type(cls) and value.shape)


@functools.lru_cache(1 << 14)
def read_name(name: str) -> tuple[str, bool, bool]:
    """A name without underscores at its ends; whether it shapes rollouts, or is neutral."""
    bare = name.rpartition("__")[2].strip("_") if name.startswith("_") else name.rstrip("_")
    bare = bare.lower() if bare.isupper() else bare
    shapes = bare in SHAPING
    is_neutral = bare in IGNORED or not NEUTRAL_WORDS.isdisjoint(bare.split("_"))
    return bare, shapes, is_neutral and not shapes


def shaping_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in fields.items() if read_name(str(name))[1]}


def of_class(kind: type, stored: Collection[str]) -> dict[str, Any]:
    """What shapes rollouts among a class's attributes, or a module's; `UNREAD` what it computes."""
    found: dict[str, Any] = {}
    is_class = isinstance(kind, type)
    classes = [*classes_of(kind), *classes_of(type(kind))] if is_class else [(kind, vars(kind))]
    for _, own in classes:  # bases and the metaclass last
        for name in _VARIANTS.intersection(own):
            value, bare = own[name], read_name(name)[0]
            if {bare, f"_{bare}"}.isdisjoint(stored) and type(value) not in MEMBERS:
                is_computed = hasattr(type(value), "__get__")
                if not callable(value):
                    found.setdefault(name, UNREAD if is_computed else value)
    return found


def added_to(value: Any, parts: Collection[Any]) -> dict[str, Any]:
    """What shapes rollouts among what an object, or its class, stores besides `parts`."""
    stored = {**attributes_of(value), **dict.fromkeys(parts)}
    found = {**stored, **of_class(type(value), stored)}
    return {k: v for k, v in shaping_in(found).items() if k not in parts}


def _add(found: Arguments, name: str, value: Any, default: Any) -> None:
    from rlskip.store.comparable import canonical  # needs torch

    is_usual = value is default
    try:
        data = found.values[name] = _plain(value)
    except _NotPlain as error:
        found.opaque[name] = value, str(error)
        if not is_data(value):
            return
        if isinstance(error, _TooLarge) or _is_data_proto(value):
            found.large.append(name)
        found.values[name] = NOT_COMPARED
    else:
        if not is_usual and default is not _KINDS.empty:
            with contextlib.suppress(_NotPlain):
                is_usual = canonical(_plain(default)) == canonical(data)
    if is_usual:
        found.usual.add(name)


def part_of(value: Any) -> tuple[Any, str]:
    """A part of an object as plain JSON; or what it is, where it is not plain."""
    try:
        return _plain(value), ""
    except _NotPlain as error:
        return None, str(error)


def is_data(value: Any) -> bool:
    """Whether a value that is left out holds data, as an engine or a callable does not."""
    from rlskip.batch.tables import loaded

    cls = type_of(value)
    kind = kind_of(cls)
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        if issubclass(cls, Mapping | DictConfig) or kind == FIELDS:
            return not is_whole_config(parts_of(value, kind))
        if kind in (CONFIG, LIST) or (issubclass(cls, Sequence) and not issubclass(cls, str)):
            return len(value) > 0
        return (
            issubclass(cls, bytearray)
            or issubclass(cls, loaded("PIL.Image", "Image"))
            or is_array_type(cls)
            or _is_data_proto(value)
        )
    return False


def _is_data_proto(value: Any) -> bool:
    """Whether a value has the parts of verl's DataProto, which are stored."""
    return {"batch", "non_tensor_batch"} <= attributes_of(value).keys()


def _plain(value: Any) -> Any:
    """`value` as plain JSON; raises _NotPlain."""
    from rlskip.store.comparable import comparable  # needs torch

    parts = itertools.count(1)

    def simpler(part: Any) -> Any:
        if next(parts) > _MAX_PARTS:
            raise _TooLarge("large data")
        return part if type_of(part) in _SCALARS else _simpler(part)

    try:
        return comparable(value, "", simpler)
    except _NotPlain:
        raise
    except Exception as error:  # nested too deep, or an object of the user's raises anything
        raise _NotPlain(f"a {type(value).__qualname__} that cannot be compared") from error


def _simpler(value: Any) -> Any:
    """A part as a single value, a small array, or a list or a mapping of parts; else _NotPlain."""
    from rlskip.store.comparable import Marked  # needs torch

    cls = type_of(value)  # isinstance would ask the object for its class
    kind = kind_of(cls)
    if kind == LEAF:
        _refuse_large(value)
    is_plain = kind == LEAF or (kind == LIST and not hasattr(cls, "_fields"))
    parts = None if is_plain else parts_of(value, kind)
    if cls not in (list, dict, tuple) and kind in (LEAF, LIST, DICT, FIELDS):
        added = {} if is_array_type(cls) else added_to(value, parts or ())
        if added and kind != FIELDS:  # as an attribute of a text
            raise _NotPlain(f"a {cls.__qualname__} with {', '.join(added)}")
        parts = None if parts is None else {**parts, **added}
    if is_plain:
        return value
    if kind == CONFIG and not issubclass(cls, DictConfig):
        return [*(parts or {}).values()]
    if parts is None and issubclass(cls, Sequence | Set | Mapping):
        parts = value  # one whose class says what it has
    if parts is None or issubclass(cls, memoryview):
        raise _NotPlain(f"a {cls.__qualname__}")
    if not issubclass(type(parts), Mapping):
        return parts
    if is_whole_config(parts):
        raise _NotPlain("the application's config")
    if any(part is UNREAD for part in parts.values()):
        raise _NotPlain(f"a {cls.__qualname__} that computes a value")
    # Which sample is drawn does not count; which class it is does, where it declares its fields.
    parts = {key: part for key, part in parts.items() if key != _DRAW}
    is_named = kind in (FIELDS, LIST) and not issubclass(cls, NAMESPACES)
    return {Marked("<type>"): kind_name(cls), **parts} if is_named else parts


def _refuse_large(value: Any) -> None:
    """Raise _NotPlain for an array or bytes that no call waits for."""
    cls: Any = type(value)
    if is_array_type(cls):
        if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
            raise _NotPlain(f"a tensor on {value.device.type}")  # no stage waits for a copy
        if value.shape and value.nbytes > _MAX_ARRAY:
            raise _TooLarge(f"an array of {value.nbytes} bytes")
    elif issubclass(cls, bytes | bytearray) and len(value) > _MAX_ARRAY:
        raise _NotPlain(f"a {cls.__qualname__}")
