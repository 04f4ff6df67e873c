"""From a mapping to a dataclass, with *every* problem found and named at once.

Types are left to OmegaConf, key by key: as a whole it stops at the first error, and a `+key=...`
passes even a typed node. Choices and ranges are in the metadata of the fields, because OmegaConf
reads neither `Literal` nor `Annotated`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import attrs
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from rlskip.errors import ConfigError
from rlskip_conf import NODES

T = TypeVar("T")

# A node with the types of a schema, to be copied: to make one takes five times as long.
_typed = functools.cache(OmegaConf.structured)
_FIELD = re.compile(r"^((?:    # .*\n)+)    (\w+): ", re.MULTILINE)
# A resolver of neither OmegaConf's nor Hydra's.
_OWN_RESOLVER = re.compile(r"\$\{\s*(?!oc\.|(?:hydra|now|python_version)\s*:)[\w.]+\s*:")


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
        raise ConfigError(problems[0].what, problems[0].key, problems[0].remedy)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def refuse_own_resolver(value: Any, key: str) -> None:
    """Raise if a value calls a resolver of the application's own, which may count or draw."""
    if _OWN_RESOLVER.search(str(value)):
        what = f"{value!r} needs a resolver of the application's own, which rlskip does not call"
        raise ConfigError(what, key, f"give the value: {key}=...")


def readable(config: Any) -> Any:
    """A config in which interpolations by the application's own resolvers are plain texts."""
    registered = getattr(BaseContainer, "_resolvers", ("unknown",))
    may_call = any(_OWN_RESOLVER.match(f"${{{name}:") for name in registered)
    if not (may_call and isinstance(config, DictConfig)):
        return config

    def escaped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: escaped(part) for key, part in value.items()}
        if isinstance(value, list):
            return [*map(escaped, value)]
        is_own = isinstance(value, str) and _OWN_RESOLVER.search(value)
        return value.replace("${", r"\${") if is_own else value

    plain = escaped(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.create(plain, flags={"allow_objects": True})


def is_node(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, Mapping) or is_instance


def look_up(config: Any, *keys: str) -> Any:
    """The value at the first of these dotted keys that has one; None if none has.

    `config` is a DictConfig, a mapping or a dataclass. Raises ConfigError for an interpolation on
    the way that does not resolve.
    """
    for key in keys:
        value = config
        try:
            for name in key.split("."):
                if isinstance(value, Mapping):  # a DictConfig is one, too
                    value = value.get(name)
                else:
                    value = getattr(value, name, None) if is_node(value) else None
        except OmegaConfBaseException as error:
            raise ConfigError(str(error).splitlines()[0], key, f"set {key}=...") from error
        if value is not None:
            return value
    return None


def leaves(node: Any, at: str = "", *, resolve: bool = True) -> Iterator[tuple[str, Any]]:
    """The leaves of a config with their dotted keys; what does not resolve is left out.

    Lists are leaves, and so are empty mappings. Without `resolve` interpolations stay as they are.
    """
    if not resolve and OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if is_node(node) and not isinstance(node, Mapping):
        node = vars(node)
    with suppress(OmegaConfBaseException):
        if not (isinstance(node, Mapping) and node):
            yield at, OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
            return
        for name in list(node):
            with suppress(OmegaConfBaseException):  # unresolved, or ???
                yield from leaves(node[name], f"{at}.{name}" if at else str(name), resolve=resolve)


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(f"{key}.".startswith(f"{one}.") for one in keys)


def read(
    schema: type[T],
    node: Mapping[str, Any],
    at: str,
    problems: list[Problem],
    *,
    of_host: Mapping[str, tuple[str, Any]] | None = None,
    otherwise: str = "",
) -> T:
    """Build `schema` from `node`, the mapping at key `at`; append what is wrong to `problems`.

    A key that is wrong or missing keeps its default, so that reading continues. `of_host` has a key
    of the host's and its value for keys that are null; `otherwise` is as in :func:`did_you_mean`.
    The metadata of a field may have ``choices``, ``min``, ``max``, a ``pattern`` of texts that are
    ``like``, and ``parse`` (of a value and its full key; it may raise ConfigError); ``needed_by``,
    another field and its values that need one here; ``null``, what that means without a host's.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}  # type: ignore[arg-type]
    # A copy: threads that read configs side by side would set each other's values.
    made, typed = schema(), copy.deepcopy(_typed(schema))  # type: ignore[arg-type]
    # A default is parsed, too.
    given = {n: (f"{at}.{n}", getattr(made, n)) for n in fields if "parse" in fields[n].metadata}
    given |= {str(name): (f"{at}.{name}", value) for name, value in node.items()}
    given |= of_host or {}
    for name, (key, value) in given.items():
        if name not in fields:
            problems.append(Problem(key, "unknown key", did_you_mean(name, fields, at, otherwise)))
            continue
        try:
            typed[name] = value
            setattr(made, name, _checked(typed[name], fields[name], key))
        except ConfigError as error:
            problems.append(Problem(error.where, error.what, error.remedy))
        except (ValueError, OmegaConfBaseException) as error:
            rules = fields[name].metadata
            known = rules.get("like") or ", ".join(map(str, rules.get("choices", ())))
            said, one_of = str(error).splitlines()[0], "one of " * ("choices" in rules)
            meant = f"give {one_of}{known}" if known else _meaning(schema, name)
            problems.append(Problem(key, said, "" if known and known in said else meant))
    for name, field in fields.items():
        if getattr(made, name) is not None:
            continue
        setattr(made, name, field.metadata.get("null"))
        other, values = field.metadata.get("needed_by", (name, ()))
        if (asks := getattr(made, other)) in values:
            what = f"{other}: {asks} needs a value here"
            problems.append(Problem(f"{at}.{name}", what, _meaning(schema, name)))
    return made


def _checked(value: Any, field: dataclasses.Field[Any], key: str) -> Any:
    """`value`, of the field's type, as the field holds it; raises ValueError."""
    rules = field.metadata
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if value is None:  # which OmegaConf has let pass
        if field.type == "Any" and field.default is not None:
            raise ValueError(f"no value was given (null); the default is {field.default}")
        return None
    if value not in rules.get("choices", (value,)):
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, rules['choices']))}")
    # As `not >=`, which holds for nan.
    if "min" in rules and not value >= rules["min"]:
        raise ValueError(f"must be at least {rules['min']}, got {value!r}")
    if "max" in rules and not value <= rules["max"]:
        raise ValueError(f"must be at most {rules['max']}, got {value!r}")
    for part in value if isinstance(value, list) else [value]:
        if "pattern" in rules and not re.fullmatch(rules["pattern"], part):
            raise ValueError(f"{part!r} is not {rules['like']}")
    return rules["parse"](value, key) if "parse" in rules else value


def comments(schema: type) -> dict[str, str]:
    """The comment above each field of a dataclass and of its bases; without the source none."""
    source = ""
    with suppress(OSError, TypeError):
        bases = [base for base in reversed(schema.__mro__) if dataclasses.is_dataclass(base)]
        source = "".join(map(inspect.getsource, bases))
    return {name: " ".join(re.findall(r"# (.*)", text)) for text, name in _FIELD.findall(source)}


def _meaning(schema: type, name: str) -> str:
    """The first sentence of a field's comment."""
    first = re.split(r"[.] ", comments(schema).get(name, ""), maxsplit=1)[0].rstrip(".")
    return first[:1].lower() + first[1:]


def did_you_mean(name: str, known: Iterable[str], at: str = "", otherwise: str = "") -> str:
    """The remedy for an unknown name: the nearest known one, else `otherwise`, else all of them."""
    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.6)
    if near:
        return f"did you mean {at + '.' if at else ''}{near[0]}?"
    return (otherwise or f"known: {', '.join(known)}") + if_own(at.partition(".")[0])


def if_own(name: str) -> str:
    """The end of a remedy where a node `name` may be the application's own key; else empty."""
    own = f"; if `{name}` is the application's own key, rename it: rlskip's node has that name"
    return own if name in NODES else ""
