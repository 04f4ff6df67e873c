"""What calls of stages do, by the rules of docs/skip.md: a model of one rank, and the real ones."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.skip.call import Call, Stage
from rlskip.skip.stage_runner import dump, replay
from tests.skip.trainers import Hub, on_ranks

STEPS = (1, 2, 3)


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

            made = Stage(stage, self.role, stage="generate", ignore=(), derived=self.derived)
            call = Call(made, (prompts, greedy), {}, step, visit=role.visit(step))
            try:
                with call:
                    if replayed := replay(role, call):
                        return replayed[0], False
                    result = stage(prompts, greedy)
                    dump(role, call, result)
                    return result, True
            except (Failure, MismatchError, MissError) as error:
                return type(error)

        outcomes = set(self.threads.map(one, self.roles))
        assert len(outcomes) == 1, "replayed on all ranks, or on none"
        (outcome,) = outcomes
        if isinstance(outcome, type):
            raise outcome("of all ranks")
        return outcome  # type: ignore[no-any-return]

    def flush(self) -> None:
        for role in self.roles:
            role.flush()

    def close(self) -> None:
        super().close()
        self.threads.shutdown()


Name = tuple[Any, ...]
"""() is the first call's; (prompts, number) that of another."""


@attrs.define
class Dump:
    made_for: tuple[str, bool]  # prompts and whether greedily
    value: int  # of one call on all ranks: its generation
    place: int
    damage: str = ""  # of its "meta" or its "data"


@attrs.define
class Differs:
    """A mismatch of the dump of this name."""

    name: Name


def lowest(taken: set[int]) -> int:
    return next(number for number in itertools.count() if number not in taken)


class RankModel:
    """What lies on the disk of one rank, and what its process remembers."""

    def __init__(self, derived: bool, digests: dict[str, str]) -> None:
        self.derived, self.digests = derived, digests  # by prompts
        self.disk: dict[int, dict[Name, Dump]] = {step: {} for step in STEPS}
        self.bad: set[tuple[int, Name]] = set()

    def start(self, skip: dict[str, Any]) -> None:
        self.skip = skip
        self.served: set[tuple[int, Name]] = set()  # or written
        self.is_indexed = False

    def visit(self, step: int) -> None:
        self.step, self.lost = step, False
        self.numbers: dict[str, set[int]] = {prompts: set() for prompts in "abc"}
        self.places: set[int] = set()
        self.taken: set[tuple[int, Name]] = set()
        self.listed = self.names(step)
        self.order: list[Name] | None = None

    def names(self, step: int) -> list[Name]:
        return sorted(
            self.disk[step], key=lambda name: (self.digests[name[0]], name) if name else ()
        )

    # -- the rules of docs/skip.md -----------------------------------------------------------

    def begin(self, made_for: tuple[str, bool]) -> None:
        self.made_for = made_for
        self.number, self.place = lowest(self.numbers[made_for[0]]), lowest(self.places)
        self.numbers[made_for[0]].add(self.number)
        self.places.add(self.place)
        self.own: Name = (made_for[0], self.number)
        self.replaces: Name | None = None

    def end(self) -> None:
        """The call failed."""
        self.numbers[self.made_for[0]].discard(self.number)
        self.places.discard(self.place)

    def look(self) -> Any:
        """The key of the dump that serves the call, `Differs`, or None: it is a miss."""
        if self.skip["action"] == "repeat":
            return self.repeated()
        for name in self.candidates():
            key = self.step, name
            found = None if key in self.taken else self.read(*key)
            if found and found.made_for == self.made_for and not self.has_served(key):
                return key
        if self.skip["match"] == "run" and (key := self.elsewhere()):
            return key
        return self.judge()

    def candidates(self) -> list[Name]:
        siblings = [name for name in self.listed if name and name[0] == self.made_for[0]]
        first = [self.own, ()] if self.place else [(), self.own]
        return [*dict.fromkeys([*first, *siblings])]

    def has_served(self, key: tuple[int, Name]) -> bool:
        runs = self.skip["match"] == "run" and not self.derived
        return runs and key in self.served

    def elsewhere(self) -> tuple[int, Name] | None:
        for step in () if self.is_indexed else STEPS:
            for name in self.names(step):  # what the index does not know yet is read
                self.read(step, name)
        self.is_indexed = True
        for step in self.nearest():
            for name in self.names(step):
                key = step, name
                if self.disk[step][name].made_for[0] != self.made_for[0]:
                    continue  # the index says so
                dump = None if self.has_served(key) else self.read(*key)
                if dump and key not in self.taken and dump.made_for == self.made_for:
                    return key
        return None

    def judge(self) -> Differs | None:
        there = [self.own]
        if not self.place:
            lost = {name for step, name in self.bad if step == self.step} - {*self.disk[self.step]}
            is_whole = () in self.disk[self.step] and not lost and not self.lost
            there = [*self.listed] if is_whole else []
        differs = {
            name: sum(a != b for a, b in zip(dump.made_for, self.made_for, strict=True))
            for name in there
            if (self.step, name) not in self.taken and (dump := self.read(self.step, name))
        }
        if not all(differs.values()) or not differs:
            return None
        nearest = min(differs, key=lambda name: (differs[name], there.index(name)))
        only_prompts = self.disk[self.step][nearest].made_for[1] == self.made_for[1]
        if self.skip["on_mismatch"] == "error" and self.derived and only_prompts:
            return None
        return Differs(nearest)

    def repeated(self) -> tuple[int, Name] | None:
        """The dump of the same place in the step itself, else in the nearest; else the last."""
        if self.order is None:
            self.order = [name for name in self.in_order(self.step) if name in self.listed]
        source, names = self.step, self.order
        if () not in names:
            steps = [self.step, *self.nearest()]
            source = next((step for step in steps if self.read(step, ())), self.step)
            if source == self.step:
                return None
            names = self.in_order(source)
        return source, names[min(self.place, len(names) - 1)]

    def in_order(self, step: int) -> list[Name]:
        return sorted(
            (name for name in self.names(step) if self.read(step, name)),
            key=lambda name: self.disk[step][name].place,
        )

    def nearest(self) -> list[int]:
        others = [step for step in STEPS if step != self.step]
        return sorted(others, key=lambda step: (step > self.step, abs(step - self.step)))

    def read(self, step: int, name: Name) -> Dump | None:
        """One whose meta.json is damaged is quarantined by whoever reads it."""
        dump = self.disk[step].get(name)
        if dump is not None and dump.damage == "meta":
            self.quarantine(step, name)
            return None
        return dump

    def load(self, key: tuple[int, Name]) -> Dump | None:
        step, name = key
        dump = self.disk[step].get(name)
        if dump is None or dump.damage == "data":
            if dump is not None:
                self.quarantine(step, name)
            return None
        return dump

    def quarantine(self, step: int, name: Name) -> None:
        del self.disk[step][name]
        self.bad.add((step, name))

    def keep(self, value: int, replaces: bool) -> None:
        """Publish what a call returned; a shard `replaces` what another call had there."""
        name = self.own if self.place else ()
        if self.replaces is not None:
            name = self.replaces
        while self.replaces is None and ((self.step, name) in self.taken or self.is_anothers(name)):
            name = self.next_name(name)
        while True:
            key = self.step, name
            has_served, is_new = self.has_served(key), key not in self.served
            self.taken.add(key)
            self.served.add(key)
            if (there := self.disk[self.step].get(name)) is None:
                break
            if there.damage == "meta":
                self.quarantine(self.step, name)
                break
            if there.made_for == self.made_for and not has_served:
                if replaces:
                    break
                return
            # It may serve the call that it was made for.
            self.taken.discard(key)
            if is_new:
                self.served.discard(key)
            name = self.next_name(name)
            while (self.step, name) in self.taken:
                name = self.next_name(name)
        self.disk[self.step][name] = Dump(self.made_for, value, self.place)

    def is_anothers(self, name: Name) -> bool:
        there = self.read(self.step, name) if name in self.listed else None
        key = self.step, name
        return there is not None and (there.made_for != self.made_for or self.has_served(key))

    def next_name(self, name: Name) -> Name:
        return (name[0], name[1] + 1) if name else self.own
