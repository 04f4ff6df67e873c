"""Whether a dump's rollouts are those that this run would generate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
import xxhash

from rlskip.store.comparable import ABSENT, canonical, comparable, differences

_NAMED = ("role", "stage", "prompts")
_ARGUMENTS = "arguments."
_DEFAULTS = "defaults"
_PLACE, _CODE, _CHANGING = "place", "code", "changing"
GIVEN = "given"
"""Noted of rollouts that were given, not generated: what they lack was not what made them."""


@attrs.frozen
class Identity:
    """What rollouts were generated from, by name.

    Parameters
    ----------
    compared
        What must be equal, as plain JSON: ``prompts`` (their hash), ``role``, ``stage``, ``n``,
        ``prompt_len``, ``response_len``, ``sampling.NAME``, ``arguments.NAME``, ``meta_info.NAME``,
        ``identity.NAME``, ``config.KEY``, and ``code`` if ``skip.identity`` names it.
    noted
        A difference is only logged: ``model``, ``versions.NAME``, ``code`` (a digest of the
        stage's) and ``reads.NAME`` (what it reads of modules), these where both know them. Then
        ``defaults``, the names of arguments that have their default; without it the arguments are
        not known. ``changing``: of those that change while stages run, of which no value is right.
        ``place``, of a run that was given no name: another one, unless it has the same ``code``,
        is as good as another name. ``given``: the rollouts were not generated, so what is not
        in `compared` is not compared.
    ignored
        Names of arguments that are not compared now, whatever a dump has; ``*`` is all.
    """

    compared: Mapping[str, Any] = attrs.field(factory=dict)
    noted: Mapping[str, Any] = attrs.field(factory=dict)
    ignored: Collection[str] = attrs.field(default=(), eq=False, repr=False)

    @classmethod
    def of(
        cls,
        compared: Mapping[str, Any],
        noted: Mapping[str, Any] | None = None,
        ignored: Collection[str] = (),
    ) -> Identity:
        """An identity of values of any kind.

        Raises UnsupportedTypeError for a value that cannot be compared, by name.
        """
        return cls(_plain(compared), _plain(noted or {}), ignored)

    def adding(self, compared: Mapping[str, Any]) -> Identity:
        """This with further entries, or others, in `compared`; raises as :meth:`of`."""
        return attrs.evolve(self, compared={**self.compared, **_plain(compared)})

    def without(self, name: str) -> Identity:
        """This without an entry of `compared`."""
        kept = {known: value for known, value in self.compared.items() if known != name}
        return attrs.evolve(self, compared=kept)

    def for_prompts(self, prompts: str | None) -> Identity:
        """This for the prompts of that hash; None: for any."""
        kept = self.without("prompts")
        return kept if prompts is None else kept.adding({"prompts": prompts})

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
        if _CODE in now and _CODE in other.noted:  # every dump notes it
            then = {_CODE: other.noted[_CODE], **then}
        names = sorted({*now, *then}, key=lambda name: (name != "prompts", name))
        must = _lines([name for name in names if not self._passes(name, other)], now, then)
        code = self.noted.get(_CODE)
        if (place := self.moved_from(other)) and (code is None or code != other.noted.get(_CODE)):
            must.append(
                f"place: {self.noted[_PLACE]!r} now, {place!r} in the dump, and the function's "
                "source is not the same; skip.experiment_name=NAME names this run"
            )
        either = {*self.noted, *other.noted} - {_DEFAULTS, _CHANGING, _PLACE, GIVEN}
        both = self.noted.keys() & other.noted.keys()
        noted = {name for name in either if name in both or not name.startswith("reads.")}
        if _kind_of_code(self.noted) != _kind_of_code(other.noted):
            noted.discard(_CODE)
        warn = _lines(sorted(noted), self.noted, other.noted)
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

    def _passes(self, name: str, other: Identity) -> bool:
        """Whether a name is not compared with `other`."""
        is_here, is_there = name in self.compared, name in other.compared
        if name == _CODE:
            return not is_here
        if other.noted.get(GIVEN) and not is_there and name != "prompts":
            return True
        if not name.startswith(_ARGUMENTS):
            return not (is_here and is_there) and name in ("role", "stage")
        argument = name.removeprefix(_ARGUMENTS)
        return (
            "*" in self.ignored
            or any(f"{argument}.".startswith(f"{one}.") for one in self.ignored)
            or argument in self.changing | other.changing
            or not (_DEFAULTS in self.noted and _DEFAULTS in other.noted)
            or (not is_there and name in self._usual)
            or (not is_here and name in other._usual)
        )

    def digest(self) -> str:
        """Where to look for its dumps: a hash of role, stage and prompts, 16 hex digits."""
        return self._hash(_NAMED)

    def compared_digest(self) -> str:
        """A hash of all that is compared, 16 hex digits; an argument at its default has no part."""
        return self._hash(self.compared.keys() - self._usual)

    def _hash(self, names: Collection[str]) -> str:
        chosen = {name: self.compared[name] for name in names if name in self.compared}
        return xxhash.xxh3_64_hexdigest(canonical(chosen).encode())

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


def _lines(names: Iterable[str], now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    return [
        line
        for name in names
        for line in differences(name, now.get(name, ABSENT), then.get(name, ABSENT))
    ]


def _kind_of_code(noted: Mapping[str, Any]) -> str:
    """Whether the code is that of a source or of Python's; empty: none is known."""
    return str(noted.get(_CODE, "")).rpartition(" ")[0].rpartition(" ")[2]
