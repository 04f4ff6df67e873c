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
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from rlskip.config.facts import OTHER_NODES, SHAPING_NAMES
from rlskip.skip.arguments import (
    SHAPING,
    Arguments,
    added_to,
    of_class,
    part_of,
    read_name,
)
from rlskip.skip.code import cells_of, globals_in
from rlskip.skip.stored import (
    CLASS,
    FIELDS,
    FUNCTION,
    HOLDER,
    LEAF,
    LIST,
    MEANINGLESS,
    OBJECT,
    UNREAD,
    WEIGHTS,
    attributes_of,
    classes_of,
    in_words,
    is_whole_config,
    kind_of,
    parts_of,
    type_of,
)

#: The names of what a method belongs to.
SELF = ("self", "cls")

_DEPTH = 3
_MAX_FIELDS = 256  # of an object
_MAX_VALUES = 10_000  # of a call

_LAST = {name.rpartition(".")[2] for name in SHAPING_NAMES if "." in name}
_GONE = "<gone>"

# How deep to look into what is neutral, where sampling may be nevertheless.
_NEUTRAL = {WEIGHTS: 1, CLASS: 0, MEANINGLESS: -1}
_CALLED = (HOLDER, FUNCTION, CLASS, MEANINGLESS)
# What a library's object, a progress bar, say, counts, or a method of it.
_COUNTS = ("n", "stop")


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
    inner: Any,
    prompts: Any,
    first: FirstValues,
) -> None:
    """Add to the arguments of a call what shapes rollouts inside objects, and name what is left.

    Parameters
    ----------
    roots
        By name what is no argument that counts: ``self``, and what holds the prompts, of which
        nothing else is left.
    func, inner
        The stage's function, for its closure; and what it runs in the end, for what that reads of
        its module.
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
    if not isinstance(func, types.FunctionType) or func.__closure__:
        look.enter("", func)
    there = getattr(inner, "__globals__", {})
    for name in globals_in(inner.__code__) if there else ():
        if kind_of(type_of(there.get(name))) != FUNCTION:
            with contextlib.suppress(Exception):  # as in `enter`
                look.sort("", name, there.get(name), func, _DEPTH, quiet=True)
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
        kind = kind_of(type_of(value))
        if place in self._ignored or id(value) in self._seen:
            return
        if kind in _NEUTRAL:
            # Weights may have a generation_config, and a trainer much that is its library's.
            quiet = True
            if not is_root:
                levels = min(levels, _NEUTRAL[kind])
        fields = {} if levels < 0 and quiet else _inside(value, kind)
        if kind in _NEUTRAL and not is_root:
            fields = {name: part for name, part in (fields or {}).items() if name not in _COUNTS}
        if is_whole_config(fields):
            return  # skip.identity names keys of it
        self._values += len(fields or ())
        if (
            fields is None
            or (not fields and kind == OBJECT and _is_sealed(type_of(value)))
            or (fields and (levels < 0 or len(fields) > _MAX_FIELDS or self._values > _MAX_VALUES))
        ):
            if not quiet:
                self.left[place] = in_words(value)
            return
        self._seen[id(value)] = value
        if owner is None and (kind in (OBJECT, FIELDS, *_NEUTRAL) or not place):
            owner = value
        for name, part in fields.items():
            if kind != LIST or isinstance(name, str):
                self.sort(place, str(name), part, owner, levels, quiet)
            elif kind_of(type_of(part)) != LEAF:
                self._enter(f"{place}.{name}", part, owner, levels - 1, quiet)
            elif not quiet:
                self.left[place] = in_words(value)

    def sort(self, above: str, name: str, part: Any, owner: Any, levels: int, quiet: bool) -> None:
        """Compare a field, look into it, or leave it."""
        place = f"{above}.{name}" if name and above else above or name
        bare, shapes, is_neutral = read_name(name)
        if is_neutral or place in self._ignored:
            return
        kind = kind_of(type_of(part))
        if not shapes and bare in _LAST:
            shapes = f"{read_name(above.rpartition('.')[2])[0]}.{bare}" in SHAPING
        if shapes and kind in _CALLED:
            return  # stop(), say
        if part is UNREAD or (shapes and not OTHER_NODES.isdisjoint(place.split("."))):
            if shapes or not quiet:
                self.left[place] = "computed" if part is UNREAD else "of another model"
        elif shapes:
            self.shaping.append((place, part, owner))
        elif kind != LEAF:
            self._enter(place, part, owner, levels - 1, quiet)
        elif not quiet and part is not None:
            self.left[place] = in_words(part)


def _inside(value: Any, kind: str) -> dict[Any, Any] | None:
    """What is inside a value by name, index or key; None: it has no inside."""
    if kind == LEAF:
        return None
    if kind == HOLDER:
        return _held_by(value)
    if kind == FUNCTION:
        return cells_of(value) if value.__closure__ else {}
    if kind == CLASS:
        return of_class(value, ())
    if (parts := parts_of(value, kind, _MAX_FIELDS + 1)) is not None:
        return {**added_to(value, parts), **parts}
    stored = attributes_of(value)
    return {**stored, **of_class(type(value), stored)}


def _held_by(value: Any) -> dict[Any, Any]:
    """What a partial or a bound method gives on."""
    if isinstance(value, functools.partial):
        return {**dict(enumerate(value.args)), **value.keywords, "": value.func}
    return {"": value.__self__, "_": value.__func__}


@functools.lru_cache(1 << 12)
def _is_sealed(kind: type) -> bool:
    """Whether a class keeps what its objects are where Python cannot read it, as C does."""
    names = {name for _, own in classes_of(kind) for name in own}
    return kind is not object and names.isdisjoint(("__dict__", "__slots__"))
