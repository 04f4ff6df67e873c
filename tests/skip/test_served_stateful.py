"""What serves which call, whatever the settings: dumps by step, in the run and by prompt, journals.

A run is what lies between two inits. In it no rollout serves two steps, or twice in one visit of a
step; by match=run and match=prompt it serves once. None that is there and fits is generated again,
and each serves the call that it is for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlskip import SkipManager
from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.queue import IncompleteRolloutError

N = 2
STEPS = (1, 2, 3)
PROMPTS = st.sampled_from(["a", "b", "ab", "ba", "c"])
FIRST = "z"  # what each visit calls first, as a step of other prompts would be a mismatch
SETTINGS = st.fixed_dictionaries(
    {
        "match": st.sampled_from(["step", "run", "prompt"]),
        "journal": st.sampled_from([True, True, True, False]),
        "needs": st.booleans(),  # whether the field `has`
        "dispatchers": st.integers(1, 2),
        "goes_on": st.booleans(),  # whether the dispatchers of the run before do
    }
)


Place = tuple[str, int]
"""The name of a dump's directory, and the number of that, which another one of the name has not."""


@attrs.frozen
class Draw:
    """A session's rollout, and whether it has the field that some runs need."""

    number: int
    has: bool


@attrs.frozen(eq=False)
class Dump:
    place: Place
    step: int
    run: int  # that wrote it
    prompts: str
    groups: tuple[tuple[Draw, ...], ...]

    @property
    def draws(self) -> list[Draw]:
        return list(itertools.chain(*self.groups))

    @property
    def has(self) -> bool:
        return all(draw.has for draw in self.draws)


Name = tuple[int, int, str, frozenset[Dump]]
"""Of a call in journals: its step, number and prompts, and the dumps that do not serve it again."""

Sessions = dict[tuple[int, int], Draw]
"""By number of the prompt in its batch, and of the session."""


class RefusedError(Exception):
    """What a call raises after its dump was loaded."""


class Served(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rlskip-served-"))
        self.numbers = itertools.count()
        self.dumps: list[Dump] = []
        self.journals: dict[Name, dict[int, Sessions]] = {}
        self.run, self.dispatchers = 0, list[RolloutDispatcher]()
        self.uids = itertools.count()
        self.step, self.refuses = 0, False
        on_replay = self.on_replay

        @SkipManager.annotate("rollout", stage="generate", lacks=self.lacks, on_replay=on_replay)
        def generate(prompts: list[dict[str, Any]]) -> Any:
            return self.dispatcher.collect(prompts, step=self.step)[0]

        self.generate = generate

    # -- the stage -----------------------------------------------------------------------------

    def lacks(self, rows: Any) -> list[str]:
        return ["has"] if self.skip["needs"] and not all(map(bool, rows["has"])) else []

    def on_replay(self, rows: Any) -> Any:
        if self.refuses:
            raise RefusedError
        return rows

    async def worker(self, prompt: Any, sampling: Any, session: Any) -> Any:
        if self.ran >= self.ends_at:
            raise ValueError("the process ends here")
        self.ran += 1
        draw = Draw(next(self.numbers), self.skip["needs"])
        self.made[prompt["uid"], session.session_id] = draw
        has, number = torch.tensor([draw.has]), torch.tensor([draw.number])
        return {"draw": number, "has": has, "text": prompt["text"]}

    # -- runs and visits -------------------------------------------------------------------------

    @initialize(skip=SETTINGS)
    def begin(self, skip: dict[str, Any]) -> None:
        self.start(skip)

    @rule(skip=SETTINGS)
    def start(self, skip: dict[str, Any]) -> None:
        """Another run: in another process, or a notebook's cell once more."""
        goes_on = skip["goes_on"] and self.run and skip["journal"] == self.skip["journal"]
        self.skip, self.step, self.run = skip, 0, self.run + 1
        self.used: dict[int, int] = {}  # the step that a draw serves in this run
        self.attempts = Counter[Name]()
        keys = {"match": skip["match"], "dump_dir": str(self.folder), "wait_s": 0}
        keys |= {"on_mismatch": "regenerate", "background_write": False}
        SkipManager.init({"skip": {**keys, "rollout": {"enable": True}}})
        if goes_on:
            return
        self.close()
        config = {"n": N, "journal": skip["journal"], "rollout_level": True}
        config["max_concurrent_rollouts_per_worker"] = 1
        store = SkipManager.store("rollout")
        self.dispatchers = [
            RolloutDispatcher(LocalPool(self.worker, 1), config={"dispatch": config}, store=store)
            for _ in range(skip["dispatchers"])
        ]

    @rule(step=st.sampled_from(STEPS))
    def visit(self, step: int) -> None:
        SkipManager.set_step(0)
        SkipManager.set_step(step)
        self.step, self.taken, self.seen = step, set[Dump](), set[int]()
        self.equal = Counter[str]()
        self.calls = list[str]()
        self.call(FIRST, 0, 99)

    @precondition(lambda self: self.step)
    @rule(skip=SETTINGS, other=st.none() | st.sampled_from(STEPS))
    def repeat(self, skip: dict[str, Any], other: int | None) -> None:
        """Another run makes the calls of the visit again, at another step first."""
        step, calls = self.step, self.calls[1:]
        self.start(skip)
        for at in (other, step):
            if at is not None:
                self.visit(at)
                for prompts in calls:
                    self.call(prompts, 0, 99)

    @precondition(lambda self: self.step)
    @rule(
        prompts=PROMPTS,
        dispatcher=st.integers(0, 1),
        ends_at=st.integers(1, 3),
        then=st.sampled_from(["again", "run", "run", ""]),
        skip=SETTINGS,
    )
    def fail(
        self, prompts: str, dispatcher: int, ends_at: int, then: str, skip: dict[str, Any]
    ) -> None:
        """A call that fails, if it is not replayed, and is made again, by this run or the next."""
        step = self.step
        if not self.call(prompts, dispatcher, ends_at):
            return
        if then == "run":
            self.start({**skip, "journal": self.skip["journal"]})
            self.visit(step)
        if then:
            self.call(prompts, dispatcher + 1, 99)

    @precondition(lambda self: self.step)
    @rule(prompts=PROMPTS, dispatcher=st.integers(0, 1))
    def succeed(self, prompts: str, dispatcher: int) -> None:
        self.call(prompts, dispatcher, 99)

    @precondition(lambda self: self.step)
    @rule(prompts=PROMPTS)
    def refuse(self, prompts: str) -> None:
        """A call that fails when its dump was loaded has been served nothing, and is made again."""
        expected = self.expect(prompts)
        if expected and not self.may_lack(expected):
            self.refuses = True
            with pytest.raises(RefusedError):
                self.generate(self.batch(prompts))
            self.refuses = False
        self.call(prompts, 0, 99)

    def batch(self, prompts: str) -> list[dict[str, Any]]:
        return [{"uid": f"u{next(self.uids)}", "text": prompt} for prompt in prompts]

    def call(self, prompts: str, dispatcher: int, ends_at: int) -> bool:
        """A call that fails when so many sessions of it have run; returns whether it did."""
        self.calls.append(prompts)
        self.dispatcher = self.dispatchers[dispatcher % len(self.dispatchers)]
        self.ends_at, self.ran = ends_at, 0
        self.made: dict[tuple[str, int], Draw] = {}
        batch = self.batch(prompts)
        expected, before = self.expect(prompts), self.places()
        rows = None
        with contextlib.suppress(IncompleteRolloutError):
            rows = self.generate(batch)
        there = self.places()
        gone = [dump for dump in self.dumps if dump.place not in there]
        assert not any(dump.has for dump in gone), "nothing is quarantined but for a lack"
        self.dumps = [dump for dump in self.dumps if dump not in gone]
        if rows is None or there - before:
            assert not expected or self.may_lack(expected), "what fits is not generated again"
            again = frozenset() if self.found_own else self.served
            self.generated(batch, again | {*gone}, exact=not self.rejects)
        if rows is None:
            return True
        self.equal[prompts] += 1
        assert list(rows["text"]) == [p for p in prompts for _ in range(N)], "the call's own"
        draws = [Draw(int(n), bool(h)) for n, h in zip(rows["draw"], rows["has"], strict=True)]
        groups = tuple((*draws[i : i + N],) for i in range(0, len(draws), N))
        assert all(draw.has for draw in draws) or not self.skip["needs"], "it has what is needed"
        if new := there - before:
            for (i, k), draw in self.resumed.items():
                assert groups[i][k] == draw, "its own sessions"
            dump = Dump(new.pop(), self.step, self.run, prompts, groups)
            self.dumps.append(dump)
            self.taken.add(dump)
        else:
            assert self.ran == 0
            self.replayed(expected, groups)
        for draw in draws:
            assert not (self.once and draw.number in self.used), "it serves once"
            assert self.used.setdefault(draw.number, self.step) == self.step, "it serves one step"
            assert draw.number not in self.seen, "it serves one call of a visit"
            self.seen.add(draw.number)
        return False

    # -- the rules of docs/skip.md ---------------------------------------------------------------

    def has_served(self, dump: Dump) -> bool:
        """Whether a rollout of it has served the run already, at any step."""
        return self.once and any(d.number in self.used for d in dump.draws)

    @property
    def once(self) -> bool:
        """Whether nothing serves twice in a run; else in a visit of a step."""
        return bool(self.skip["match"] != "step")

    def of_step(self, prompts: str) -> list[Dump]:
        """The dumps of such a call in the step itself that no call of the visit took."""
        mine = (d for d in self.dumps if (d.step, d.prompts) == (self.step, prompts))
        return [dump for dump in mine if dump not in self.taken]

    def expect(self, prompts: str) -> list[Any]:
        """The dumps one of which serves the call; or for each prompt its groups."""
        # Those whose draws have served, and whose sessions are not resumed either.
        own = self.of_step(prompts)
        later = [  # of earlier runs, and taken by this visit: they served another call of it
            dump for dump in self.taken
            if dump.prompts == prompts and dump.step == self.step and dump.run != self.run
            and dump.place[0] != f"{self.step}"
        ]  # fmt: skip
        self.served = frozenset(filter(self.has_served, [*own, *later]))
        own = [dump for dump in own if dump not in self.served]
        self.found_own = bool(own)
        number = self.equal[prompts]
        names = {f"{self.step}"} if number == 0 else set[str]()
        self.served |= {  # its own dump, which served another call of the visit
            dump for dump in self.taken
            if dump.prompts == prompts
            and (dump.place[0] in names or dump.place[0].endswith(f"-{number}"))
        }  # fmt: skip
        others = [dump for dump in self.dumps if dump.run != self.run]
        self.groups, self.rejects = list[Any](), False
        if self.skip["match"] == "prompt":
            left = [[*self.left_of(others, prompt)] for prompt in prompts]
            self.groups = left if all(left) else []
            self.rejects = not own and self.may_lack(self.groups)
            return own or self.groups
        elsewhere = [
            dump for dump in others
            if dump.prompts == prompts and dump.step != self.step
            and not self.has_served(dump) and dump not in self.taken
        ] if self.skip["match"] == "run" else []  # fmt: skip
        return own or elsewhere

    def left_of(self, dumps: list[Dump], prompt: str) -> Iterator[tuple[Draw, ...]]:
        """The groups of a prompt that have not served this run."""
        for dump in dumps:
            for p, group in zip(dump.prompts, dump.groups, strict=True):
                if p == prompt and not any(draw.number in self.used for draw in group):
                    yield group

    def may_lack(self, expected: list[Any]) -> bool:
        """Whether what serves the call may lack what the run needs."""
        dumps = [one for one in expected if isinstance(one, Dump)]
        groups = itertools.chain(*(one for one in expected if not isinstance(one, Dump)))
        every = [*itertools.chain(*(dump.draws for dump in dumps)), *itertools.chain(*groups)]
        return self.skip["needs"] and not all(draw.has for draw in every)

    def replayed(self, expected: list[Any], groups: tuple[Any, ...]) -> None:
        dump = next((one for one in expected if getattr(one, "groups", None) == groups), None)
        if dump is not None:
            self.taken.add(dump)
            return
        assert self.groups, "nothing fits"
        for group, known in zip(groups, self.groups, strict=True):
            assert group in known
        self.taken |= {d for d in self.dumps if d.step == self.step and {*groups} & {*d.groups}}

    def generated(self, batch: list[dict[str, Any]], again: frozenset[Dump], exact: bool) -> None:
        """A call ran its sessions, but for those that a killed run had journaled.

        If it is not `exact`, groups of a dump that is not known were rejected before.
        """
        if self.skip["journal"]:
            for step in {at for at, *_ in self.journals if at < self.step}:
                if str(step) in (name for name, _ in self.places()):  # they are done with
                    self.journals = {k: v for k, v in self.journals.items() if k[0] != step}
        if not exact:
            self.resumed: Sessions = {}
            return
        prompts = "".join(prompt["text"] for prompt in batch)
        sessions = [(i, k) for i in range(len(batch)) for k in range(N)]
        known: Sessions = {}
        if self.skip["journal"]:
            key = self.step, self.equal[prompts], prompts, again
            known = self.journals.setdefault(key, {}).setdefault(self.attempts[key], {})
            self.attempts[key] += 1
        self.resumed = {at: d for at, d in known.items() if d.has or not self.skip["needs"]}
        missing = len(sessions) - len(self.resumed)
        assert self.ran == min(self.ends_at, missing), "no session is generated twice"
        for (uid, k), draw in self.made.items():
            known[[prompt["uid"] for prompt in batch].index(uid), k] = draw

    # -- the disk --------------------------------------------------------------------------------

    def places(self) -> set[Place]:
        """Where dumps are."""
        folders = (meta.parent for meta in self.folder.glob("*_*/GBS*/*/meta.json"))
        return {(at.name, at.stat().st_ino) for at in folders if ".bad-" not in at.name}

    def close(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.close()

    def teardown(self) -> None:
        self.close()
        SkipManager.reset()
        shutil.rmtree(self.folder)


@pytest.mark.timeout(1500)  # on a busy machine
@pytest.mark.parametrize(
    "examples",
    [6, pytest.param(60, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.long)],
)
def test_each_rollout_serves_once_and_none_is_lost(examples: int) -> None:
    logging.getLogger("rlskip").setLevel(logging.CRITICAL)  # each failed session says so
    chosen = settings(max_examples=examples, stateful_step_count=20)
    run_state_machine_as_test(Served, settings=chosen)


KEYS = {"journal": False, "needs": False, "dispatchers": 1, "goes_on": False}


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.teardown()


def test_sessions_of_groups_that_served_are_not_resumed(served: Served) -> None:
    served.start({**KEYS, "journal": True, "match": "step"})
    served.visit(1)
    served.call("ba", 0, 99)
    served.start({**KEYS, "journal": True, "match": "prompt"})
    served.visit(1)
    served.call("a", 0, 99)
    served.call("ba", 0, 99)
