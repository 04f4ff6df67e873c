"""Role rollout_tq: whose groups they are, and what a call leaves behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.keys import STATUS
from rlskip.skip.rollout_tq import GroupRole
from rlskip.store import UnsupportedTypeError
from tests.clock import MockClock
from tests.skip.trainers import Loop, role_of
from tests.skip.trainers import prompts as trained


def prompts(*texts: str, run: str = "r") -> dict[str, Any]:
    return {"uid": [f"{run}-{i}" for i, _ in enumerate(texts)], "text": list(texts)}


@pytest.fixture
def start(init: Callable[..., Path]) -> Callable[..., Any]:
    def start(wait: Callable[[], object] = int, stage: str = "submit", **skip: Any) -> Any:
        init("rollout_tq", n=1, at=1, **skip)
        return Loop(wait=wait, stage=stage)

    return start


@pytest.fixture
def after(start: Callable[..., Any]) -> Callable[..., Any]:
    """``after("xy", **skip)``: a run after one that dumped these prompts."""

    def after(texts: str, **skip: Any) -> Any:
        loop = start()
        loop.submit(prompts(*texts))
        loop.sample()
        return start(**skip)

    return after


def test_one_functions_groups_are_not_anothers(
    start: Callable[..., Any], after: Callable[..., Any]
) -> None:
    again = after("xy")
    again.submit(prompts("y", "x", run="s"))
    assert again.submitted == []
    with pytest.raises(MismatchError, match="serves 0 of the batch's 2 prompts"):
        start(stage="other").submit(prompts("x", "y"))


@pytest.mark.parametrize("match", ["step", "prompt"])
def test_other_arguments_of_the_function_that_submits_count(
    start: Callable[..., Any], match: str
) -> None:
    def submit(text: str, default: float = 1.0, **more: Any) -> list[str]:
        loop = start(match=match)

        @SkipManager.annotate(role="rollout_tq", queue=loop.queue, stage="submit")
        def submitting(
            prompts: dict[str, Any], temperature: float = default, top_p: Any = None, seed: int = 0
        ) -> None:
            loop._submit(prompts)

        submitting(prompts(text), seed=len(loop.seen), **more)
        loop.sample()
        return list(loop.submitted)

    assert submit("x", temperature=0.5) == ["r-0"]
    assert submit("x", temperature=0.5) == []
    other = r"arguments\.temperature: 0\.7 now, 0\.5 in the dump"
    with pytest.raises(MismatchError, match=other):
        submit("x", temperature=0.7)
    SkipManager.store("rollout_tq").quarantine(1, "for a test")
    assert submit("y") == ["r-0"]
    assert submit("y") == []
    with pytest.raises(MismatchError, match=r"arguments\.temperature: 0\.6 now, 1\.0 in the dump"):
        submit("y", default=0.6)
    with pytest.raises(MismatchError, match=r"arguments\.top_p: '<not compared>' now, None in"):
        submit("y", top_p=[print])


@pytest.mark.parametrize("match", ["step", "prompt"])
def test_of_batches_side_by_side_each_gets_groups_of_its_own(
    after: Callable[..., Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, load = after("xy", match=match), GroupRole._load
    met = threading.Barrier(2)

    def wait(*args: Any) -> Any:  # until both have chosen
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.3)
        return load(*args)

    monkeypatch.setattr(GroupRole, "_load", wait)
    batches = [prompts("x", run="s"), prompts("x", run="t")]
    threads = [threading.Thread(target=again.submit, args=[batch]) for batch in batches]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(again.submitted) == 1, "one is generated"


def test_what_is_replayed_is_running_until_the_rest_is_submitted(after: Callable[..., Any]) -> None:
    again = after("x", on_mismatch="regenerate")
    again.submit(prompts("x", "y", run="s"))
    assert again.submitted == ["s-1"]
    (during,) = again.seen
    assert during["s-0"][STATUS] == "running"
    assert "s-0_0_0" not in during
    assert again.queue.list("train")["s-0"][STATUS] == "finished"


@pytest.mark.parametrize("steps", [[1], [1, 2]])
def test_saved_seconds_are_what_sampling_took(
    start: Callable[..., Any], clock: MockClock, steps: list[int]
) -> None:
    """A sample across steps counts once."""
    loop = start()
    for step in steps:
        SkipManager.set_step(step)
        loop.submit(prompts(f"x{step}", run=f"r{step}"))
    loop.wait = lambda: clock.sleep(2)
    loop.sample()
    store = SkipManager.store("rollout_tq")
    metas = [store.read_meta(step) for step in steps]
    assert sum(meta.info["seconds"] for meta in metas) == 2


@pytest.mark.parametrize(
    "forged", [None, {"x_0_0": {}}, {"2_0_0": {}}, {"no key of a group": {}}, {"_0_0": 5}]
)
def test_a_forged_part_never_enters_the_queue(start: Callable[..., Any], forged: Any) -> None:
    loop = start()
    loop.submit(prompts("x"))
    loop.sample()
    store = SkipManager.store("rollout_tq")
    value, meta = store.load(1), store.read_meta(1)
    tags = value["groups"][0]["tags"]
    tags.update(forged) if forged else tags.pop("")
    store.quarantine(1, "for a test")
    store.save(1, value, identity=meta.identity, info=meta.info)
    again = start()
    again.submit(prompts("x", run="s"))
    assert again.submitted == ["s-0"]
    assert again.seen == [{"s-0": again.seen[0]["s-0"]}]


def test_prompts_that_cannot_be_compared_obey_on_mismatch(start: Callable[..., Any]) -> None:
    odd = {**prompts("x"), "tool": [object()]}
    loop = start(on_mismatch="error")
    with pytest.raises(UnsupportedTypeError, match="tool"):
        loop.submit(odd)
    assert loop.submitted == []
    for _ in range(2):
        loop = start(on_mismatch="regenerate")
        loop.submit(odd)
        assert loop.submitted == ["r-0"], "nothing is known to be what it would generate"
        loop.sample()


def test_by_prompt_groups_of_another_sampling_are_a_mismatch(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    first = run()
    rows = [first.step(step, trained(*batch)) for step, batch in ((1, "ab"), (2, "cd"))]
    for policy in ("error", "regenerate"):
        second = run(match="prompt", on_mismatch=policy)
        identities = role_of("rollout_tq").dumps.identities
        identities.conditions = identities.conditions.adding({"sampling.temperature": 0.5})
        if policy == "error":
            with pytest.raises(MismatchError, match=r"step 2 was made for .*temperature"):
                second.step(1, trained(*"da"))
    second.step(1, trained(*"da"))
    assert second.submitted == ["d", "a"]
    assert not [*tmp_path.rglob("*.bad-*")]
    assert run(match="prompt").step(2, trained(*"cd")) == rows[1]


def test_by_prompt_a_repeat_uses_groups_again(run: Callable[..., Any]) -> None:
    rows = run().step(1, trained(*"ab"))
    second = run(match="prompt", action="repeat", on_miss="error")
    firsts = [row["responses"] for row in second.step(2, trained(*"aba"))]
    assert second.submitted == []
    assert sorted(firsts) == sorted(
        row["responses"] for row in rows for _ in range(1 + (row["prompt"] == "a"))
    )
    with pytest.raises(MissError, match="the run serves 1 of the batch's 2 prompts"):
        second.step(3, trained("x", "b"))


def test_groups_of_one_prompt_and_place_serve_one_after_the_other(
    after: Callable[..., Any],
) -> None:
    """The second call generates what has the place, in the step, of the group that served."""
    again = after("xy")
    for run in "st":
        again.submit(prompts("y", run=run))
    assert again.submitted == ["t-0"]
    again.sample()
    SkipManager.set_step(2)
    SkipManager.set_step(1)
    again.submit(prompts("y", "y", run="u"))
    assert again.submitted == ["t-0"]


def test_a_refill_is_made_as_its_step_was_but_for_its_own_arguments(
    start: Callable[..., Any],
) -> None:
    def step(of_batch: str, of_refill: str) -> list[str]:
        loop = start()

        def submit(prompts: dict[str, Any], style: str = "plain") -> None:
            loop._submit(prompts)

        for phase, uid, style in (("submit", "r", of_batch), ("refill", "s", of_refill)):
            options = {"queue": loop.queue, "phase": phase, "stage": "submit"}
            SkipManager.annotate("rollout_tq", **options)(submit)(prompts(phase, run=uid), style)
        loop.sample()
        return list(loop.submitted)

    assert step("long", "plain") == ["r-0", "s-0"]
    assert step("long", "long") == ["s-0"]
    assert step("long", "plain") == step("long", "long") == []
