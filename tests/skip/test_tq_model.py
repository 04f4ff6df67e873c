"""Role rollout_tq against a model: each prompt gets a group of its own, whatever is asked when."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip import SkipManager
from rlskip.errors import MismatchError
from rlskip.queue import MemoryQueue, to_rows
from rlskip.skip.rollout_tq import GroupRole
from tests.skip.trainers import Trainer, prompts, visit

BATCH = st.tuples(st.text("abc", min_size=1, max_size=3), st.sampled_from(["plain", "plain", "x"]))
VISIT = st.tuples(st.integers(1, 3), st.lists(BATCH, min_size=1, max_size=2))
RUN = st.fixed_dictionaries(
    {
        "match": st.sampled_from(["step", "prompt"]),
        "on_mismatch": st.sampled_from(["error", "regenerate"]),
        "model": st.sampled_from(["counted", "status"]),
        "fails": st.sampled_from(["", "", "a", "bc"]),  # prompts that lose a session
        "ignores": st.sampled_from([False, False, True]),  # the argument `style`
        "sampled": st.sampled_from(["once", "each", "elsewhere"]),
        "visits": st.lists(VISIT, min_size=1, max_size=3),
    }
)


@attrs.frozen(eq=False)
class Known:
    """A group that was generated, and how its run named it.

    Its `part` is one sample's, of prompts that were submitted with the same `style`, which is that
    of the call, or the default where nothing is recorded of it.
    """

    run: int
    part: tuple[int, int, str]
    step: int
    position: int
    prompt: str
    style: str
    draws: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.draws) == 3


class Parts:
    """What is on disk: of each step the groups by part, each at the first number that is free."""

    def __init__(self) -> None:
        self.known: list[Known] = []
        self.numbers: dict[int, dict[int, Any]] = {1: {}, 2: {}, 3: {}}  # None: moved away

    def add(self, one: Known) -> None:
        numbers = self.numbers[one.step]
        if one.part not in numbers.values():
            free = next(i for i in range(len(numbers) + 1) if numbers.get(i) is None)
            numbers[free] = one.part
        self.known.append(one)

    def number(self, one: Known) -> int:
        return next(n for n, part in self.numbers[one.step].items() if part == one.part)

    def remove(self, gone: set[Any]) -> None:
        for numbers in self.numbers.values():
            numbers.update((n, None) for n, part in [*numbers.items()] if part in gone)
        self.known = [one for one in self.known if one.part not in gone]


class Model:
    """What serves which prompt in one run."""

    def __init__(self, parts: Parts, number: int, run: dict[str, Any]) -> None:
        self.parts, self.run, self.ignores = parts, number, run["ignores"]
        self.match, self.first = run["match"], run["visits"][0][0]
        self.regenerates = run["on_mismatch"] == "regenerate"
        self.served: list[Known] = []
        self.generates: set[int] = set()

    def visit(self, step: int) -> None:
        self.step, self.position = step, 0
        self.found: list[Known] | None = None

    def look(self) -> list[Known]:
        """What the visit finds as it begins; by prompt, what other runs have left."""
        step, parts = self.step, self.parts
        if self.match == "prompt":
            others = [one for one in parts.known if one.run != self.run]
            others.sort(key=lambda one: (one.step < self.first, one.step, parts.number(one)))
            return others
        if self.found is None:
            mine = sorted((o for o in parts.known if o.step == step), key=parts.number)
            best: dict[tuple[str, str, int], Known] = {}
            for one in sorted(mine, key=lambda one: not one.is_complete):
                best.setdefault((one.style, one.prompt, one.position), one)
            firsts = [*best.values()]
            more = [one for one in mine if one.is_complete and one not in firsts]
            self.found = sorted([*firsts, *more], key=lambda one: one.position)
            self.served = []
            if None in parts.numbers[step].values():  # it cannot be told what that had
                self.generates.add(step)
        return self.found

    def fits(self, one: Known, style: str) -> bool:
        return self.ignores or one.style == style

    def refusal(self, batch: str, style: str) -> str:
        """How a batch is refused; without that, what is generated replaces what differs."""
        found = [one for one in self.look() if one not in self.served]
        if self.match == "prompt":
            there = [one for one in found if one.is_complete]
            fits = Counter(one.prompt for one in there if self.fits(one, style))
            any_way = Counter(one.prompt for one in there)
            is_odd = Counter(batch) - fits and not Counter(batch) - any_way
            return "was made for another call: arguments.style" if is_odd else ""
        fitting = [one for one in found if self.fits(one, style)]
        lacking = Counter(batch) - Counter(one.prompt for one in fitting)
        odd = [one for one in found if one.prompt in lacking and not self.fits(one, style)]
        if odd and self.regenerates:
            gone = {one.part for one in odd if one.style == odd[0].style}
            self.parts.remove(gone - {one.part for one in self.served})
            self.found = [one for one in self.look() if one.part not in gone]
        if odd:
            return "was made for another call: arguments.style"
        if self.position or self.step in self.generates or not found or not lacking:
            return ""
        complete = Counter(one.prompt for one in fitting if one.is_complete)
        served = (Counter(batch) & complete).total()
        return f"step {self.step} serves {served} of the batch's {len(batch)} prompts"

    def submit(self, prompt: str, style: str) -> Known | None:
        """The group that serves a prompt, from now on no other one; None: it is generated."""
        self.position += 1
        for one in self.look():
            is_like = one.prompt == prompt and one.is_complete and self.fits(one, style)
            if is_like and one not in self.served:
                self.served.append(one)
                return one
        self.generates.add(self.step)
        return None


def sample(trainer: Trainer, elsewhere: bool) -> dict[str, tuple[int, ...]]:
    """What is trained on: by uid the numbers of its rows."""
    roles: Any = SkipManager.skip_instances
    here = roles["rollout_tq"]
    if elsewhere:  # in a process of its own
        roles["rollout_tq"] = GroupRole("rollout_tq", here.local_config, here.dumps.facts)
    [thread.join() for thread in trainer.threads]
    batch, _ = trainer.sample()
    roles["rollout_tq"] = here
    found: dict[str, tuple[int, ...]] = {}
    data = to_rows(trainer.queue.get(batch.keys, "train"))
    for key, row in sorted(zip(batch.keys, data, strict=True), key=lambda pair: pair[0]):
        uid = key.rsplit("_", 2)[0]
        found[uid] = (*found.get(uid, ()), int(row["responses"][0]))
    trainer.buffer.clear(batch)
    assert not any(trainer.queue.list("train")), "the clean-up leaves nothing behind"
    return found


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_each_prompt_gets_a_group_of_its_own(examples: int) -> None:
    tried = given(runs=st.lists(RUN, min_size=2, max_size=4))(each_prompt_gets_its_group)
    settings(max_examples=examples)(tried)()


def each_prompt_gets_its_group(runs: list[dict[str, Any]]) -> None:
    parts, samples = Parts(), itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs):
            sampled, ignore = run["sampled"], ["style"] * run["ignores"]
            skip = {"dump_dir": folder, "ignore": ignore, "match": run["match"]}
            skip["on_mismatch"] = run["on_mismatch"]
            SkipManager.init({"skip": {**skip, "rollout_tq": {"enable": True}}})
            viable = {"on_incomplete": "min_viable", "min_viable": 1}
            trainer = Trainer(MemoryQueue(), run["model"], **viable)
            trainer.fails = {(prompt, 0) for prompt in run["fails"]}
            model = Model(parts, number, run)
            for step, batches in run["visits"]:
                visit(step)
                model.visit(step)
                due: dict[str, tuple[str, str, int, Known | None]] = {}
                for nth, (texts, style) in enumerate(batches, 1):
                    batch, trainer.submitted = prompts(*texts), []
                    refusal = model.refusal(texts, style)
                    if is_refused := bool(refusal) and run["on_mismatch"] == "error":
                        with pytest.raises(MismatchError, match=refusal):
                            trainer.submit(batch, style)
                        assert trainer.submitted == []
                        assert {*batch["uid"]}.isdisjoint(trainer.queue.list("train"))
                    else:
                        for uid, text in zip(batch["uid"], texts, strict=True):
                            position, served = model.position, model.submit(text, style)
                            due[uid] = text, style, position, served
                        trainer.submit(batch, style)
                        misses = [due[uid][0] for uid in batch["uid"] if due[uid][3] is None]
                        assert trainer.submitted == misses
                    is_last = is_refused or nth == len(batches)
                    if due and (is_last or sampled != "once"):
                        trained = sample(trainer, sampled == "elsewhere")
                        assert trained.keys() == due.keys()
                        sample_id = next(samples)
                        for uid, (text, given, position, served) in due.items():
                            if served is not None:
                                assert trained[uid] == served.draws
                                continue
                            kept = "plain" if run["ignores"] else given
                            part = number, sample_id, kept
                            new = Known(number, part, step, position, text, kept, trained[uid])
                            parts.add(new)
                            assert new.is_complete == (text not in run["fails"])
                        due = {}
                    if is_refused:
                        break
            SkipManager.reset()
