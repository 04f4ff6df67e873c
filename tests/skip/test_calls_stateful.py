"""Visits of steps against a simple model: any calls, crashes, damage, settings, roles and ranks."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

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

from rlskip.errors import MismatchError, MissError
from rlskip.format.prompt_digests import digest_of_batch, digests_of
from rlskip.store import Identity
from rlskip.store.layout import Place, places_among
from tests.skip.calls_model import STEPS, Decorated, Differs, Dump, Failure, Name, RankModel, Ranks

SETTINGS = st.fixed_dictionaries(
    {
        "on_mismatch": st.sampled_from(["error", "regenerate"]),
        "on_miss": st.sampled_from(["generate", "generate", "error"]),
        "match": st.sampled_from(["step", "run"]),
        "action": st.sampled_from(["cache", "cache", "repeat"]),
    }
)

LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
CALLS = st.tuples(st.sampled_from("abc"), st.booleans())  # prompts, and whether greedily


class Visits(RuleBasedStateMachine):
    """Each of `models` is what one rank has."""

    def __init__(self, stage: Decorated, background: bool) -> None:
        super().__init__()
        self.stage, self.background = stage, background
        self.folder = Path(tempfile.mkdtemp(prefix="rlskip-visits-"))
        names = {"role": stage.role, "stage": "generate"}
        self.digests = {
            p: Identity.of(names).for_prompts(digest_of_batch(p, digests_of(p))).digest()  # type: ignore[arg-type]
            for p in "abc"
        }
        self.models = [RankModel(stage.derived, self.digests) for _ in range(stage.ranks)]

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
        self.got: list[int] = []
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

    @precondition(lambda self: self.step and self.made)
    @rule(
        steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=4),
        order=st.randoms(use_true_random=False),
        loses=st.booleans(),
    )
    def repeat_at(self, steps: list[int], order: Any, loses: bool) -> None:
        """Another run makes the visit's calls at other steps, each perhaps again."""
        made = [*self.made]
        if loses:
            self.damage(self.step, 0, "gone", 0)
        rules = {"on_mismatch": "regenerate", "on_miss": "generate", "match": "run"}
        self.start({**rules, "action": "cache"})
        for step in steps:
            order.shuffle(made)
            self.visit(step)
            for call in made[:2]:
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
            self.the_disk_is_as_expected()
            if again and expected is None:
                self.call(made_for, fails=False, again=False)
            return
        assert call() == (self.stage.value if expected is None else expected, expected is None)
        self.got.append(self.stage.value if expected is None else expected)
        for model in self.models if expected is None else ():
            model.keep(self.stage.value, replaces=self.stage.ranks > 1)
        self.the_disk_is_as_expected()

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
                model.served.add(key)
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
            if isinstance(key, Differs) and not model.has_served((self.step, key.name)):
                model.quarantine(self.step, key.name)
                # Under the name of a call with other prompts no later run would look.
                model.replaces = key.name if key.name in model.candidates() else None
        return None

    # -- what holds after each rule ----------------------------------------------------------

    @invariant()
    def nothing_serves_twice_in_a_run(self) -> None:
        """Whatever the model's rules are."""
        once = getattr(self, "skip", {}).get("match") == "run" and not self.stage.derived
        if once and self.skip["action"] == "cache":
            assert len({*self.got}) == len(self.got)

    def path(self, step: int, name: Name, rank: int) -> Path:
        call = f"{self.digests[name[0]]}-{name[1]}" if name else ""
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
        prompts = {digest: prompts for prompts, digest in self.digests.items()}
        there: list[dict[int, set[Name]]] = [{step: set() for step in STEPS} for _ in self.models]
        for place in places_among(self.run, os.listdir(self.run)):
            digest, _, number = place.call.rpartition("-")
            name: Name = (prompts[digest], int(number)) if digest else ()
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


@pytest.mark.parametrize(
    ("role", "plain", "ranks", "background", "examples", "steps"),
    [
        *(
            pytest.param(*kind, examples, 25, marks=marks)
            for kind in (
                ("rollout", True, 1, False),
                ("reward", False, 1, True),
                ("reward", True, 3, True),
                ("async_rollout", False, 1, False),
            )
            for examples, marks in ((7, ()), (25, pytest.mark.slow))
        ),
        # Long runs, in which settings meet.
        pytest.param("rollout", True, 1, False, 250, 20, marks=LONG),
        pytest.param("rollout", False, 1, False, 250, 20, marks=LONG),
        pytest.param("reward", True, 1, False, 100, 20, marks=LONG),
        pytest.param("async_rollout", False, 1, False, 150, 20, marks=LONG),
        pytest.param("rollout", True, 2, False, 250, 20, marks=LONG),
    ],
)
def test_calls_are_served_by_the_rules(
    role: str, plain: bool, ranks: int, background: bool, examples: int, steps: int
) -> None:
    def stage() -> Decorated:
        return Decorated(role, plain) if ranks == 1 else Ranks(role, plain, ranks)

    run_state_machine_as_test(
        lambda: Visits(stage(), background),
        settings=settings(max_examples=examples, stateful_step_count=steps),
    )
