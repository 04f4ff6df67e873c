"""Jobs and threads that publish, read, cancel and remove at once, interleaved file by file.

Each writer and reader is a thread that runs alone between two of its file operations. A seed
decides which runs next, so that a failure can be repeated.
"""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.jobs.alive import WORK
from rlskip.store import AbsentDumpError, StepStore
from rlskip.store.layout import part_name
from tests.faulty_files import FaultyFiles

_STALL_S = 0.01
"""A thread that waits for a lock does not take its turn; another one does."""


class Cancelled(BaseException):
    """What ends a writer at one of its operations."""


@attrs.define(eq=False)
class Actor:
    """Saves `call` of step 1 in the store of `job`, or reads it; `value` is what it saves.

    ``cancel_at`` is the operation at which it is cancelled. ``moves`` is the number of the call to
    which it goes where another has the place.
    """

    kind: str
    job: int
    call: str
    cancel_at: int | None = None
    moves: int | None = None
    operations: int = 0
    outcome: Any = None
    error: BaseException | None = None

    @property
    def value(self) -> list[int]:
        return [id(self)] * (1 + self.job)

    def run(self, store: StepStore) -> None:
        try:
            if self.kind == "read":
                with contextlib.suppress(AbsentDumpError):
                    self.outcome = store.load(1, call=self.call)
            elif self.kind == "remove":
                self.outcome = store.save(2, self.value)
            else:
                dump = store.prepare(1, self.value, call=self.call)
                self.outcome, is_own = store.write(dump)
                while self.moves is not None and not is_own:
                    self.moves += 1
                    self.outcome, is_own = store.write(dump.named(part_name(self.moves)))
        except (Exception, Cancelled) as error:
            self.error = error


class Interleaved(FaultyFiles):
    """Lets one thread at a time do its next file operation."""

    def __init__(self, root: Path, seed: int, actors: dict[threading.Thread, Actor]) -> None:
        super().__init__(root)
        self._random = random.Random(seed)
        self._actors = actors
        self._changed = threading.Condition()
        self._next: threading.Thread | None = None

    def operate(self, name: str, path: str, other: str | None = None) -> None:
        me = threading.current_thread()
        actor = self._actors.get(me)
        if actor is None:  # the heartbeat
            return
        with self._changed:
            alive = [thread for thread in self._actors if thread.is_alive()]
            self._next = self._random.choice(alive)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is me, _STALL_S)
        actor.operations += 1
        if actor.operations == actor.cancel_at:
            raise Cancelled


_CALLS = st.sampled_from(["", "", "part-1", "part-2"])
_ACTORS = st.lists(
    st.one_of(
        st.builds(Actor, st.just("save"), st.integers(0, 1), _CALLS),
        st.builds(Actor, st.just("save"), st.integers(0, 1), _CALLS, st.integers(1, 40)),
        st.builds(Actor, st.just("save"), st.integers(0, 1), _CALLS, st.none(), st.just(10)),
        st.builds(Actor, st.just("read"), st.integers(0, 1), _CALLS),
        st.builds(Actor, st.just("remove"), st.just(2), st.just("")),
    ),
    min_size=2,
    max_size=6,
)


LONG = [pytest.mark.long, pytest.mark.timeout(900)]  # five minutes, and more on a busy machine


@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=LONG)])
def test_whatever_runs_between_two_operations_each_dump_is_one_writers(
    examples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=examples)
    @given(actors=_ACTORS, seed=st.integers(0, 1 << 20), ranks=st.integers(1, 2))
    def interleaved(actors: list[Actor], seed: int, ranks: int) -> None:
        _check(actors, seed, tmp_path_factory.mktemp("run"), ranks)

    interleaved()


def _check(given_actors: list[Actor], seed: int, folder: Path, ranks: int) -> None:
    """Of several ranks this is the first, whose shards are replaced."""
    actors = [
        Actor(a.kind, a.job, a.call, a.cancel_at, a.moves) for a in given_actors
    ]  # hypothesis keeps those that it drew
    # Two jobs write; the threads of a job share its store. A third keeps only what it wrote last.
    stores = [StepStore(folder, world_size=ranks, keep_last=keep) for keep in (None, None, 1)]
    threads = {
        threading.Thread(target=actor.run, args=(stores[actor.job],), daemon=True): actor
        for actor in actors
    }
    with Interleaved(folder, seed, threads):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    cancelled = any(actor.cancel_at for actor in actors)
    removed = any(actor.kind == "remove" for actor in actors)
    values = [actor.value for actor in actors if actor.kind == "save"]
    for actor in actors:
        assert actor.error is None or isinstance(actor.error, Cancelled), actor.error
        if actor.kind == "read":
            assert actor.outcome is None or actor.outcome in values
    store = StepStore(folder, world_size=ranks)
    for actor in actors:
        if actor.kind == "save" and actor.outcome is not None:
            call = actor.outcome.call
            there = store.read_meta(1, call)
            if there is not None:
                assert store.load(1, call=call) in values
            if not removed and ranks == 1:  # else another may have dumped the call since
                assert there == actor.outcome, "whose dump it is"
                assert actor.moves is None or store.load(1, call=call) == actor.value
            elif not removed and not cancelled:
                assert there in [other.outcome for other in actors], "the last one's stays"
    left = [path.name for path in folder.glob(f"{WORK}/*~*")]
    assert left == [] or cancelled, left
    bad = [path.name for path in folder.rglob("*.bad-*")]
    assert bad == [] or cancelled, "nothing that was sound is quarantined"
