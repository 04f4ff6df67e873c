"""A role that is used by hand, outside a decorated function: the methods of verl's roles."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.skip.call import Call, Stage

# Of calls that have a step of their own, so many are known until they are served or kept.
_MOST = 1000


class CallsByHand:
    """Gives a role the methods of verl's ``BaseSkip``, which name a call by step and arguments.

    A call is the same one as long as its step and its arguments are: the very same objects, in the
    same visit, until :meth:`warp_function` has served it or :meth:`prepare_data` has kept its
    result.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: list[Call] = []  # looked up, and neither served nor kept so far
        self._asked_lock = threading.Lock()
        self._present = threading.local()

    @abstractmethod
    def find(self, call: Call) -> bool: ...

    @abstractmethod
    def replay(self, call: Call) -> Any: ...

    @abstractmethod
    def keep(self, call: Call, result: Any) -> None: ...

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a dump serves this call; asked again, the answer is the same."""
        return self._looked_up(step, func, args, kwargs).found is not None

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What replaces ``func(*args, **kwargs)``.

        Raises
        ------
        DumpError
            No dump serves the call, or it is unusable.
        """
        call = self._looked_up(step, func, args, kwargs)
        result = self.replay(call)
        self._end(call)
        return result

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Keep `result`, which the stage returned for these arguments."""
        call = self._known(step, args, kwargs)
        if call is None:
            call = Call(Stage(_no_function, "", _likely_prompts), args, kwargs, step)
        try:
            self.keep(call, result)
        finally:
            self._end(call)

    @contextmanager
    def at_hand(self, call: Call) -> Iterator[None]:
        """Within the block and this thread, the methods above are about `call`."""
        self._present.call = call
        try:
            yield
        finally:
            self._present.call = None

    def forget_calls(self) -> None:
        """The calls so far are no longer known: their visit is over."""
        with self._asked_lock:
            asked, self._asked = self._asked, []
        for call in asked:
            call.cleanup.close()

    def _looked_up(
        self, step: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        call = self._known(step, args, kwargs) or Call(Stage(func, ""), args, kwargs, step)
        if call.visit is None:
            try:
                self.find(call)
            except BaseException:
                self._end(call)
                raise
            if call is not self._call_at_hand():
                with self._asked_lock:
                    self._asked.append(call)
                    oldest = self._asked[:-_MOST]
                for old in oldest:
                    self._end(old)
        return call

    def _known(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        present = self._call_at_hand()
        if present is not None and present.step == step:
            return present
        with self._asked_lock:
            for call in self._asked:
                if call.step == step and _are_same((args, kwargs), (call.args, call.kwargs)):
                    return call
        return None

    def _call_at_hand(self) -> Call | None:
        return getattr(self._present, "call", None)

    def _end(self, call: Call) -> None:
        if call is self._call_at_hand():
            return  # the manager ends it
        with self._asked_lock:
            self._asked = [one for one in self._asked if one is not call]
        call.cleanup.close()


def _are_same(one: Any, other: Any) -> bool:
    ours, theirs = ([*args, *kwargs, *kwargs.values()] for args, kwargs in (one, other))
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _no_function(*args: Any, **kwargs: Any) -> None:
    """Stands for the stage where only its arguments are known."""


def _likely_prompts(*args: Any, **kwargs: Any) -> Any:
    """The argument `prompts`, else the first that is a batch, else the first."""
    if "prompts" in kwargs:
        return kwargs["prompts"]
    given = [*args, *kwargs.values()]
    return next((one for one in given if columns_of(one)), given[0] if given else None)
