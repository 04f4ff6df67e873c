"""What shapes rollouts inside the objects that a stage is given or belongs to, and what is left.

Sampling parameters often are attributes: of an object among the arguments, of ``self``, of what a
partial, a bound method or a closure holds. Those with a name of
:data:`~rlskip.config.facts.SHAPING_NAMES` are compared. What has another name and is not known to
be neutral is only named: it may be a counter, which no replay may stumble over.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig

from rlskip.config.facts import NEUTRAL_WORDS, OTHER_NODES, SHAPING_NAMES
from rlskip.skip.arguments import (
    IGNORED,
    SINGLE,
    Arguments,
    is_array_type,
    is_whole_config,
    part_of,
)
from rlskip.skip.stored import (
    MEMBERS,
    UNREAD,
    attributes_of,
    classes_of,
    config_entries,
    declared_fields,
    declared_names,
    in_words,
    type_of,
)

#: The names of what a method belongs to.
SELF = ("self", "cls")

_DEPTH = 3
_MAX_FIELDS = 256  # of an object
_MAX_VALUES = 10_000  # of a call

_SHAPING = frozenset(SHAPING_NAMES)
_LAST = {name.rpartition(".")[2] for name in SHAPING_NAMES if "." in name}
_VARIANTS = frozenset(
    f"{a}{name}{b}" for name in SHAPING_NAMES for a, b in (("", ""), ("_", ""), ("", "_"))
)
_GONE = "<gone>"

# Kinds of values.
_LEAF, _LIST, _DICT, _CONFIG, _OBJECT = "leaf", "list", "dict", "config", "object"
_PARTIAL, _METHOD, _FUNCTION, _CLASS = "partial", "method", "function", "class"
_WEIGHTS, _MEANINGLESS = "weights", "neutral"
_NEUTRAL = (_WEIGHTS, _MEANINGLESS, _CLASS)
_LEVELS = {_WEIGHTS: 1, _CLASS: 0, _MEANINGLESS: -1}
_CALLED = (_PARTIAL, _METHOD, _FUNCTION, _CLASS, _MEANINGLESS)
_LISTS = (list, tuple, set, frozenset, deque)
_KINDS: tuple[tuple[str, Any], ...] = (
    (_CONFIG, (DictConfig, ListConfig)), (_DICT, dict), (_LIST, _LISTS),
    (_PARTIAL, functools.partial), (_METHOD, types.MethodType), (_FUNCTION, types.FunctionType),
)  # fmt: skip
_NEUTRAL_TYPES = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType,
    types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
)  # fmt: skip
# The packages of engines, weights, tokenizers, data, clients, and of what logs, waits and computes.
_PACKAGES = """
accelerate aiohttp anthropic asyncio concurrent contextvars datasets deepspeed httpx hydra io jax
litellm logging megatron mlflow multiprocessing numpy openai peft queue random ray requests rich
rlskip sglang socket subprocess swanlab tempfile tensorboard tensorboardX threading tokenizers torch
torchdata tqdm transformers trl verl vllm wandb weakref _asyncio _contextvars _io _queue _random
_thread _weakref
"""
_NEUTRAL_PACKAGES = frozenset(_PACKAGES.split())
_NEUTRAL_BASES = ("PreTrainedTokenizerBase", "ProcessorMixin")
# How the names of the user's own classes end.
_ENDINGS = (
    "Callback", "Callbacks", "Dataset", "DataLoader", "Dataloader", "Logger", "Meter", "Optimizer",
    "Profiler", "Progress", "ProgressBar", "Timer", "Tokenizer", "Tracker", "Writer",
)  # fmt: skip


@attrs.define(eq=False)
class FirstValues:
    """What the attributes of objects were when a stage of the job first met them.

    A replay does not run the stage, nor what changes such an attribute in it. So each dump of a
    job records the first values, at whatever step: jobs that begin alike record the same.

    Parameters
    ----------
    changing
        The names of those that have changed since, here or in a job whose dump was replayed.
    """

    changing: set[str] = attrs.field(factory=set)
    _known: dict[int, tuple[Any, dict[str, Any]]] = attrs.field(init=False, factory=dict)

    def of(self, owner: Any, now: dict[str, Any]) -> dict[str, Any]:
        """The first values of an object's attributes that have these values now."""
        from rlskip.store.comparable import canonical  # needs numpy

        known, key = self._known, id(owner)
        try:
            reference = weakref.ref(owner, lambda _: known.pop(key, None))
        except TypeError:  # it cannot be told from the next object at its address
            return now
        first = known.setdefault(key, (reference, now))[1]
        for name in first:
            before, after = first[name], now.get(name, _GONE)
            if before is not after and canonical(before) != canonical(after):
                self.changing.add(name)
        return first


def add_hidden(
    found: Arguments,
    roots: Mapping[str, Any],
    func: Callable[..., Any],
    prompts: Any,
    first: FirstValues,
) -> None:
    """Add to the arguments of a call what shapes rollouts inside objects, and name what is left.

    Parameters
    ----------
    roots
        By name what is no argument that counts: ``self``, and what holds the prompts, of which
        nothing else is left.
    func
        The stage's function, for its closure.
    """
    look = _Look(found.ignored, {id(prompts): prompts})
    for name, (value, why) in found.opaque.items():
        before, left = len(look.shaping), look.left
        look.left = {}
        look.enter(name, value)
        is_whole = len(look.shaping) == before
        look.left = left | ({name: why} if is_whole and look.left else look.left)
    for name, value in roots.items():
        look.enter(name, value, quiet=name not in SELF, is_root=True)
    look.enter("", func)
    owned: dict[int, tuple[Any, dict[str, Any]]] = {}
    for name, value, owner in look.shaping:
        plain, why = part_of(value)
        if why:
            look.left[name] = why
        else:
            owned.setdefault(id(owner), (owner, {}))[1][name] = plain
    for owner, now in owned.values():
        if owner is None:
            found.values.update(now)
        else:
            found.attributes.update(first.of(owner, now))
    found.left.update(look.left)
    found.changing.extend(sorted(first.changing & found.attributes.keys()))


@attrs.define(eq=False)
class _Look:
    """One look into what a call was given.

    Attributes
    ----------
    shaping
        Place and value of each attribute that shapes rollouts, and the outermost object that has
        it; None: it is in lists and mappings of the call's own.
    left
        What is neither compared nor neutral: what each is, by place.
    """

    _ignored: Collection[str]
    _seen: dict[int, Any]
    shaping: list[tuple[str, Any, Any]] = attrs.field(init=False, factory=list)
    left: dict[str, str] = attrs.field(init=False, factory=dict)
    _values: int = attrs.field(init=False, default=0)

    def enter(self, place: str, value: Any, *, quiet: bool = False, is_root: bool = False) -> None:
        """Look into a value that is not compared as a whole; if `quiet`, little is left."""
        try:
            self._enter(place, value, None, _DEPTH, quiet, is_root)
        except Exception:  # an object of the user's raises anything
            self.left[place] = in_words(value)

    def _enter(
        self, place: str, value: Any, owner: Any, levels: int, quiet: bool, is_root: bool = False
    ) -> None:
        kind = _kind_of(type_of(value))
        if place in self._ignored or id(value) in self._seen:
            return
        if kind in _NEUTRAL:
            # Weights may have a generation_config, and a trainer much that is its library's.
            quiet = True
            if not is_root:
                levels = min(levels, _LEVELS[kind])
        fields = {} if levels < 0 and quiet else _fields_of(value, kind)
        if kind == _FUNCTION:
            fields = {**_of_function(value, is_stage=not place), **(fields or {})}
        if is_whole_config(fields):
            return  # skip.identity names keys of it
        self._values += len(fields or ())
        if (
            fields is None
            or (not fields and kind == _OBJECT and _is_sealed(type_of(value)))
            or (fields and (levels < 0 or len(fields) > _MAX_FIELDS or self._values > _MAX_VALUES))
        ):
            if not quiet:
                self.left[place] = in_words(value)
            return
        self._seen[id(value)] = value
        if owner is None and (kind in (_OBJECT, *_NEUTRAL) or not place):
            owner = value
        for name, part in fields.items():
            if kind != _LIST or isinstance(name, str):
                self._sort(place, str(name), part, owner, levels, quiet)
            elif _kind_of(type_of(part)) != _LEAF:
                self._enter(f"{place}.{name}", part, owner, levels - 1, quiet)
            elif not quiet:
                self.left[place] = in_words(value)

    def _sort(self, above: str, name: str, part: Any, owner: Any, levels: int, quiet: bool) -> None:
        """Compare a field, look into it, or leave it."""
        place = f"{above}.{name}" if name and above else above or name
        bare, shapes, is_neutral = _read_name(name)
        if is_neutral or place in self._ignored:
            return
        kind = _kind_of(type_of(part))
        if not shapes and bare in _LAST:
            shapes = f"{_read_name(above.rpartition('.')[2])[0]}.{bare}" in _SHAPING
        if shapes and kind in _CALLED:
            return  # stop(), say
        if part is UNREAD or (shapes and not OTHER_NODES.isdisjoint(place.split("."))):
            if shapes or not quiet:
                self.left[place] = "computed" if part is UNREAD else "of another model"
        elif shapes:
            self.shaping.append((place, part, owner))
        elif kind != _LEAF:
            self._enter(place, part, owner, levels - 1, quiet)
        elif not quiet and part is not None:
            self.left[place] = in_words(part)


@functools.lru_cache(1 << 14)
def _read_name(name: str) -> tuple[str, bool, bool]:
    """A name without underscores at its ends; whether it shapes rollouts, or is neutral."""
    bare = name.rpartition("__")[2].strip("_") if name.startswith("_") else name.rstrip("_")
    shapes = bare in _SHAPING
    is_neutral = bare in IGNORED or not NEUTRAL_WORDS.isdisjoint(bare.split("_"))
    return bare, shapes, is_neutral and not shapes


@functools.lru_cache(1 << 12)
def _kind_of(kind: Any) -> str:
    """What the values of a class are: how they are looked into, or that they are neutral."""
    if issubclass(kind, _NEUTRAL_TYPES):
        return _CLASS if issubclass(kind, type) else _MEANINGLESS
    if kind.__module__.startswith("torch.nn.parameter"):
        return _MEANINGLESS
    if issubclass(kind, (*SINGLE, types.NoneType)) or is_array_type(kind):
        return _LEAF
    for name, kinds in _KINDS:
        if issubclass(kind, kinds):
            return name
    if issubclass(kind, Mapping):
        return _LEAF
    if declared_names(kind) is not None:
        return _OBJECT
    for cls, _ in classes_of(kind):
        package, name = cls.__module__.partition(".")[0], cls.__name__
        if package in _NEUTRAL_PACKAGES or name in _NEUTRAL_BASES or name.endswith(_ENDINGS):
            is_weights = any(c.__module__ == "torch.nn.modules.module" for c in kind.__mro__)
            return _WEIGHTS if is_weights else _MEANINGLESS
    return _OBJECT


def _fields_of(value: Any, kind: str) -> dict[Any, Any] | None:
    """What is inside a value by name, index or key; None: it has no inside."""
    if kind == _LEAF:
        return None
    if kind == _CONFIG:
        return config_entries(value)
    if kind == _DICT:
        return dict(dict.items(value))
    if kind == _LIST:
        sort = next(sort for sort in _LISTS if issubclass(type(value), sort))
        names = getattr(type(value), "_fields", None)
        return dict(zip(names, value, strict=False) if names else enumerate(sort.__iter__(value)))
    if kind == _PARTIAL:
        return {**dict(enumerate(value.args)), **value.keywords, "": value.func}
    if kind == _METHOD:
        return {"": value.__self__, "_": value.__func__}
    if kind == _FUNCTION:
        return dict(_cells(value)) if value.__closure__ else {}
    if kind == _CLASS:
        return _of_class(value, ())
    stored = {**attributes_of(value), **(declared_fields(value) or {})}
    return {**stored, **_of_class(type(value), stored)}


def _cells(func: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not set yet
            yield name, cell.cell_contents


def _of_function(func: types.FunctionType, *, is_stage: bool) -> dict[str, Any]:
    """What shapes rollouts among a function's defaults and attributes.

    The defaults of a stage are arguments of its calls.
    """
    code, defaults = func.__code__, func.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    own = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    own |= func.__kwdefaults__ or {}
    found = {**func.__dict__, **({} if is_stage else own)}
    return {
        name: value
        for name, value in found.items()
        if _read_name(name)[1] and not (is_stage and name in code.co_varnames)
    }


def _of_class(kind: type, stored: Collection[str]) -> dict[str, Any]:
    """What shapes rollouts among the attributes of a class; `UNREAD` what it computes."""
    found: dict[str, Any] = {}
    for _, own in classes_of(kind):  # a class before its bases
        for name in _VARIANTS.intersection(own):
            value, bare = own[name], _read_name(name)[0]
            if {bare, f"_{bare}"}.isdisjoint(stored) and type(value) not in MEMBERS:
                is_computed = hasattr(type(value), "__get__")
                if not callable(value):
                    found.setdefault(name, UNREAD if is_computed else value)
    return found


@functools.lru_cache(1 << 12)
def _is_sealed(kind: type) -> bool:
    """Whether a class keeps what its objects are where Python cannot read it, as C does."""
    names = {name for _, own in classes_of(kind) for name in own}
    readable = ("__dict__", "__slots__", "__next__", "__call__")
    return kind is not object and names.isdisjoint(readable)
