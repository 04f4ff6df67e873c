"""Visits of steps against a simple model: any calls, crashes, damage, settings, roles and ranks."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.skip.call import Call, Stage
from rlskip.skip.stage_runner import Miss, dump, replay
from rlskip.skip.visit import State, Visit
from tests.skip.trainers import Hub, on_ranks

STEPS = (1, 2, 3)
SETTINGS = st.fixed_dictionaries(
    {
        "on_mismatch": st.sampled_from(["error", "regenerate"]),
        "on_miss": st.sampled_from(["generate", "generate", "error"]),
        "match": st.sampled_from(["step", "run"]),
        "action": st.sampled_from(["cache", "cache", "repeat"]),
    }
)

# Which dump replaces a damaged one depends on whether a rank looks before or after another one has
# quarantined its shard. Only with these none does.
PLAIN = {"match": "step"}
CALLS = st.tuples(st.sampled_from("abc"), st.booleans())  # prompts, and whether greedily


class Failure(Exception):
    """What a stage raises."""


class Decorated:
    """Calls of a decorated function, plain or async; each has a step of its own, or the loop's."""

    ranks = 1

    def __init__(self, role: str, plain: bool) -> None:
        self.role, self.own_steps, self.value = role, role == "async_rollout", 0
        self.derived = role == "reward"
        self.ran = False

        def stage(prompts: str, greedy: bool, fails: bool, sample_id: str) -> int:
            self.ran = True
            if fails:
                raise Failure
            return self.value

        async def async_stage(prompts: str, greedy: bool, fails: bool, sample_id: str) -> int:
            await asyncio.sleep(0)
            return stage(prompts, greedy, fails, sample_id)

        annotate = SkipManager.annotate(
            role=role, stage="generate", ignore=["fails"], derived=self.derived
        )
        self.stage = annotate(stage if plain else async_stage)
        self.plain = plain

    def start(self, skip: dict[str, Any]) -> None:
        SkipManager.init({"skip": {**skip, self.role: {"enable": True}}})

    def visit(self, step: int) -> None:
        SkipManager.set_step(0)
        SkipManager.set_step(step)

    def call(self, step: int, prompts: str, greedy: bool, fails: bool) -> tuple[int, bool]:
        """What it returns, and whether the stage ran."""
        SkipManager.set_step(step)  # the same step again continues its visit
        self.ran = False
        result = self.stage(prompts, greedy, fails, sample_id=f"sample_0_{step}")
        return (result if self.plain else asyncio.run(result)), self.ran

    def flush(self) -> None:
        SkipManager.flush()

    def visits(self) -> list[Visit]:
        roles: list[Any] = [*SkipManager.skip_instances.values()]
        return [role._visiting for role in roles if role._visiting is not None]

    def close(self) -> None:
        SkipManager.reset()


class Ranks(Decorated):
    """The same calls, made by simulated ranks."""

    def __init__(self, role: str, plain: bool, ranks: int) -> None:
        super().__init__(role, plain)
        self.ranks = ranks
        self.roles = list[Any]()
        self.threads = ThreadPoolExecutor(self.ranks)

    def start(self, skip: dict[str, Any]) -> None:
        self.roles = on_ranks(Hub(self.ranks), self.role, **skip)

    def visit(self, step: int) -> None:
        for role in self.roles:
            role.begin_visit()

    def call(self, step: int, prompts: str, greedy: bool, fails: bool) -> tuple[int, bool]:
        def one(role: Any) -> Any:
            def stage(prompts: str, greedy: bool) -> int:
                if fails:
                    raise Failure
                return self.value

            made = Stage(stage, self.role, ignore=(), derived=self.derived)
            call = Call(made, (prompts, greedy), {}, step)
            with call.cleanup:
                try:
                    result = replay(role, call)
                    if result is not Miss:
                        return result, False
                    result = stage(prompts, greedy)
                except (Failure, MismatchError, MissError) as error:
                    return type(error)
                dump(role, call, result)
                return result, True

        outcomes = set(self.threads.map(one, self.roles))
        assert len(outcomes) == 1, "replayed on all ranks, or on none"
        (outcome,) = outcomes
        if isinstance(outcome, type):
            raise outcome("of all ranks")
        return outcome  # type: ignore[no-any-return]

    def flush(self) -> None:
        for role in self.roles:
            role.flush()

    def visits(self) -> list[Visit]:
        return [role._visiting for role in self.roles if role._visiting is not None]

    def close(self) -> None:
        super().close()
        self.threads.shutdown()


@attrs.define
class Dump:
    made_for: tuple[str, bool]  # prompts and whether greedily
    value: int
    calls: int  # how many the step had when it was written, those that failed included
    when: int  # how many were dumped before it
    damage: str = ""  # of its "meta" or its "data"
    rank: int = 0  # whose shard has the damage


class Visits(RuleBasedStateMachine):
    """`disk` is the model of what lies there: for each step number -> dump."""

    def __init__(self, stage: Decorated, background: bool) -> None:
        super().__init__()
        self.stage, self.background = stage, background
        self.folder = Path(tempfile.mkdtemp(prefix="rlskip-visits-"))
        self.disk: dict[int, dict[int, Dump]] = {step: {} for step in STEPS}
        # Of dumps that are lost because one rank's shard was damaged: by number that rank. The
        # shards of the others stay until the number is used again.
        self.halves: dict[int, dict[int, int]] = {step: {} for step in STEPS}
        # The numbers of all dumps that were ever written, and when; ranks here record none.
        self.records: dict[int, list[tuple[int, int]]] = {step: [] for step in STEPS}
        self.written = 0

    @initialize(skip=SETTINGS)
    def begin(self, skip: dict[str, Any]) -> None:
        self.start(skip)

    @rule(skip=SETTINGS)
    def start(self, skip: dict[str, Any]) -> None:
        """A crash, and another run: nothing but the disk is left."""
        if (skip["on_mismatch"], skip["on_miss"]) == ("regenerate", "error"):
            skip = {**skip, "on_miss": "generate"}  # refused together
        if self.stage.ranks > 1:
            skip = {**skip, "action": "cache"}  # a repeat has one rank
        dumps = [dump for dumps in self.disk.values() for dump in dumps.values()]
        if self.stage.ranks > 1 and any(dump.damage for dump in dumps):
            skip = {**skip, **PLAIN}
        self.skip, self.step, self.mine = skip, 0, set[tuple[int, int]]()
        self.served: dict[tuple[int, int], int] = {}
        keys = {"dump_dir": str(self.folder), "wait_s": 0, "background_write": self.background}
        self.stage.start({**keys, **skip})

    @rule(step=st.sampled_from(STEPS))
    def visit(self, step: int) -> None:
        self.stage.visit(step)
        self.step, self.calls = step, 0
        self.used: set[tuple[int, int]] = set()
        self.listed = self.seen(step)
        self.lost: set[int] = set()
        self.failed: Counter[tuple[str, bool]] = Counter()
        self.made: list[tuple[str, bool]] = []

    @precondition(lambda self: self.step and self.made)
    @rule(first=CALLS, last=CALLS, lost=st.booleans())
    def repeat(self, first: tuple[str, bool], last: tuple[str, bool], lost: bool) -> None:
        """Other runs make the visit's calls again, and one before or after them."""
        step, made = self.step, self.made
        for calls in ([*made, last], [first, *made]):
            self.stage.flush()
            self.start(
                {"on_mismatch": "error", "on_miss": "generate", "match": "step", "action": "cache"}
            )
            if lost and self.disk[step]:
                self.damage(step, max(self.disk[step]), "gone", 0)
            self.visit(step)
            for call in calls:
                self.call(call, fails=False, again=False)

    @precondition(lambda self: self.step == 0 or self.calls == 0)
    @rule(
        step=st.sampled_from(STEPS),
        number=st.integers(0, 3),
        how=st.sampled_from(["gone", "meta", "data"]),
        rank=st.integers(0, 2),
    )
    def damage(self, step: int, number: int, how: str, rank: int) -> None:
        """Between two visits a dump is removed, or a file of it is damaged."""
        if number not in self.disk[step]:
            return
        if self.stage.ranks > 1 and how != "gone" and not self.skip.items() >= PLAIN.items():
            return
        if how == "meta" and self.stage.ranks > 2:
            how = "data"  # a rank reads only the next one's meta.json
        self.stage.flush()
        path = self.run / str(step) / (str(number) if number else "")
        if how == "gone":
            del self.disk[step][number]
            [file.unlink() for file in path.iterdir() if file.is_file()]
            if number:
                shutil.rmtree(path)
        elif not self.disk[step][number].damage:
            self.disk[step][number].damage = how
            self.disk[step][number].rank = rank % self.stage.ranks
            files = sorted(path.glob("gen_batch*" if how == "data" else "meta*"))
            file = files[rank % self.stage.ranks]
            content = file.read_bytes()
            file.write_bytes(content[:20] + b"\xff\xfe" + content[22:])
        self.stage.visit(0)
        self.step = 0

    @precondition(lambda self: self.step)
    @rule(made_for=CALLS, fails=st.booleans(), again=st.booleans())
    def call(self, made_for: tuple[str, bool], fails: bool, again: bool) -> None:
        """A call; one that fails may be made again."""
        if self.stage.own_steps:
            self.visit(self.step)
        self.stage.value += 1
        self.made.append(made_for)
        expected = self.expect(made_for)
        call = functools.partial(self.stage.call, self.step, *made_for, fails)
        if isinstance(expected, type):
            with pytest.raises(expected):
                call()
            return
        self.calls += 1
        if expected is None:
            self.failed[made_for] -= self.failed[made_for] > 0
        if expected is None and fails:
            with pytest.raises(Failure):
                call()
            self.failed[made_for] += 1
            if again:
                self.call(made_for, fails=False, again=False)
            return
        got, ran = call()
        if expected is None:
            assert (got, ran) == (self.stage.value, True)
            number = next(n for n in range(99) if n not in self.disk[self.step])
            known = 1 + len(self.disk[self.step]) + self.failed.total()
            self.written += 1
            self.disk[self.step][number] = Dump(made_for, got, known, self.written)
            self.halves[self.step].pop(number, None)
            if self.stage.ranks == 1:
                self.records[self.step].append((number, self.written))
            self.used.add((self.step, number))
            self.mine.add((self.step, number))
        else:
            assert (got, ran) == (self.disk[expected[0]][expected[1]].value, False)
            self.used.add(expected)
            self.served.setdefault(expected, self.step)

    # -- the rules of docs/skip.md -----------------------------------------------------------

    def expect(self, wanted: tuple[str, bool]) -> Any:
        """The dump that serves the call, the error that it raises; None: it is generated."""
        missed = None if self.skip["on_miss"] == "generate" else MissError
        found = self.find(wanted)
        if isinstance(found, type) or found is None:
            return found or missed
        if self.disk[found[0]][found[1]].damage != "data":
            return found
        self.quarantine(*found)
        return missed

    def find(self, wanted: tuple[str, bool]) -> Any:
        if self.skip["action"] == "repeat":
            return self.repeated()
        for number in self.read(self.step):
            if self.fits(self.step, number, wanted):
                return self.step, number
        if self.skip["match"] == "run":
            for other in self.nearest():
                for number in self.read(other):
                    elsewhere = self.served.get((other, number), self.step) != self.step
                    ours = (elsewhere or (other, number) in self.mine) and not self.stage.derived
                    if not ours and self.fits(other, number, wanted):
                        return other, number
        there = [n for n in self.listed if n in self.disk[self.step] and n not in self.lost]
        if not there:
            return None
        calls = max(self.disk[self.step][n].calls for n in there)
        since = min(self.disk[self.step][n].when for n in there)
        written = [1 + number for number, when in self.records[self.step] if when >= since]
        calls = max([calls, *written])
        gap = there != [*range(calls)] or self.listed != [*range(len(self.listed))]
        if self.calls or gap or self.halves[self.step]:
            return None  # the step was cut off, or has lost a dump
        made_for = {n: self.disk[self.step][n].made_for for n in there}
        differs = {n: self.differs(made_for[n], wanted) for n in there}
        nearest = min(there, key=lambda n: (differs[n], n))
        if self.skip["on_mismatch"] == "error":
            only_prompts = made_for[nearest][1] == wanted[1]
            return None if self.stage.derived and only_prompts else MismatchError
        self.quarantine(self.step, nearest, whole=True)
        return None

    def repeated(self) -> tuple[int, int] | None:
        """The dump of the same place in the step itself, else in the nearest; else the last."""
        for step in [self.step, *self.nearest()]:
            its = self.listed if step == self.step else self.seen(step)
            its = [n for n in its if step != self.step or n not in self.lost]
            if step != self.step and not self.has_first(step):
                continue
            while its:
                number = its[min(self.calls, len(its) - 1)]
                its.remove(number)
                if number not in self.disk[step]:
                    if step == self.step:
                        self.lost.add(number)
                elif self.disk[step][number].damage != "meta":
                    return step, number
                else:
                    self.quarantine(step, number)
            if step != self.step:
                return None
            if self.has_first(step):
                return None  # the nearest step is this one, and its dumps are this visit's
        return None

    def has_first(self, step: int) -> bool:
        """Whether the step has its first call's dump, which `repeat` goes by."""
        if 0 in self.disk[step] and self.disk[step][0].damage == "meta":
            self.quarantine(step, 0)
        return 0 in self.disk[step]

    def nearest(self) -> list[int]:
        others = [step for step in STEPS if step != self.step]
        return sorted(others, key=lambda step: (step > self.step, abs(step - self.step)))

    def seen(self, step: int) -> list[int]:
        """The numbers that rank 0 has a shard of."""
        return sorted({*self.disk[step], *(n for n, rank in self.halves[step].items() if rank)})

    def read(self, step: int) -> Any:
        """The numbers of a step's dumps; one whose meta.json is damaged is quarantined."""
        for number in sorted(self.disk[step]):
            if self.disk[step][number].damage == "meta":
                self.quarantine(step, number)
            else:
                yield number

    def fits(self, step: int, number: int, wanted: tuple[str, bool]) -> bool:
        return (step, number) not in self.used and self.disk[step][number].made_for == wanted

    @staticmethod
    def differs(made_for: tuple[str, bool], wanted: tuple[str, bool]) -> int:
        return sum(a != b for a, b in zip(made_for, wanted, strict=True))

    def quarantine(self, step: int, number: int, whole: bool = False) -> None:
        dump = self.disk[step].pop(number)
        if self.stage.ranks > 1 and not whole:
            self.halves[step][number] = dump.rank
        if step == self.step:
            self.lost.add(number)

    # -- what holds after each rule ----------------------------------------------------------

    @property
    def run(self) -> Path:
        (run,) = self.folder.glob("*_*/GBS*")
        return run / self.stage.role if self.stage.role == "reward" else run

    @invariant()
    def the_disk_is_as_expected(self) -> None:
        self.stage.flush()
        found: dict[int, Counter[int]] = {step: Counter() for step in STEPS}
        if not [*self.folder.glob("*_*/GBS*")]:
            return
        for path in self.run.glob("*/**/meta*.json"):
            parts = path.relative_to(self.run).parts[:-1]
            if all(part.isdigit() for part in parts):
                found[int(parts[0])][int(parts[1]) if len(parts) > 1 else 0] += 1
        # A shard whose other ranks' were quarantined stays until it is replaced.
        complete = {
            step: {n for n, shards in numbers.items() if shards == self.stage.ranks}
            for step, numbers in found.items()
        }
        for step, numbers in self.disk.items():
            # One whose meta.json is damaged is quarantined by what reads it: where the dump that
            # fits cannot be loaded, the look before generating reads on to the steps after it.
            for number in [n for n in numbers if numbers[n].damage == "meta"]:
                if number not in complete[step]:
                    self.quarantine(step, number)
        assert complete == {step: {*numbers} for step, numbers in self.disk.items()}

    @invariant()
    def each_visit_holds_its_invariants(self) -> None:
        for visit in self.stage.visits():
            slots, known = visit.slots, [*visit._by_prompts.values(), [visit._unnamed]]
            assert visit.listed == sorted({*visit.listed} & slots.keys())
            ours = (State.RESERVED, State.WRITTEN, State.LOST)
            assert all(slot.state in ours for n, slot in slots.items() if n not in visit.listed)
            offered = {n: alike for group in known for alike in group for n in alike.numbers}
            assert len(offered) == sum(len(alike.numbers) for group in known for alike in group)
            is_open = {n: slot.alike for n, slot in slots.items() if slot.state is State.OPEN}
            assert offered == is_open
            unread = [n for n, slot in slots.items() if slot.state is State.UNREAD]
            assert {*unread} <= {*visit._unread}
            assert [*visit._unread] == sorted(visit._unread)
            assert visit._states == Counter(slot.state for slot in slots.values())
            assert not any(visit._is_free(number) for number in range(visit._low))

    def teardown(self) -> None:
        self.stage.close()
        shutil.rmtree(self.folder)


def test_what_one_rank_has_left_of_a_dump_tells_all_that_it_is_missing() -> None:
    """Each rank lacks a dump that the other one sees, and the first call fits none."""
    rules = {"on_mismatch": "error", "on_miss": "generate", "match": "step", "action": "cache"}
    calls = (("a", False), ("b", False), ("c", False))
    for lost in ({1: 0, 2: 1}, {2: 0}, {2: 1}):
        visits = Visits(Ranks("reward", plain=True, ranks=2), background=True)
        visits.begin(rules)
        visits.visit(1)
        for one in calls:
            visits.call(one, fails=False, again=False)
        for number, rank in lost.items():
            visits.damage(1, number, "meta", rank)
        visits.start({**rules, "on_miss": "error"})  # sees the damage, and replaces nothing
        visits.visit(1)
        visits.call(("a", True), fails=False, again=False)
        visits.start(rules)
        visits.visit(1)
        assert visits.expect(("a", True)) is None
        visits.call(("a", True), fails=False, again=False)
        visits.the_disk_is_as_expected()
        visits.teardown()


def test_a_repeat_of_a_damaged_step_takes_the_nearest_one() -> None:
    visits = Visits(Decorated("rollout", True), background=False)
    visits.begin(
        {"on_mismatch": "error", "on_miss": "generate", "match": "step", "action": "repeat"}
    )
    visits.visit(2)
    visits.call(("a", False), fails=False, again=False)
    visits.damage(2, 0, "meta", 0)
    for step in (1, 2):
        visits.visit(step)
        visits.call(("a", False), fails=False, again=False)
    visits.teardown()


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize(
    ("role", "plain", "ranks", "background"),
    [
        ("rollout", True, 1, False),
        ("reward", False, 1, True),
        ("rollout", True, 2, False),
        ("reward", True, 2, True),
        ("rollout", True, 3, False),
        ("async_rollout", False, 1, False),
    ],
)
def test_calls_are_served_by_the_rules(
    role: str, plain: bool, ranks: int, background: bool
) -> None:
    def stage() -> Decorated:
        return Decorated(role, plain) if ranks == 1 else Ranks(role, plain, ranks)

    run_state_machine_as_test(
        lambda: Visits(stage(), background),
        settings=settings(max_examples=20, stateful_step_count=25),
    )
