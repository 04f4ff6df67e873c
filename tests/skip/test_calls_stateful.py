"""Visits of steps against a simple model: any calls, crashes, damage, settings, roles and ranks."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shutil
import tempfile
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
from rlskip.format.prompt_digests import digest_of_batch, digests_of
from rlskip.skip.call import Call, Stage
from rlskip.skip.stage_runner import Miss, dump, replay
from rlskip.store import Identity
from rlskip.store.layout import Place, places_among
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
            call = Call(made, (prompts, greedy), {}, step)
            try:
                with call.cleanup:
                    result = replay(role, call)
                    if result is not Miss:
                        return result, False
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

    def __init__(self, derived: bool) -> None:
        self.derived = derived
        self.disk: dict[int, dict[Name, Dump]] = {step: {} for step in STEPS}
        self.bad: set[tuple[int, Name]] = set()

    def start(self, skip: dict[str, Any]) -> None:
        self.skip = skip
        self.served: dict[tuple[int, Name], int] = {}
        self.mine: set[tuple[int, Name]] = set()

    def visit(self, step: int) -> None:
        self.step, self.lost = step, False
        self.numbers: dict[str, set[int]] = {prompts: set() for prompts in "abc"}
        self.places: set[int] = set()
        self.taken: set[tuple[int, Name]] = set()
        self.listed = self.names(step)
        self.order: list[Name] | None = None

    def names(self, step: int) -> list[Name]:
        return sorted(self.disk[step])

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
            found = None if key in self.taken or self.has_served(key) else self.read(*key)
            if found is not None and found.made_for == self.made_for:
                return key
        if self.skip["match"] == "run" and (key := self.elsewhere()):
            return key
        return self.judge()

    def candidates(self) -> list[Name]:
        siblings = [name for name in self.listed if name and name[0] == self.made_for[0]]
        return [*dict.fromkeys([self.own, (), *siblings])]

    def has_served(self, key: tuple[int, Name]) -> bool:
        runs = self.skip["match"] == "run" and not self.derived
        return runs and self.served.get(key, self.step) != self.step

    def elsewhere(self) -> tuple[int, Name] | None:
        for step in self.nearest():
            for name in self.names(step):
                key = step, name
                dump = self.read(*key)
                ours = key in self.mine or self.served.get(key, self.step) != self.step
                if dump is None or key in self.taken or (ours and not self.derived):
                    continue
                if dump.made_for == self.made_for:
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
        self.taken.add((self.step, name))
        self.mine.add((self.step, name))
        while (there := self.disk[self.step].get(name)) is not None:
            if there.damage == "meta":
                self.quarantine(self.step, name)
                continue
            if there.made_for == self.made_for and not self.has_served((self.step, name)):
                if replaces:
                    break
                return
            name = self.next_name(name)
            while (self.step, name) in self.taken:
                name = self.next_name(name)
            self.taken.add((self.step, name))
            self.mine.add((self.step, name))
        self.disk[self.step][name] = Dump(self.made_for, value, self.place)

    def is_anothers(self, name: Name) -> bool:
        there = self.read(self.step, name) if name in self.listed else None
        key = self.step, name
        return there is not None and (there.made_for != self.made_for or self.has_served(key))

    def next_name(self, name: Name) -> Name:
        return (name[0], name[1] + 1) if name else self.own


class Visits(RuleBasedStateMachine):
    """Each of `models` is what one rank has."""

    def __init__(self, stage: Decorated, background: bool) -> None:
        super().__init__()
        self.stage, self.background = stage, background
        self.folder = Path(tempfile.mkdtemp(prefix="rlskip-visits-"))
        self.models = [RankModel(stage.derived) for _ in range(stage.ranks)]
        names = {"role": stage.role, "stage": "generate"}
        self.digests = {
            Identity.of(names).for_prompts(digest_of_batch(p, digests_of(p))).digest(): p  # type: ignore[arg-type]
            for p in "abc"
        }

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
        self.skip, self.step = skip, 0
        for model in self.models:
            model.start(skip)
        keys = {"dump_dir": str(self.folder), "wait_s": 0, "background_write": self.background}
        self.stage.start({**keys, **skip})

    @rule(step=st.sampled_from(STEPS))
    def visit(self, step: int) -> None:
        self.stage.flush()
        self.stage.visit(step)
        self.step, self.calls = step, 0
        self.made: list[tuple[str, bool]] = []
        for model in self.models:
            model.visit(step)

    @precondition(lambda self: self.step and self.made)
    @rule(order=st.randoms(use_true_random=False), extra=CALLS)
    def repeat(self, order: Any, extra: tuple[str, bool]) -> None:
        """Another run makes the visit's calls in another order, and one more."""
        step, made = self.step, [*self.made]
        order.shuffle(made)
        self.stage.flush()
        rules = {"on_mismatch": "error", "on_miss": "generate", "match": "step", "action": "cache"}
        self.start(rules)
        self.visit(step)
        for call in [*made, extra]:
            self.call(call, fails=False, again=False)

    @precondition(lambda self: self.step == 0 or self.calls == 0)
    @rule(
        step=st.sampled_from(STEPS),
        number=st.integers(0, 3),
        how=st.sampled_from(["gone", "meta", "data"]),
        rank=st.integers(0, 2),
    )
    def damage(self, step: int, number: int, how: str, rank: int) -> None:
        """Between two visits a rank's dump is removed, or a file of it is damaged."""
        model = self.models[rank % self.stage.ranks]
        names = model.names(step)
        if number >= len(names):
            return
        self.stage.flush()
        name = names[number]
        path = self.path(step, name, rank % self.stage.ranks)
        if how == "gone":
            del model.disk[step][name]
            shutil.rmtree(path)
        elif not model.disk[step][name].damage:
            model.disk[step][name].damage = how
            file = path / ("gen_batch.dp" if how == "data" else "meta.json")
            content = file.read_bytes()
            file.write_bytes(content[:20] + b"\xff\xfe" + content[22:])
        self.stage.visit(0)
        self.step = 0

    @precondition(lambda self: self.step)
    @rule(made_for=CALLS, fails=st.booleans(), again=st.booleans())
    def call(self, made_for: tuple[str, bool], fails: bool, again: bool) -> None:
        """A call; one that fails may be made again."""
        self.calls += 1
        self.made.append(made_for)
        if self.stage.own_steps:
            for model in self.models:
                model.visit(self.step)
        self.stage.value += 1
        expected = self.expect(made_for)
        call = functools.partial(self.stage.call, self.step, *made_for, fails)
        if isinstance(expected, type) or (expected is None and fails):
            with pytest.raises(expected or Failure):
                call()
            for model in self.models:
                model.end()
            if again and expected is None:
                self.call(made_for, fails=False, again=False)
            return
        assert call() == (self.stage.value if expected is None else expected, expected is None)
        for model in self.models if expected is None else ():
            model.keep(self.stage.value, replaces=self.stage.ranks > 1)

    def expect(self, made_for: tuple[str, bool]) -> Any:
        """What a dump serves, or the error that is raised; None: the call is generated."""
        missed = None if self.skip["on_miss"] == "generate" else MissError
        for model in self.models:
            model.begin(made_for)
        found = [model.look() for model in self.models]
        loaded: list[Dump | None] = []
        for model, key in zip(self.models, found, strict=True):
            loaded.append(model.load(key) if isinstance(key, tuple) else None)
        values = {dump and dump.value for dump in loaded}
        if len(values) == 1 and None not in values:
            for model, key in zip(self.models, found, strict=True):
                model.taken.add(key)
                model.served.setdefault(key, self.step)
            return values.pop()
        for model, key in zip(self.models, found, strict=True):
            if isinstance(key, tuple) and self.stage.ranks > 1:
                model.taken.add(key)
                model.replaces = key[1]
            elif isinstance(key, tuple):
                model.lost = True
        differs = [isinstance(key, Differs) for key in found]
        if not all(one or dump for one, dump in zip(differs, loaded, strict=True)):
            return missed
        if not any(differs):  # of several calls: all are replaced
            return missed
        if self.skip["on_mismatch"] == "error":
            return MismatchError
        for model, key in zip(self.models, found, strict=True):
            if isinstance(key, Differs):
                model.quarantine(self.step, key.name)
                model.replaces = key.name
        return None

    # -- what holds after each rule ----------------------------------------------------------

    def path(self, step: int, name: Name, rank: int) -> Path:
        digests = {prompts: digest for digest, prompts in self.digests.items()}
        call = f"{digests[name[0]]}-{name[1]}" if name else ""
        return Place(self.run, step, call, rank, self.stage.ranks).directory

    @property
    def run(self) -> Path:
        (run,) = self.folder.glob("*_*/GBS*")
        return run / self.stage.role if self.stage.role == "reward" else run

    @invariant()
    def the_disk_is_as_expected(self) -> None:
        self.stage.flush()
        if not [*self.folder.glob("*_*/GBS*")] or not self.run.exists():
            return
        there: list[dict[int, set[Name]]] = [{step: set() for step in STEPS} for _ in self.models]
        for place in places_among(self.run, os.listdir(self.run)):
            digest, _, number = place.call.rpartition("-")
            name: Name = (self.digests[digest], int(number)) if digest else ()
            there[place.rank][place.step].add(name)
        for model, found in zip(self.models, there, strict=True):
            for step, dumps in model.disk.items():
                # One whose meta.json is damaged is quarantined by whoever reads it first.
                for name in [n for n, one in dumps.items() if one.damage == "meta"]:
                    if name not in found[step]:
                        model.quarantine(step, name)
            assert found == {step: {*dumps} for step, dumps in model.disk.items()}

    def teardown(self) -> None:
        self.stage.close()
        shutil.rmtree(self.folder)


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
