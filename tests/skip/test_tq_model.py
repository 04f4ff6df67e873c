"""Role rollout_tq against a model: each prompt gets a group of its own, whatever is asked when."""

from __future__ import annotations

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

VISIT = st.tuples(
    st.integers(1, 3), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=2)
)
RUN = st.fixed_dictionaries(
    {
        "match": st.sampled_from(["step", "prompt"]),
        "on_mismatch": st.sampled_from(["error", "regenerate"]),
        "model": st.sampled_from(["counted", "status"]),
        "fails": st.sampled_from(["", "", "a", "bc"]),  # prompts that lose a session
        "sampled": st.sampled_from(["once", "each", "elsewhere"]),
        "visits": st.lists(VISIT, min_size=1, max_size=3),
    }
)


@attrs.frozen(eq=False)
class Known:
    """A group that was generated, and how its run named it."""

    run: int
    step: int
    position: int
    prompt: str
    draws: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.draws) == 3


class Model:
    """What serves which prompt in one run; `known` are the groups in the order of their dumps."""

    def __init__(self, known: list[Known], run: int, match: str, first: int) -> None:
        self.known, self.run, self.match, self.first = known, run, match, first
        self.served: list[Known] = []
        self.generates: set[int] = set()

    def visit(self, step: int) -> None:
        self.step, self.position = step, 0
        if self.match == "step":  # a visit is enough, and finds what is there when it begins
            mine = [one for one in self.known if one.step == step]
            found: dict[tuple[str, int], Known] = {}
            for one in sorted(mine, key=lambda one: not one.is_complete):
                found.setdefault((one.prompt, one.position), one)
            self.found = sorted(found.values(), key=lambda one: one.position)
            self.served = []
        else:
            others = (one for one in self.known if one.run != self.run)
            self.found = sorted(others, key=lambda one: (one.step < self.first, one.step))

    def refusal(self, batch: str) -> str:
        """How it is refused that the dump of the step lacks prompts of the visit's first batch."""
        left = Counter(one.prompt for one in self.found)
        is_first = self.match == "step" and self.position == 0 and self.step not in self.generates
        if not (is_first and left and Counter(batch) - left):
            return ""
        complete = Counter(one.prompt for one in self.found if one.is_complete)
        served = (Counter(batch) & complete).total()
        return f"step {self.step} serves {served} of the batch's {len(batch)} prompts"

    def submit(self, prompt: str) -> Known | None:
        """The group that serves a prompt, from now on no other one; None: it is generated."""
        self.position += 1
        for one in self.found:
            if one.prompt == prompt and one.is_complete and one not in self.served:
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


@pytest.mark.usefixtures("no_fsync", "job")
@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_each_prompt_gets_a_group_of_its_own(examples: int) -> None:
    tried = given(runs=st.lists(RUN, min_size=2, max_size=4))(each_prompt_gets_its_group)
    settings(max_examples=examples)(tried)()


def each_prompt_gets_its_group(runs: list[dict[str, Any]]) -> None:
    known: list[Known] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs):
            match, sampled = run["match"], run["sampled"]
            skip = {"dump_dir": folder, "match": match, "on_mismatch": run["on_mismatch"]}
            SkipManager.init({"skip": {**skip, "rollout_tq": {"enable": True}}})
            viable = {"on_incomplete": "min_viable", "min_viable": 1}
            trainer = Trainer(MemoryQueue(), run["model"], **viable)
            trainer.fails = {(prompt, 0) for prompt in run["fails"]}
            model = Model(known, number, match, run["visits"][0][0])
            for step, batches in run["visits"]:
                visit(step)
                model.visit(step)
                due: dict[str, tuple[str, int, Known | None]] = {}
                for texts in batches:
                    batch, trainer.submitted = prompts(*texts), []
                    if run["on_mismatch"] == "error" and (refusal := model.refusal(texts)):
                        with pytest.raises(MismatchError, match=refusal):
                            trainer.submit(batch)
                        assert trainer.submitted == []
                        assert trainer.queue.list("train") == {}
                        break
                    for uid, text in zip(batch["uid"], texts, strict=True):
                        due[uid] = text, model.position, model.submit(text)
                    trainer.submit(batch)
                    misses = [due[uid][0] for uid in batch["uid"] if due[uid][2] is None]
                    assert trainer.submitted == misses
                    if sampled == "once" and texts is not batches[-1]:
                        continue
                    trained = sample(trainer, sampled == "elsewhere")
                    assert trained.keys() == due.keys()
                    for uid, (text, position, served) in due.items():
                        if served is not None:
                            assert trained[uid] == served.draws
                        else:
                            known.append(Known(number, step, position, text, trained[uid]))
                            assert known[-1].is_complete == (text not in run["fails"])
                    due = {}
            SkipManager.reset()
