"""What counts of a call besides its prompts: its arguments, and what shapes rollouts inside them.

An argument that is plain data is compared as a whole. Inside any other, and inside what else the
stage holds or reads, attributes with a name of :data:`~rlskip.skip.names.SHAPING_NAMES` are
compared. What has another name and is not known to be neutral is only named: it may be a counter.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Collection
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

import attrs
from xxhash import xxh3_64_hexdigest

from rlskip.config.check import is_below
from rlskip.skip import stored
from rlskip.skip.code import Code, Names
from rlskip.skip.names import ALL, IGNORED, OTHER_NODES, SELF, read_name, seems_to_shape
from rlskip.skip.plain import is_data, is_data_proto, is_single, is_time, plain_or_not, unwrapped
from rlskip.skip.stored import UNREAD, in_words, kind_of, type_of
from rlskip.store.identity import differing, without

if TYPE_CHECKING:
    from rlskip.skip.call import Call, Stage

#: Stands for data that is not compared: it equals other such data, and no value.
NOT_COMPARED = "<not compared>"

_DEPTH = 3
_MAX_FIELDS = 256  # of an object
_MAX_VALUES = 10_000  # of a call
_MAX_LISTED = 32
_LISTED, _SINGLE = (list, tuple, set, frozenset), (Number, str, enum.Enum, types.NoneType)
Quiet = bool | Literal["noted"]  # "noted": what the code names is noted

# How deep to look into what is neutral, where sampling may be nevertheless.
_NEUTRAL = {"weights": 1, "class": _DEPTH, "neutral": -1}
# What a library's object, a progress bar, say, counts, or a method of it.
_COUNTS = ("n", "stop")


class Arguments:
    """What counts of one call besides its prompts, of which nothing counts."""

    def __init__(self, ignored: Collection[str], prompts: Any, code: Code) -> None:
        self.ignored, self.code = ignored, code  # names that do not count; ``*`` is all
        # What is compared, as plain JSON, or `NOT_COMPARED`; the names of those that have their
        # default, and of those that are left out for their size alone, such as a batch.
        self.values: dict[str, Any] = {}
        self.usual: set[str] = set()
        self.large: list[str] = []
        self._given: dict[str, Any] = {}
        # Attributes that shape rollouts, compared as well, and those that change while stages run.
        self.attributes: dict[str, Any] = {}
        self.changing: list[str] = []
        # What is neither compared nor known to be neutral: what each is.
        self.left: dict[str, str] = {}
        # Numbers and texts that it reads of modules and objects, by names that tell nothing.
        self.reads: dict[str, Any] = {}
        # What shapes rollouts of an outermost object, by its id and the place; what is in lists and
        # mappings of the call's own, without an object, is among the values.
        self._owned: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._noted: dict[int, tuple[Any, dict[str, Any]]] = {}  # `reads`, likewise
        self._seen, self._count = {id(prompts): prompts}, 0

    def at_argument(self, name: str, value: Any, default: Any) -> None:
        """Compare an argument as a whole, or look into it."""
        from rlskip.format.fingerprint import canonical  # needs torch

        is_usual, self._given[name] = value is default, value
        keep = functools.partial(without, self.ignored, place=name, bare=IGNORED)
        data, why, is_large = plain_or_not(value, keep)
        if why:
            self.at(name, value)
            others = {k: v for k, v in self.left.items() if not is_below(k, [name])}
            shaping = [*self.values, *(place for _, of in self._owned.values() for place in of)]
            if len(others) < len(self.left) and not any(is_below(k, [name]) for k in shaping):
                self.left = others | {name: why}  # nothing of it is compared
            if not is_data(value):
                return
            if is_large or is_data_proto(value):
                self.large.append(name)
            data = NOT_COMPARED
        elif value is not default and default is not inspect.Parameter.empty:
            usual, differs, _ = plain_or_not(default, keep)
            is_usual = not differs and canonical(usual) == canonical(data)
        self.values[name] = data
        if is_usual:
            self.usual.add(name)

    def changed(self) -> set[str]:
        """The parts of arguments that are not what they were when they were compared."""
        again = Arguments(self.ignored, None, self.code)
        for name, value in self._given.items():
            again.at_argument(name, value, value)
        both = again.values.keys() & self.values.keys()
        return {place for place, *_ in differing(both, again.values, self.values)}

    def at(self, place: str, value: Any, *, quiet: bool = False, is_root: bool = False) -> None:
        """Look into a value that is not compared as a whole; if `quiet`, little is left."""
        try:
            self._enter(place, unwrapped(value), None, _DEPTH, quiet, is_root)
        except Exception:  # an object of the user's raises anything
            self.left[place] = in_words(value)

    def at_globals(self, func: types.FunctionType, names: Names, above: str) -> None:
        """Look into what a function reads: globals, modules that it imports, the environment.

        Of a module that counts which names the function has.
        """
        parts = [(above, name, func.__globals__.get(name)) for name in names.read]
        parts += [("", name, sys.modules.get(name)) for name in names.modules]
        for name in {*names.modules}.difference(sys.modules, self.ignored):
            self.left[name] = "a module that is not imported yet"
        modules = set[int]()
        for place, name, part in parts:  # which grows meanwhile
            if issubclass(type_of(part), types.ModuleType) and id(part) not in modules:
                modules.add(id(part))
                has = () if stored.is_neutral(part) else sorted(vars(part).keys() & names.every)
                parts += [(_joined(place, name), named, vars(part)[named]) for named in has]
        reads_env = any(part is os.environ or part is os.getenv for *_, part in parts)
        if {"environ", "getenv"} & names.every or reads_env:
            texts = [*names.texts, *(part for *_, part in parts if type(part) is str)]
            for name in dict.fromkeys(texts):
                if name.isupper() or name in os.environ:
                    parts.append(("os.environ", name, os.environ.get(name, "")))
        for place, name, part in parts:
            quiet: Quiet = "noted" if not seems_to_shape(name.lower()) else False
            if kind_of(type_of(part)) != "function":
                with contextlib.suppress(Exception):  # as in `at`
                    self._sort(place, name, part, func, _DEPTH, quiet)

    def _note(self, place: str, part: Any, owner: Any) -> None:
        """Note a number, a text, or a short list of these; but not a time of the clock."""
        from rlskip.format.fingerprint import canonical  # needs numpy

        is_listed = type_of(part) in _LISTED and 0 < len(part) <= _MAX_LISTED
        are_single = (issubclass(type_of(one), _SINGLE) for one in (part if is_listed else [part]))
        if all(are_single) and not is_time(part):
            data = plain_or_not(part)[0]
            if not isinstance(data, float | int | None):  # it may be a secret
                data = f"<{xxh3_64_hexdigest(canonical(data).encode())}>"
            owner = self if owner is None else owner
            self._noted.setdefault(id(owner), (owner, {}))[1][place] = data

    def settle(self, first: FirstValues) -> Arguments:
        """Compare what shapes rollouts: of objects that were met before, the first values."""
        for owner, now in self._owned.values():
            self.attributes |= first.of(owner, now)
        known = {*self.attributes, *self._given}
        if changing := [*first.changing]:  # a copy: calls side by side add to them
            self.changing = sorted(name for name in changing if is_below(name, known))
        for names in self.code.names if self.attributes else ():
            # Not in every job they are imported before the stage is first called.
            self.usual |= {place for place in self.attributes if is_below(place, names.modules)}
        for owner, now in self._noted.values():
            self.reads |= first.of(owner, now, noted=True)
        return self

    def _enter(
        self, place: str, value: Any, owner: Any, levels: int, quiet: Quiet, is_root: bool = False
    ) -> None:
        cls, kind = type_of(value), kind_of(type_of(value))
        if place in self.ignored or id(value) in self._seen:
            return
        # Weights may have a generation_config, and a trainer much that is its library's.
        of_library = kind in _NEUTRAL and not is_root
        quiet = (of_library and kind != "class") or quiet or (kind in _NEUTRAL and "noted")
        levels = min(levels, _NEUTRAL[kind]) if of_library else levels
        if levels < 0 and quiet:
            return
        fields = stored.inside(value, kind, _MAX_FIELDS + 1)
        if fields and not place:  # a stage, whose defaults are arguments of its calls
            given = value.__code__.co_varnames
            fields = {name: part for name, part in fields.items() if name not in given}
        if stored.is_whole_config(fields):
            return  # skip.identity names keys of it
        self._count += len(fields or ())
        is_over = levels < 0 or len(fields or ()) > _MAX_FIELDS or self._count > _MAX_VALUES
        is_sealed = kind == "object" and stored.is_sealed(cls)
        if fields is None or (is_over if fields else is_sealed):
            if not quiet or issubclass(cls, threading.local):
                self.left[place] = in_words(value)
            return
        self._seen[id(value)] = value
        is_object = kind in ("object", "fields", *_NEUTRAL)
        if owner is None and (is_object or not place):
            owner = value
        beside = stored.beside(value, kind, fields)
        # Most of the hundred fields of transformers' say how to train.
        of_training = is_object and any(c.__name__ == "TrainingArguments" for c in cls.__mro__)
        for name, part in {**fields, **beside}.items():
            if kind == "list" and type(name) is int and kind_of(type_of(part)) == "leaf":
                if not quiet:
                    self.left[place] = in_words(value)
            elif kind == "class" or not (of_library and name in _COUNTS):
                is_usual = name in beside or (of_training and not seems_to_shape(str(name)))
                self._sort(place, str(name), part, owner, levels, quiet or (is_usual and "noted"))

    def _sort(
        self, above: str, name: str, part: Any, owner: Any, levels: int, quiet: Quiet
    ) -> None:
        """Compare a field, look into it, or leave it."""
        place = _joined(above, name)
        _, shapes, is_meaningless = read_name(name and place)
        if type_of(part) is contextvars.ContextVar and (shapes or read_name(part.name)[1]):
            shapes, part = True, stored.held_by(part).get("")
        if is_meaningless or place in self.ignored:
            return
        kind = kind_of(type_of(part))
        if kind in ("leaf", "object"):
            part = unwrapped(part)
            kind = kind_of(type_of(part))
        if quiet == "noted" and not shapes and (name in self.code.named or above == "os.environ"):
            self._note(place, part, owner)
        if shapes and kind in ("holder", "function", "class", "neutral"):
            return  # stop(), say
        if part is UNREAD or (shapes and not OTHER_NODES.isdisjoint(place.split("."))):
            if shapes or not quiet:
                self.left[place] = "computed" if part is UNREAD else "of another model"
        elif shapes:
            data, why, _ = plain_or_not(part)
            if why:
                self.left[place] = why
            elif owner is None:
                self.values[place] = data
            else:
                self._owned.setdefault(id(owner), (owner, {}))[1][place] = data
        elif kind != "leaf":
            self._enter(place, part, owner, levels - 1, quiet)
        elif not quiet and (part is not None or name in self.code.named) and not is_time(part):
            self.left[place] = in_words(part)
            if name in self.code.named:  # its change is said, too
                self._note(place, part, owner)


def _joined(above: str, name: str) -> str:
    return f"{above}.{name}" if name and above else above or name


def read_arguments(call: Call, ignored: Collection[str], first: FirstValues) -> Arguments:
    """The arguments that count of a call, without what its stage or the config has `ignored`.

    Of what holds the prompts, only what shapes rollouts counts, and nothing is left.
    """
    stage, given, prompts, holder = call.stage, call, call.prompts, call.holder
    if isinstance(stage.func, functools.partial):  # what it gives counts, too
        args, kwargs = (*stage.func.args, *call.args), {**stage.func.keywords, **call.kwargs}
        given = attrs.evolve(call, stage=stage.whole, args=args, kwargs=kwargs)
    # What prompts are computed of counts as far as it is something else.
    whole = () if callable(stage.prompts) else (holder,)
    code, func = first.code_of(given), stage.whole.func
    found = Arguments({*IGNORED, *(stage.ignore or ()), *ignored, *whole}, prompts, code)
    if ALL in found.ignored:
        return found
    passed = {*found.ignored, *SELF, holder}
    for name, parameter in given.bound.signature.parameters.items():
        value, default = given.bound.arguments[name], parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            default = ()
        parts = value if parameter.kind is parameter.VAR_KEYWORD else {name: value}
        for each, one in parts.items() if name not in found.ignored else ():
            if each not in passed and (one is not prompts or is_single(one)):
                found.at_argument(each, one, default)
    for name in (holder, *SELF):
        if name in given.arguments and given.arguments[name] is not prompts:
            found.at(name, given.arguments[name], quiet=name not in SELF, is_root=True)
    if not isinstance(func, types.FunctionType):
        found.at("self", getattr(func, "__self__", func), is_root=True)
    for number, one in enumerate(code.functions):
        if number >= code.own or one.__closure__ or one.__dict__:  # most hold nothing
            found.at("" if number < code.own else one.__name__, one)
        is_near = one.__module__ == code.functions[0].__module__
        found.at_globals(one, code.names[number], "" if is_near else one.__module__)
    if not code.is_whole and "code" not in found.ignored:
        found.left["code"] = "more helpers than are followed"
    if stage.prompts is None and found.large and holder != "prompts":
        call.refuse_as_prompts(found.large[0])
    return found.settle(first)


@attrs.define(eq=False)
class FirstValues:
    """What the attributes of objects were when a stage of the job first met them.

    A replay does not run the stage, nor what changes such an attribute in it. So each dump of a
    job records the first values, at whatever step: jobs that begin alike record the same.
    """

    #: Names of those that have changed since, here or in a job whose dump was replayed.
    changing: set[str] = attrs.field(factory=set)
    # Of each stage apart: those that one factory makes share a name, and have their own closures.
    # Weakly, because one may be made for each step.
    _codes: weakref.WeakKeyDictionary[Stage, dict[Any, Code]] = attrs.field(
        init=False, factory=weakref.WeakKeyDictionary
    )
    _known: dict[Any, tuple[Any, dict[str, Any]]] = attrs.field(init=False, factory=dict)

    def code_of(self, call: Call) -> Code:
        """What it runs: of a method, that of the class of its object, which may override it."""
        func, arguments = call.stage.func, call.arguments
        owner = getattr(func, "__self__", arguments.get("self", arguments.get("cls")))
        kind: Any = owner if issubclass(type(owner), type) else type(owner)
        codes = self._codes.setdefault(call.stage, {})
        if kind not in codes:
            objects = [value for value in arguments.values() if value is not call.prompts]
            codes[kind] = Code.of(func, objects)
            call.stage.refuse_unknown_names(call.stage.ignore or (), codes[kind].reads)
        return codes[kind]

    def of(self, owner: Any, now: dict[str, Any], *, noted: bool = False) -> dict[str, Any]:
        """The first values of an object's attributes that have these values now.

        Those that are only `noted` may change.
        """
        from rlskip.format.fingerprint import canonical  # needs numpy

        known, key = self._known, (id(owner), noted)
        if key not in known:
            try:
                known[key] = weakref.ref(owner, lambda _: known.pop(key, None)), now
            except TypeError:  # it cannot be told from the next object at its address
                return {} if noted else now
        first = known[key][1]
        if not noted:
            self.changing |= {
                name
                for name, before in first.items()
                if name not in now or canonical(before) != canonical(now[name])
            }
        return first
