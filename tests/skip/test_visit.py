"""Which dump serves a call where other jobs, other steps or damage have a part in it."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.skip.run_index import RunIndex
from rlskip.skip.visit import Found, Visit
from rlskip.store import Identity, StepStore

IDENTITY = Identity.of({"prompts": "a" * 32})
made: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    made.clear()


@SkipManager.annotate(role="rollout", identity=lambda prompts, **given: given)
def generate(prompts: str, **given: int) -> str:
    made.append(prompts)
    return f"{prompts}{len(made)}"


def step(number: int, *calls: str) -> list[str]:
    """One visit of a step."""
    SkipManager.set_step(number + 1)
    SkipManager.set_step(number)
    return [generate(call) for call in calls]


def test_a_step_whose_only_dump_is_damaged_is_a_miss_like_any_other(dumped_calls: Any) -> None:
    (dump,) = dumped_calls({1: "a"}, on_miss="error").rglob("gen_batch.dp")
    dump.write_bytes(b"")
    with pytest.raises(MissError, match="step 1 has no usable dump, and"):
        step(1, "a")


def test_a_later_call_whose_dump_is_gone_is_said_to_be_missing(dumped_calls: Any) -> None:
    (gone,) = dumped_calls({1: "abc"}, on_miss="error").glob("*/*/1/1/gen_batch.dp")
    gone.write_bytes(b"")
    with pytest.raises(MissError, match="a dump of the step is missing, no other has its prompts"):
        step(1, *"cb")


def test_a_refused_call_does_not_count(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "ab"}, on_miss="error")
    (next(dumps.glob("*/*/1")) / "meta.json").unlink()
    SkipManager.set_step(1)
    for prompts in "xy":
        with pytest.raises(MissError, match="a dump of the step is missing"):
            generate(prompts)


def test_the_reason_of_a_miss_is_what_differs_from_the_nearest(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    step(1, "a")
    generate("b", top_k=2, min_p=1)
    generate("b", top_k=1, min_p=1)
    init()
    step(1, "a")
    with caplog.at_level(logging.INFO):
        generate("b", top_k=1, min_p=2)
    (reason,) = [r.getMessage() for r in caplog.records if "call 1 is generated" in r.getMessage()]
    assert "min_p" in reason
    assert "top_k" not in reason


def test_what_another_job_adds_meanwhile_is_one_of_the_steps_calls(store: StepStore) -> None:
    visit = Visit(store, 1)
    store.save(1, "another job's")
    visit.refresh()
    assert not visit.is_empty
    assert visit.kth(0) == Found(1, 0)
    assert visit.next_number() == 1


@pytest.mark.parametrize("saves", [False, True])
def test_a_number_that_this_job_has_reserved_may_become_another_jobs(
    store: StepStore, saves: bool
) -> None:
    ours, visit = IDENTITY.adding({"n": 2}), Visit(store, 1)
    numbers = [visit.reserve() for _ in range(3)]
    if saves:
        visit.saves(1, ours)
        store.save(1, "ours", identity=ours, part=2)
        visit.saves(2, ours)
    store.save(1, "theirs", identity=IDENTITY, part=1)
    store.save(1, "theirs", identity=IDENTITY, part=7)
    visit.refresh()
    assert numbers == [0, 1, 2]
    assert [found.number for found in visit.fitting(IDENTITY)] == [1, 7]
    assert [*visit.fitting(ours)] == []
    visit.add(1, store.read_meta(1, 1))  # type: ignore[arg-type]
    visit.release(1)
    assert visit.next_number() == 3
    assert visit.listed == [1, 7]


def test_a_dump_that_served_a_call_before_it_was_read_serves_no_other(store: StepStore) -> None:
    store.save(1, "x", identity=IDENTITY)
    visit = Visit(store, 1)
    visit.take(Found(1, 0))
    assert list(visit.fitting(IDENTITY)) == []


def test_a_dump_without_an_identity_serves_any_call_but_last(store: StepStore) -> None:
    store.save(1, "x")
    store.save(1, "x", part=1, identity=IDENTITY)
    visit = Visit(store, 1)
    assert [*visit.fitting(IDENTITY), *visit.unnamed()] == [Found(1, 1), Found(1, 0)]


def test_dumps_that_differ_in_what_only_warns_serve_in_their_order(store: StepStore) -> None:
    for number, model in enumerate("aba"):
        identity = attrs.evolve(IDENTITY, noted={"model": model})
        store.save(1, "x", part=number or None, identity=identity)
    visit = Visit(store, 1)
    for _ in ("they are read", "they are known"):
        assert [found.number for found in visit.fitting(IDENTITY)] == [0, 1, 2]


def test_the_number_of_a_lost_dump_is_free_until_another_job_takes_it(store: StepStore) -> None:
    for part in (None, 1):
        store.save(1, "x", part=part)
    visit = Visit(store, 1)
    assert visit.next_number() == 2
    visit.lose(Found(1, 0))
    assert (visit.kth(0), visit.next_number()) == (None, 0)
    assert visit.is_damaged
    visit.mark_present(0)
    assert (visit.kth(0), visit.next_number()) == (Found(1, 0), 2)
    assert not visit.is_damaged
    assert [visit.reserve(), visit.reserve(5), visit.reserve(5)] == [2, 5, 6]


def test_a_dump_that_cannot_be_read_may_have_been_the_calls(
    dumped_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped_calls({1: "ab"})
    read_meta = StepStore.read_meta

    def read(self: StepStore, number: int, part: int | None = None) -> Any:
        if part is None:
            raise OSError(errno.EIO, "Input/output error")
        return read_meta(self, number, part)

    monkeypatch.setattr(StepStore, "read_meta", read)
    assert step(1, "x") == ["x1"], "not a mismatch with the other dump"


def test_a_call_that_cannot_be_compared_costs_no_dump_that_served_another(
    dumped_calls: Any,
) -> None:
    dumps = dumped_calls({1: "a"}, on_mismatch="regenerate")
    assert step(1, "a") == ["a1"]
    generate(object())
    assert len(made) == 1
    assert not list(dumps.rglob("*.bad-*"))


def test_each_dump_of_another_step_is_offered_once(store: StepStore) -> None:
    store.save(1, "x", identity=IDENTITY)
    others = RunIndex(lambda: {"": store})
    for _ in range(2):
        for _ in ("it is read", "it is known"):
            assert others.find("a" * 32, 2) == [Found(1, 0)]
        others.wrote(Found(1))


def test_a_mismatch_under_match_run_does_not_advise_it(dumped_calls: Any) -> None:
    dumped_calls({1: "a"})
    step(2, "x")
    generate("b", top_k=1)
    SkipManager.flush()
    dumped_calls({}, match="run")
    with pytest.raises(MismatchError) as caught:
        step(1, "b")
    assert "match=run" not in str(caught.value)


def test_a_dump_that_is_replaced_before_it_is_loaded_is_a_miss(
    dumped_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped_calls({1: "a", 2: "b"})
    load, replaced = StepStore.load_with_meta, []

    def load_later(self: StepStore, number: int, **more: Any) -> Any:
        if not replaced:
            rollouts, meta, _ = load(self, 2)
            self.quarantine(1, "for a test")
            replaced.append(self.save(1, rollouts, identity=meta.identity))
        return load(self, number, **more)

    monkeypatch.setattr(StepStore, "load_with_meta", load_later)
    assert step(1, "a") == ["a1"]
    assert made == ["a"]


def test_a_number_that_another_job_took_meanwhile_stays_its_own(init: Callable[..., Path]) -> None:
    init(wait_s=0)
    store = SkipManager.store("rollout")

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        store.save(1, "theirs", identity=IDENTITY)
        return prompts

    SkipManager.set_step(1)
    assert stage("ours") == "ours"
    SkipManager.flush()
    assert [store.load(1), store.load(1, part=1)] == ["theirs", "ours"]


def test_a_call_whose_dump_is_damaged_keeps_its_number(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        if made:
            other = threading.Thread(target=stage, args=(made.pop(),))
            other.start()
            other.join()
        return prompts

    for meanwhile in ("", "x"):
        dumps = init(wait_s=0)
        SkipManager.set_step(1)
        made[:] = meanwhile
        assert stage("a") == "a"
        SkipManager.flush()
        if not meanwhile:
            (dump,) = dumps.rglob("gen_batch.dp")
            content = bytearray(dump.read_bytes())
            content[20] ^= 1
            dump.write_bytes(content)
    store = SkipManager.store("rollout")
    assert [store.load(1), store.load(1, part=1)] == ["a", "x"]


def test_after_a_number_that_was_taken_comes_a_higher_one(init: Callable[..., Path]) -> None:
    """A lower one may be free on one rank only."""

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        if prompts == "b":
            store.save(1, "theirs", part=1, identity=IDENTITY)
            role: Any = SkipManager.skip_instances["rollout"]
            role._visit(1).lose(Found(1, 0))
        return prompts

    init(wait_s=0)
    store = SkipManager.store("rollout")
    SkipManager.set_step(1)
    for prompts in "ab":
        assert stage(prompts) == prompts
    SkipManager.flush()
    assert [store.load(1, part=part) for part in (None, 1, 2)] == ["a", "theirs", "b"]
