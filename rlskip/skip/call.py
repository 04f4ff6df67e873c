"""One call of a decorated function, while rlskip looks at it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.jobs.served import Needs
from rlskip.skip.arguments import NEUTRAL_META, is_single
from rlskip.skip.refusals import nothing_to_tell_by
from rlskip.skip.stage import Given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlskip.skip.prompt_rows import PromptRows
    from rlskip.skip.run_dumps import PromptGroups
    from rlskip.skip.step_calls import Key


class Cleanup(ExitStack):
    """Callbacks to run when a call ends, however it ends.

    One that is added later runs at once: a thread continues when its task is cancelled. `failed`
    tells whether the call ended with an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over = self.failed = False
        self._lock = threading.Lock()

    def add(self, act: Callable[[], object]) -> None:
        with self._lock:
            if not self.over:
                self.callback(act)
                return
        act()

    def undo(self, act: Callable[[], object]) -> None:
        """As :meth:`add`, for a call that fails."""
        self.add(lambda: act() if self.failed else None)

    def __exit__(self, *error: Any) -> bool | None:
        with self._lock:
            self.over, self.failed = True, error[0] is not None
        return super().__exit__(*error)


@attrs.define(eq=False, slots=False)  # without slots, for the cached property
class Call(Given):
    """One call of a stage: what it was given, and what becomes of it.

    The manager makes one for each call and hands it to the methods of the role. Calls run side by
    side, so a role keeps nothing of a single call anywhere else.
    """

    step: int = -1
    #: Whether the stage always runs, and its result is only read.
    is_observed: bool = attrs.field(init=False, default=False)
    #: What the role computed from the prompts before the stage ran (a stage may alter its input).
    identity: Any = attrs.field(init=False, default=None)
    #: The visit of the step that it belongs to, and the dump that serves it; None: no dump does.
    visit: Any = attrs.field(init=False, default=None)
    found: Key | PromptGroups | None = attrs.field(init=False, default=None)
    #: The meta by which that dump was judged.
    meta: Any = attrs.field(init=False, default=None)
    #: What the ledger knows of that.
    parts: Sequence[Hashable] = attrs.field(init=False, default=())
    #: Its place among the calls of the visit, and its name among those of the step.
    place: int = attrs.field(init=False, default=0)
    name: str = attrs.field(init=False, default="")
    #: Whether nobody calls a decorated function: its role is asked by hand, and remembers nothing.
    by_hand: bool = attrs.field(init=False, default=False)
    #: The name of the dump that its own replaces, if any, and why no dump serves it.
    replaces: str | None = attrs.field(init=False, default=None)
    reason: str = attrs.field(init=False, default="")
    #: What its dump is, if no other call of the process has written one of that name.
    writes: Key | None = attrs.field(init=False, default=None)
    #: By what journals tell it from equal calls that were generated before, and are again: it
    #: resumes none of their sessions.
    again: str = attrs.field(init=False, default="")
    #: Whether another job has dumped this very call meanwhile, and what it dumped stays.
    is_dropped: bool = attrs.field(init=False, default=False)
    #: Writes an event to the job's records: ``record("dumped", bytes=...)``.
    record: Callable[..., None] = lambda event, **facts: None
    #: What the record of a hit adds: source, bytes, seconds_saved.
    facts: dict[str, Any] = attrs.field(init=False, factory=dict)
    #: Releases what the call holds.
    cleanup: Cleanup = attrs.field(init=False, factory=Cleanup)
    #: Of several ranks: what the shards of the call have in common.
    generation: str = attrs.field(init=False, default="")
    #: What a rank loaded, or why it could not, before the ranks agreed.
    loaded: Any = attrs.field(init=False, default=None)
    #: What the stage, a plain function, returned: ``coroutine``, ``task``; empty: its result.
    awaited: str = attrs.field(init=False, default="")
    #: How long the stage itself ran, or the dump took to load, in seconds.
    seconds: float = attrs.field(init=False, default=0.0)

    @functools.cached_property
    def needs(self) -> Needs:
        """What it needs of each session that it resumes."""
        return Needs(self.stage.lacks)

    @functools.cached_property
    def digests(self) -> list[str]:
        """The hash of each of its prompts, as they are before the stage, which may alter them.

        Raises
        ------
        UnsupportedTypeError
            They cannot be compared, or nothing tells them apart.
        """
        from rlskip.format.prompt_digests import digests_of  # needs torch

        stage, given = self.stage, self.args or self.kwargs
        digests = digests_of(self.prompts, stage.prompt_groups, NEUTRAL_META)
        is_none = self.prompts is None and stage.prompts is not None and given
        is_ignored = stage.has_only_ignored and is_single(self.prompts)
        if None in digests or is_none or is_ignored:
            raise nothing_to_tell_by(self)
        return cast("list[str]", digests)

    @functools.cached_property
    def prompt_rows(self) -> PromptRows | None:
        """The prompts one by one, as they are before the stage; None: they cannot be told apart."""
        from rlskip.skip.prompt_rows import PromptRows  # needs numpy

        try:
            return PromptRows.of(self.prompts, self.digests)
        except UnsupportedTypeError:
            return None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long the block runs."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began
