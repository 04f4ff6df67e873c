"""From a mapping to a dataclass, with *every* problem found and named at once.

Types are left to OmegaConf, key by key: as a whole it stops at the first error, and a `+key=...`
passes even a typed node. Choices and ranges are in the metadata of the fields, because OmegaConf
reads neither `Literal` nor `Annotated`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from rlskip.config.register import NODES
from rlskip.errors import ConfigError

T = TypeVar("T")

_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")
_FIELD = re.compile(r"^((?:    # .*\n)+)    (\w+): ", re.MULTILINE)
_KNOWN_RESOLVER = re.compile(r"oc\.|(hydra|now|python_version)$")

#: For keys of a node: a key of the host's, and the value there.
OfHost = Mapping[str, tuple[str, Any]]
NOTHING: OfHost = MappingProxyType({})


@attrs.frozen
class Problem:
    """One thing wrong in a config: the full key, what is wrong, what to type instead."""

    key: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


def raise_all(problems: list[Problem]) -> None:
    """Raise one :class:`ConfigError` that lists `problems`; do nothing when there are none."""
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.what, only.key, only.remedy)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def calls_own_resolver(value: Any) -> bool:
    """Whether a text has an interpolation by another resolver than OmegaConf's and Hydra's.

    It may count or draw, so rlskip never calls it.
    """
    return isinstance(value, str) and not all(map(_KNOWN_RESOLVER.match, _RESOLVER.findall(value)))


def readable(config: Any) -> Any:
    """A config in which interpolations by the application's own resolvers are plain texts."""
    known = all(map(_KNOWN_RESOLVER.match, getattr(BaseContainer, "_resolvers", ("unknown",))))
    if known or not isinstance(config, DictConfig):
        return config

    def escaped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: escaped(part) for key, part in value.items()}
        if isinstance(value, list):
            return [*map(escaped, value)]
        return value.replace("${", r"\${") if calls_own_resolver(value) else value

    return OmegaConf.create(escaped(OmegaConf.to_container(config, resolve=False)))


def look_up(config: Any, key: str) -> Any:
    """The value at a dotted key of a DictConfig, mapping or dataclass; None when not there.

    Raises
    ------
    ConfigError
        An interpolation on the way does not resolve.
    """
    try:
        if isinstance(config, DictConfig):
            return OmegaConf.select(config, key, default=None)
        for name in key.split("."):
            config = entry(config, name)
    except ConfigTypeError:  # a list is on the way
        return None
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], key) from error
    return config


def look_up_first(config: Any, keys: Iterable[str]) -> Any:
    """The value at the first of `keys` that is there; None if none is."""
    found = (look_up(config, key) for key in keys)
    return next((value for value in found if value is not None), None)


def leaves(node: Any, at: str = "", *, resolve: bool = True) -> Iterator[tuple[str, Any]]:
    """The leaves of a config with their dotted keys; what does not resolve is left out.

    Lists are leaves, and so are empty mappings. Without `resolve` interpolations stay as they are.
    """
    if not resolve and OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if is_node(node) and not isinstance(node, Mapping):
        node = vars(node)
    if isinstance(node, Mapping) and node:
        for name in list(node):
            try:
                value = node[name]
            except OmegaConfBaseException:  # unresolved, or ???
                continue
            yield from leaves(value, f"{at}.{name}" if at else str(name), resolve=resolve)
    elif OmegaConf.is_config(node):
        try:
            yield at, OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException:
            return
    else:
        yield at, node


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(f"{key}.".startswith(f"{one}.") for one in keys)


def is_node(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, Mapping) or is_instance


def entry(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):  # a DictConfig is one, too
        return holder.get(name)
    return getattr(holder, name, None) if is_node(holder) else None


def read(
    schema: type[T],
    node: Mapping[str, Any],
    at: str,
    problems: list[Problem],
    *,
    of_host: OfHost = NOTHING,
    otherwise: str = "",
) -> T:
    """Build `schema` from `node`, the mapping at key `at`; append what is wrong to `problems`.

    OmegaConf checks and converts each value by the type of its field. A key that is wrong or
    missing keeps the schema's default, so that reading continues. The metadata of a field may have
    ``choices``, numbers under ``min`` and ``max``, and ``parse``: a function of a value (not None)
    and its full key that returns what the field holds, or raises ConfigError.

    Parameters
    ----------
    of_host
        For keys that are null in `node`: the host's key and the value there. A problem of such a
        value is one of the host's key.
    otherwise
        That of :func:`did_you_mean`.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}  # type: ignore[arg-type]
    given = {str(name): (f"{at}.{name}", value) for name, value in node.items()}
    given |= {
        name: (key, value)
        for name, (key, value) in of_host.items()
        if name in fields and node.get(name) is None and value is not None
    }
    typed = OmegaConf.structured(schema)
    values: dict[str, Any] = {}
    for name, (key, value) in given.items():
        if (field := fields.get(name)) is None:
            remedy = did_you_mean(name, fields, at, otherwise)
            problems.append(Problem(key, "unknown key", remedy))
        elif value == "???":  # OmegaConf's mark of a value that is still missing
            problems.append(Problem(key, "no value was given (???)", f"add {key}=<value>"))
        else:
            try:
                values[name] = _checked(typed, field, value)
            except ValueError as error:
                what = str(error).splitlines()[0]
                said = "" if "choices" in field.metadata else comments(schema).get(name, "")
                first = re.split(r"[.] ", said, maxsplit=1)[0].rstrip(".")
                problems.append(Problem(key, what, first[:1].lower() + first[1:]))
    made = schema(**values)
    for name, field in fields.items():
        value, parse = getattr(made, name), field.metadata.get("parse")
        if parse is not None and value is not None:
            key, _ = given.get(name, (f"{at}.{name}", None))
            try:
                setattr(made, name, parse(value, key))
            except ConfigError as error:
                problems.append(Problem(error.where, error.what, error.remedy))
                setattr(made, name, None)
    return made


def _checked(typed: DictConfig, field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the `typed` node holds it; raises ValueError, as OmegaConf does."""
    typed[field.name] = value
    value = typed[field.name]
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if value is None:  # which OmegaConf has let pass
        if field.type == "Any" and field.default is not None:
            raise ValueError(f"no value was given (null); the default is {field.default}")
        return None
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(str(value), map(str, choices), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, choices))}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {value!r}")
    least, most = field.metadata.get("min"), field.metadata.get("max")
    if least is not None and value < least:
        raise ValueError(f"must be at least {least}, got {value!r}")
    if most is not None and value > most:
        raise ValueError(f"must be at most {most}, got {value!r}")
    return value


def comments(schema: type) -> dict[str, str]:
    """The comment above each field of a dataclass and of its bases: docs/keys.md and errors use it.

    Empty without the source.
    """
    bases = [base for base in reversed(schema.__mro__) if dataclasses.is_dataclass(base)]
    try:
        source = "".join(map(inspect.getsource, bases))
    except (OSError, TypeError):
        return {}
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in _FIELD.findall(source)}


def did_you_mean(name: str, known: Iterable[str], at: str = "", otherwise: str = "") -> str:
    """The remedy for an unknown name: the nearest known one, else `otherwise`, else all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {at + '.' if at else ''}{near[0]}?"
    return (otherwise or f"known: {', '.join(known)}") + if_own(at.partition(".")[0])


def if_own(name: str) -> str:
    """The end of a remedy where a node `name` may be the application's own key; else empty."""
    own = f"; if `{name}` is the application's own key, rename it: rlskip's node has that name"
    return own if name in NODES else ""
