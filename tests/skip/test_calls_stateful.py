"""Visits of steps against a simple model: any calls, crashes, damage and policies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlskip import SkipManager
from rlskip.errors import MismatchError
from rlskip.skip.visit import State

STEPS, LETTERS = (1, 2), "abc"


class Visits(RuleBasedStateMachine):
    """`disk` is the model of what lies there: for each step number -> (prompts, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rlskip-visits-"))
        self.disk: dict[int, dict[int, tuple[str, int]]] = {step: {} for step in STEPS}
        self.generated = 0

        @SkipManager.annotate(role="rollout", stage="generate")
        def generate(prompts: str) -> int:
            self.generated += 1
            return self.generated

        self.stage = generate

    @initialize(policy=st.sampled_from(["error", "regenerate", "ignore"]), run=st.booleans())
    def begin(self, policy: str, run: bool) -> None:
        self.start(policy, run)

    @rule(policy=st.sampled_from(["error", "regenerate", "ignore"]), run=st.booleans())
    def start(self, policy: str, run: bool) -> None:
        """A crash, and another run: nothing but the disk is left."""
        self.policy, self.run = policy, run
        on = {"enable": True, "on_mismatch": policy, "match": "run" if run else "step"}
        SkipManager.init({"skip": {"dump_dir": str(self.folder), "wait_s": 0, "rollout": on}})
        self.step = 0

    @rule(step=st.sampled_from(STEPS))
    def visit(self, step: int) -> None:
        SkipManager.set_step(0)
        SkipManager.set_step(step)
        self.step, self.calls = step, 0
        self.used: set[tuple[int, int]] = set()
        self.listed = sorted(self.disk[step])
        self.gap = self.listed != list(range(len(self.listed)))
        self.lost: set[int] = set()

    @precondition(lambda self: self.step == 0 or self.calls == 0)
    @rule(step=st.sampled_from(STEPS), number=st.integers(0, 3))
    def damage(self, step: int, number: int) -> None:
        """Between two visits a dump is removed."""
        if number not in self.disk[step]:
            return
        del self.disk[step][number]
        (run,) = self.folder.glob("*_*/GBS*")
        path = run / str(step)
        if number:
            shutil.rmtree(path / str(number))
        else:
            (path / "meta.json").unlink()
            (path / "gen_batch.dp").unlink()
        SkipManager.set_step(0)
        self.step = 0

    @precondition(lambda self: self.step)
    @rule(prompts=st.sampled_from(LETTERS))
    def call(self, prompts: str) -> None:
        expected = self.expect(prompts)
        before = self.generated
        if expected == "mismatch":
            try:
                self.stage(prompts)
            except MismatchError:
                return
            raise AssertionError("no mismatch")
        got = self.stage(prompts)
        if expected is None:
            assert got == self.generated == before + 1
            number = next(n for n in range(99) if n not in self.disk[self.step])
            self.disk[self.step][number] = (prompts, got)
            self.used.add((self.step, number))
        else:
            assert (got, self.generated) == (self.disk[expected[0]][expected[1]][1], before)
            self.used.add(expected)
        self.calls += 1

    def expect(self, prompts: str) -> Any:
        """The dump that serves the call; None: it is generated."""
        other = [step for step in STEPS if step != self.step] if self.run else []
        for step in [self.step, *other]:
            for number, (its, _) in sorted(self.disk[step].items()):
                if its == prompts and (step, number) not in self.used:
                    return step, number
        if len(self.listed) == len(self.lost):
            return None
        if self.policy == "ignore":
            return self.step, self.listed[min(self.calls, len(self.listed) - 1)]
        if self.calls or self.gap or self.lost:
            return None
        if self.policy == "error":
            return "mismatch"
        number = self.listed[0]
        del self.disk[self.step][number]
        self.lost.add(number)
        return None

    @invariant()
    def the_disk_is_as_expected(self) -> None:
        found = {step: set[int]() for step in STEPS}
        for path in self.folder.glob("*_*/GBS*/*/**/meta.json"):
            parts = path.relative_to(next(self.folder.glob("*_*/GBS*"))).parts[:-1]
            if all(part.isdigit() for part in parts):
                found[int(parts[0])].add(int(parts[1]) if len(parts) > 1 else 0)
        assert found == {step: set(numbers) for step, numbers in self.disk.items()}

    @invariant()
    def the_visit_holds_its_invariants(self) -> None:
        role: Any = SkipManager.skip_instances.get("rollout")
        visit = role and role._visiting
        if visit is None:
            return
        slots, known = visit.slots, [*visit._by_prompts.values(), [visit._unnamed]]
        assert visit.listed == sorted({*visit.listed} & slots.keys())
        ours = (State.RESERVED, State.WRITTEN, State.LOST)
        assert all(slot.state in ours for n, slot in slots.items() if n not in visit.listed)
        offered = [(n, alike) for group in known for alike in group for n in alike.numbers]
        is_open = [(n, slot.alike) for n, slot in slots.items() if slot.state is State.OPEN]
        assert sorted(offered, key=lambda one: one[0]) == sorted(is_open, key=lambda one: one[0])
        unread = {n for n, slot in slots.items() if slot.state is State.UNREAD}
        assert unread <= {*visit._unread}
        assert [*visit._unread] == sorted(visit._unread)
        assert not any(visit._is_free(number) for number in range(visit._low))

    def teardown(self) -> None:
        SkipManager.reset()
        shutil.rmtree(self.folder)


TestVisits = Visits.TestCase
TestVisits.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
