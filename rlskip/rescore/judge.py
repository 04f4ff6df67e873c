"""A reward function whose verdicts are kept: each is asked for once."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlskip._files import safe_name
from rlskip._human import counted
from rlskip.batch.columns import is_tensor
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.errors import ConfigError, RlskipError
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.format.fingerprint import VOLATILE, fingerprint
from rlskip.rescore.kept import ABSENT, Verdicts

Function = TypeVar("Function", bound=Callable[..., Any])

#: The parameter by which a signature is known: it holds what is judged, of one session or of many.
ONE, VERL_MANY = ("solution_str",), ("solution_strs",)
MANY = ("completions", *VERL_MANY, "completion_ids")
_NEUTRAL = frozenset({"log_extra", "log_metric", "reward_model_tokenizer", "reward_router_address"})
"""Arguments that trainers add and that say nothing of a session."""
_BESIDE = VOLATILE | {"environments", "trainer_state"}
"""Arguments that differ from step to step. They count only for a function that names them."""
_WAIT_S = (0.01, 0.5)
_DIRECTORY = "~/.rlskip/verdicts"
_DYNAMIC = re.compile(r"import \*|\b(__getattr__|globals|vars|setattr|exec)\b")
_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


class RewardError(RlskipError, TypeError):
    """A reward function that cannot be called, or whose verdicts cannot be kept."""


class Judge:
    """Asks a reward function for what no earlier call was told; see :func:`cached_reward`.

    ``names`` are those of its parameters, of which it ``needs`` those without a default; others may
    be given if it ``takes_any``. ``asked`` counts the verdicts that it was asked for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        directory: str | Path | None,
        version: str | None,
        ignore: Sequence[str] = (),
    ) -> None:
        self.function = function
        self.name = _name_of(function)
        if isinstance(function, functools.partial):
            what, remedy = "it is a partial, of which verdicts would depend", "give a function"
            raise RewardError(what, self.name, remedy)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise RewardError(f"it cannot be called: {error}", self.name) from error
        parameters = self._signature.parameters
        judged = [name for name in (*ONE, *MANY) if name in parameters]
        if not judged:
            what = f"its parameters are {', '.join(parameters) or 'none'}"
            remedy = "it takes solution_str (one session, as verl calls it), solution_strs (all), "
            remedy += "or completions or completion_ids (as TRL does)"
            raise RewardError(what, self.name, remedy)
        self.judged = judged[0]
        self.takes_many = self.judged in MANY
        # An object may have an async `__call__`.
        calls = (function, getattr(function, "__call__", None))  # noqa: B004
        self.is_async = any(map(inspect.iscoroutinefunction, calls))
        any_name, any_place = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        named = {n: p for n, p in parameters.items() if p.kind not in (any_name, any_place)}
        self.names = frozenset(named)
        self.needs = frozenset(n for n, p in named.items() if p.default is inspect.Parameter.empty)
        self.takes_any = any(p.kind == any_name for p in parameters.values())
        ignored = {ignore} if isinstance(ignore, str) else {*ignore}
        self._ignored = (ignored | _NEUTRAL | (_BESIDE - self.names)) - {self.judged}
        self.version = version
        place = _DIRECTORY if directory is None else directory
        kept = parse_dump_dir(place, "rlskip.cached_reward(directory=...)")
        self.verdicts = Verdicts(kept / safe_name(self.name))
        self.asked = 0
        self._lock = threading.Lock()

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults and without those of ``*args``."""
        found = self._signature.bind(*args, **kwargs)
        found.apply_defaults()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, p in self._signature.parameters.items() if p.kind in kinds]
        return {**dict(zip(names, found.args, strict=False)), **found.kwargs}

    def ask(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The verdicts of a call, one for each session; of a function that is not async."""

        async def call(**given: Any) -> Any:
            return self.function(**given)

        async def sleep(seconds: float) -> None:
            time.sleep(seconds)

        try:
            self._verdicts(arguments, call, sleep).send(None)
        except StopIteration as done:
            found: list[Any] = done.value
            return found
        raise AssertionError("neither of both suspends")

    async def ask_async(self, arguments: Mapping[str, Any]) -> list[Any]:
        """As :meth:`ask`, of an async function."""
        return await self._verdicts(arguments, self.function, asyncio.sleep)

    async def _verdicts(
        self,
        arguments: Mapping[str, Any],
        call: Callable[..., Awaitable[Any]],
        sleep: Callable[[float], Awaitable[None]],
    ) -> list[Any]:
        """What it holds is released while it sleeps, so that no two calls wait for each other."""
        keys = [self._key(row) for row in self._rows(arguments)]
        rows = {keys[i]: i for i in reversed(range(len(keys)))}  # equal ones are asked for once
        found: dict[str, Any] = {}
        wait, longest = _WAIT_S
        while True:
            with self.verdicts.claims() as claim:
                mine = []
                for key in rows.keys() - found.keys():
                    is_mine = claim(key)
                    value = self.verdicts.find(key)  # only now: its last owner may have kept it
                    if value is not ABSENT:
                        found[key] = value
                    elif is_mine:
                        mine.append(key)
                if mine:
                    mine.sort(key=rows.__getitem__)
                    reply = await call(**self._call(arguments, [rows[key] for key in mine]))
                    for key, value in zip(mine, self._checked(reply, len(mine)), strict=True):
                        found[key] = self.verdicts.keep(key, value)
                    with self._lock:
                        self.asked += len(mine)
            if len(found) == len(rows):
                return [found[key] for key in keys]
            await sleep(wait)
            wait = min(2 * wait, longest)

    def _rows(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What counts of each session's arguments."""
        counted = {k: v for k, v in arguments.items() if k not in self._ignored}
        if not self.takes_many:
            return [counted]
        columns = {name: list(counted[name]) for name in self._columns(counted)}
        n = len(counted[self.judged])
        return [{**counted, **{name: columns[name][i] for name in columns}} for i in range(n)]

    def _key(self, row: Mapping[str, Any]) -> str:
        try:
            return fingerprint({**row, "": [self.name, self.version]}, ())
        except UnsupportedTypeError as error:
            what = f"an argument has no content that can be compared: {error.what}"
            remedy = "leave it out: rlskip.cached_reward(function, ..., ignore=[...])"
            raise RewardError(what, error.where, remedy) from error

    def _call(self, arguments: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
        """The arguments for some of the sessions."""
        if not self.takes_many or len(rows) == len(arguments[self.judged]):
            return dict(arguments)
        some = {name: _cut(arguments[name], rows) for name in self._columns(arguments)}
        return {**arguments, **some}

    def _columns(self, arguments: Mapping[str, Any]) -> list[str]:
        """The arguments that hold one value a session; a default holds none."""
        n, own = len(arguments[self.judged]), self._signature.parameters
        return [
            name
            for name, value in arguments.items()
            if _is_column(value, n) and not (name in own and value is own[name].default)
        ]

    def _checked(self, values: Any, n: int) -> Sequence[Any]:
        if not self.takes_many:
            return [values]
        found: Sequence[Any] = values.tolist() if is_tensor(values) else values
        if not _is_column(found, n):
            many = hasattr(found, "__len__")
            got = counted(len(found), "value") if many else type(found).__name__
            raise RewardError(f"it returned {got} for {counted(n, 'session')}", self.name)
        return found


def cached_reward(
    function: Function,
    *,
    version: str = "",
    directory: str | Path | None = None,
    ignore: Sequence[str] = (),
) -> Function:
    """A reward function that asks `function` only for what no call was told before.

    It is called as `function` is, for example as verl's ``custom_reward_function`` or one of TRL's
    ``reward_funcs``, and async if that is. A verdict counts for equal arguments, and for the name
    and the `version` of `function`. Jobs share verdicts, and a killed job loses none. What else
    `function` does, such as logging, is done only when it is asked.

    Parameters
    ----------
    function
        Takes ``solution_str``, or ``solution_strs``, ``completions`` or ``completion_ids``, besides
        others. Of the latter, each verdict must depend on its own session alone: any argument of
        their length, except a default, holds one value a session. Arguments that differ from step
        to step, such as ``uid``, ``timestamp`` and ``trainer_state``, count only for a function
        that has a parameter of that name.
    version
        Names all that verdicts depend on besides arguments: the code, what a closure or an object
        holds, the model behind a URL. Under another version every verdict is asked for again.
    directory
        Where verdicts are kept; ``~/.rlskip/verdicts`` by default.
    ignore
        Arguments that verdicts do not depend on.

    Raises
    ------
    RewardError
        `function` takes none of these, or is a partial, or no version is given.
    """
    judge = Judge(function, directory, version, ignore)
    if not version:
        what = "it has no version, so verdicts of its older code would count"
        remedy = 'give one, another after each edit: rlskip.cached_reward(function, version="1")'
        raise RewardError(what, judge.name, remedy)
    cached: Any
    if judge.is_async:

        @functools.wraps(function)
        async def cached(*args: Any, **kwargs: Any) -> Any:
            found = await judge.ask_async(judge.bound(args, kwargs))
            return found if judge.takes_many else found[0]
    else:

        @functools.wraps(function)
        def cached(*args: Any, **kwargs: Any) -> Any:
            found = judge.ask(judge.bound(args, kwargs))
            return found if judge.takes_many else found[0]

    cached._rlskip_judge = judge
    return cached  # type: ignore[no-any-return]


def _is_column(value: Any, n: int) -> bool:
    if isinstance(value, str | bytes | Mapping | Set):
        return False
    try:
        return len(value) == n
    except TypeError:  # a number, an iterator, an array without dimensions
        return False


def _cut(column: Any, rows: Sequence[int]) -> Any:
    """Some of a column's values; arrays and tensors remain what they are."""
    if isinstance(column, np.ndarray) or is_tensor(column):
        return column[list(rows)]
    values = list(column)
    return [values[i] for i in rows]


def _name_of(function: Any) -> str:
    """File and name: a trainer that loads a file by its path gives the module a name of its own."""
    named = function if hasattr(function, "__qualname__") else type(function)
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # of a builtin
        file = None
    if file is None or not Path(file).is_file():
        return f"{named.__module__}.{named.__qualname__}"
    return f"{Path(file).stem}.{named.__qualname__}"


# -- functions of the user's by name -----------------------------------------------------------


def named_function(spec: str, option: str) -> Any:
    """What ``package.module:name`` names; modules of the working directory come first.

    Raises ConfigError, which names the `option`, without such a function, or where its module
    cannot be imported.
    """
    module, _, name = spec.partition(":")
    if not name:
        raise ConfigError(f"{spec!r} names no function", option, "give package.module:name")
    sys.path.insert(0, os.getcwd())
    _refuse_typo(module, name, option)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError(f"it cannot be called, for it is of type {type(found).__name__}")
    except (Exception, SystemExit) as error:  # of what the module runs
        what = f"{spec} cannot be imported: {type(error).__name__}: {error}"
        how = "give package.module:name, where python -c 'import package.module' succeeds"
        raise ConfigError(what, option, how) from error
    return found


def _refuse_typo(module: str, name: str, option: str) -> None:
    """Refuse a name that a module's source lacks, before the module imports what takes seconds."""
    file = Path(f"{module}.py")
    source = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    names, word = _DEFINED.findall(source), rf"\b{re.escape(name.partition('.')[0])}\b"
    if not names or re.search(word, source) or _DYNAMIC.search(source):
        return
    what = f"{module}:{name} does not exist: the module has no such function"
    raise ConfigError(what, option, f"it has {', '.join(names):.200}")
