"""Whether a dump's rollouts are those that this run would generate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import xxhash

from rlskip._human import short

_LONG = 1 << 12  # characters
_ARGUMENTS = "arguments."
_DEFAULTS = "defaults"
_PLACE, _CODE, _CHANGING = "place", "code", "changing"
_NAMING = {"role", "stage", "prompts"}
GIVEN = "given"
"""Noted of rollouts that were given, not generated: what they lack was not what made them."""


@attrs.frozen
class Identity:
    """What rollouts were generated from, by name.

    Parameters
    ----------
    compared
        What must be equal, as plain JSON: ``prompts`` (their hash), ``role``, ``n``,
        ``arguments.NAME`` and so on.
    noted
        What is only logged where both know it: ``model``, ``versions.NAME``, ``code`` (a digest of
        the stage's), ``reads.NAME`` (what it reads of modules). And what says how to compare:
        ``defaults``, the arguments that have their default, without which the arguments are not
        known; ``changing``, those that change while stages run, of which no value is right;
        ``place``, of a run without a name: another one, unless it has the same ``code``, is as
        good as another name; ``given``: the rollouts were not generated, so what is not in
        `compared` is not compared.
    ignored
        Names of arguments that are not compared now, whatever a dump has; ``*`` is all.
    """

    compared: Mapping[str, Any] = attrs.field(factory=dict)
    noted: Mapping[str, Any] = attrs.field(factory=dict)
    ignored: Collection[str] = attrs.field(default=(), eq=False, repr=False)

    @classmethod
    def of(cls, compared: Mapping[str, Any], noted: Mapping[str, Any] | None = None) -> Identity:
        """Of values of any kind; raises UnsupportedTypeError for one that cannot be compared."""
        return cls(_plain(compared), _plain(noted or {}))

    def adding(self, compared: Mapping[str, Any]) -> Identity:
        """This with further entries, or others, in `compared`; raises as :meth:`of`."""
        return attrs.evolve(self, compared={**self.compared, **_plain(compared)})

    def for_prompts(self, prompts: str | None) -> Identity:
        """This for the prompts of that hash; None: for any."""
        kept = {name: value for name, value in self.compared.items() if name != "prompts"}
        given = {} if prompts is None else {"prompts": prompts}
        return attrs.evolve(self, compared={**kept, **given})

    @property
    def prompts(self) -> str | None:
        """The hash of the prompts; None if they are not compared."""
        return self.compared.get("prompts")

    @property
    def changing(self) -> set[str]:
        """The names of arguments that change while stages run."""
        return {*self.noted.get(_CHANGING, ())}

    def differences(self, other: Identity) -> tuple[list[str], list[str]]:
        """What makes `other`, a dump's, unfit for this call, and what is only logged.

        As lines such as ``sampling.temperature: 1.0 now, 0.7 in the dump``. A role or a stage that
        one of them does not have is not known: a role was used by hand. An argument that one of
        them does not have is equal to one that has its default.
        """
        now, then = self.compared, other.compared
        if repr((now, self.noted)) == repr((then, other.noted)):  # at once: most are
            return [], []
        code, made_by = self.noted.get(_CODE), other.noted.get(_CODE)
        if _CODE in now and made_by is not None:  # every dump notes it
            then = {_CODE: made_by, **then}
        differ = [n for n in {*now, *then} if repr(now.get(n, ABSENT)) != repr(then.get(n, ABSENT))]
        names = sorted(self._counted(differ, other), key=lambda name: (name != "prompts", name))
        left = {f"{_ARGUMENTS}{n}" for n in {*self.ignored} | self.changing | other.changing}
        counted = [{name: side[name] for name in names if name in side} for side in (now, then)]
        must = differences(names, *(without(left, side) for side in counted))
        if (place := self.moved_from(other)) and (code is None or code != made_by):
            must.append(
                f"place: {self.noted[_PLACE]!r} now, {place!r} in the dump, and the function's "
                "code is not the same; skip.experiment_name=NAME names this run"
            )
        both = (self.noted.keys() & other.noted.keys()) - {_DEFAULTS, _CHANGING, _PLACE, GIVEN}
        # The code of two versions of Python says nothing of each other.
        if _CODE in both and str(code).split()[-2:-1] != str(made_by).split()[-2:-1]:
            both.remove(_CODE)
        warn = differences(sorted(both), self.noted, other.noted)
        unknown = set[str]()
        if _DEFAULTS not in other.noted:
            unknown = {name for name in now if name.startswith(_ARGUMENTS)} - self._usual
        if other.noted.get(GIVEN):
            unknown |= now.keys() - then.keys() - {"role", "stage"}
        if unknown:
            warn.append(f"the dump does not record {', '.join(sorted(unknown))}")
        return must, warn

    def fits(self, other: Identity) -> bool:
        return not self.differences(other)[0]

    def moved_from(self, other: Identity) -> Any:
        """The place of `other`, a dump's, if both are known and it is another one than this."""
        here, there = self.noted.get(_PLACE), other.noted.get(_PLACE)
        return there if here and there and here != there else None

    @property
    def _usual(self) -> set[str]:
        """The names of the arguments that have their default."""
        return {f"{_ARGUMENTS}{name}" for name in self.noted.get(_DEFAULTS, ())}

    def _counted(self, names: Collection[str], other: Identity) -> set[str]:
        """Those of the names that are compared with `other`."""
        now, then = self.compared.keys(), other.compared.keys()
        passed = {"role", "stage"} - (now & then)
        if other.noted.get(GIVEN):
            passed |= now - then - {"prompts"}
        if _CODE not in now:
            passed.add(_CODE)
        passed |= (self._usual - then) | (other._usual - now)
        are_known = _DEFAULTS in self.noted and _DEFAULTS in other.noted
        ignored, changing = {*self.ignored}, self.changing | other.changing
        for name in names:
            argument = name.removeprefix(_ARGUMENTS)
            if argument != name:
                places = itertools.accumulate(argument.split("."), "{}.{}".format)
                is_ignored = "*" in ignored or not ignored.isdisjoint(places)
                if is_ignored or not are_known or argument in changing:
                    passed.add(name)
        return {*names} - passed

    def says_more_than(self, other: Identity) -> bool:
        """Whether it compares what `other` does not, besides a stage and defaults."""
        return bool(self.compared.keys() - other.compared.keys() - self._usual - {"stage"})

    def digest(self, *, whole: bool = False) -> str:
        """Where to look for its dumps: a hash of role, stage and prompts, 16 hex digits.

        Of the `whole` call that of all that is compared; an argument at its default has no part.
        """
        from rlskip.format.fingerprint import canonical  # here and below: who only reads needs none

        names = self.compared.keys() - self._usual if whole else _NAMING & self.compared.keys()
        text = canonical({name: self.compared[name] for name in names})
        return xxhash.xxh3_64_hexdigest(text.encode())

    def as_json(self) -> dict[str, Any]:
        return {"compared": dict(self.compared), "noted": dict(self.noted)}

    @classmethod
    def from_json(cls, data: Any) -> Identity:
        """The identity that :meth:`as_json` gave; raises TypeError or ValueError for other data."""
        parts = data if isinstance(data, dict) else {}
        if parts.keys() != {"compared", "noted"} or {*map(type, parts.values())} != {dict}:
            raise ValueError("not an identity")
        compared, noted = data["compared"], data["noted"]
        lists = [noted.get(_DEFAULTS, []), noted.get(_CHANGING, [])]
        texts = [*compared, *noted, *lists[0], *lists[1], compared.get("prompts", "")]
        if not {*map(type, lists)} <= {list} or not {*map(type, texts)} <= {str}:
            raise ValueError("an identity with entries of other types")
        return cls(compared, noted)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: comparable(value, name) for name, value in values.items()}


# -- single values ----------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for the value of a name that one of two sides does not have."""


def comparable(
    value: Any,
    where: str,
    simplify: Callable[[Any], Any] | None = None,
    keep: Callable[[Any], Any] | None = None,
) -> Any:
    """`value` as :func:`~rlskip.format.fingerprint.plain_json`, with hashes of what is long.

    `keep` is given the plain value, and returns what of it counts.
    """
    from rlskip.format.fingerprint import plain_json

    plain = plain_json(value, where, simplify)
    return _shortened(plain if keep is None else keep(plain))


def without(names: Collection[str], value: Any, place: str = "", bare: Collection[str] = ()) -> Any:
    """A plain value without entries of its mappings: with these dotted names, or `bare` ones."""
    if isinstance(value, list) and (names or bare):
        return [without(names, one, place, bare) for one in value]
    if not isinstance(value, dict) or not (names or bare):
        return value
    places = {key: f"{place}.{key}" if place else key for key in value if key not in bare}
    return {k: without(names, value[k], at, bare) for k, at in places.items() if at not in names}


def _shortened(value: Any) -> Any:
    from rlskip.format.fingerprint import canonical

    if len(repr(value)) < _LONG // 6:  # at once: a character takes six at most
        return value
    shorter = value
    if isinstance(value, dict):
        shorter = {key: _shortened(part) for key, part in value.items()}
    elif not isinstance(value, str | list):
        return value
    if len(canonical(shorter)) <= _LONG:
        return shorter
    text = canonical(value)
    return f"<{type(value).__name__} of {len(value)}: {xxhash.xxh3_128_hexdigest(text.encode())}>"


def differing(
    keys: Iterable[str], now: Mapping[str, Any], then: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """The places below these keys of two plain mappings at which they differ, with both values."""
    from rlskip.format.fingerprint import canonical

    for key in keys:
        place, a, b = f"{within}{key}", now.get(key, ABSENT), then.get(key, ABSENT)
        if repr(a) == repr(b):  # most are
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differing(sorted({*a, *b}), a, b, f"{place}.")
        elif a is ABSENT or b is ABSENT or canonical(a) != canonical(b):
            yield place, a, b


def differences(keys: Iterable[str], now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """How two plain mappings differ below these keys: a line for each place.

    >>> differences(["sampling"], {"sampling": {"top_p": 1, "n": 2}}, {"sampling": {"top_p": 1.0}})
    ['sampling.n: 2 now, absent in the dump']
    """
    lines = []
    for place, *values in differing(keys, now, then):
        a, b = map(repr, values)
        # Of long values, show the part that differs.
        alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
        if start := max(0, alike - 20) if max(len(a), len(b)) > 60 else 0:
            a, b = f"...{a[start:]}", f"...{b[start:]}"
        lines.append(f"{place}: {short(a, 60)} now, {short(b, 60)} in the dump")
    return lines
