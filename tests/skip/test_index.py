"""What the run's index and its ledger are for: who finds which dump, and which has served."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.skip.run_dumps import RunDumps
from rlskip.store.layout import INDEX
from tests.faulty_files import FaultyFiles
from tests.skip.prompt_stages import counter, made, run, stage, values_of

pytestmark = pytest.mark.usefixtures("no_fsync")


def index_of(dumps: Path) -> Path:
    (run_directory,) = dumps.glob("*/GBS*")
    return run_directory / INDEX


def replaced(dumps: Path) -> None:
    """As a job that was killed before it wrote its line."""
    before = index_of(dumps).read_bytes()
    SkipManager.store("rollout").quarantine(1, "for a test")
    run(stage("column"), "xy")
    index_of(dumps).write_bytes(before)


@pytest.mark.parametrize("match", ["run", "prompt"])
@pytest.mark.parametrize(
    "accident",
    [
        lambda dumps: None,
        lambda dumps: index_of(dumps).unlink(),
        lambda dumps: index_of(dumps).write_bytes(index_of(dumps).read_bytes()[:-30]),
        lambda dumps: shutil.copy(index_of(dumps).parent / "2" / "meta.json", index_of(dumps)),
        replaced,
    ],
    ids=["nothing", "gone", "torn", "foreign", "replaced"],
)
def test_whatever_became_of_the_index_what_is_there_serves(
    init: Callable[..., Path], match: str, accident: Callable[[Path], Any]
) -> None:
    dumps = init()
    generate = stage("column")
    one, two = run(generate, "ab", "cd")
    accident(dumps)
    made.clear()
    init(match=match, wait_s=0)
    third, fourth, _ = run(generate, "cd", "ab", "xy", first=5)
    assert values_of(third) == values_of(two)
    if accident is replaced:
        assert made == ["ab"], "xy is there, and ab is not"
    else:
        assert values_of(fourth) == values_of(one)
        assert made == ["xy"]


@pytest.mark.parametrize("match", ["run", "prompt"])
def test_a_dump_that_another_job_replaced_meanwhile(init: Callable[..., Path], match: str) -> None:
    dumps = init()
    generate = stage("groups")
    run(generate, "ab", "cd", "ef")
    other = init(dump_dir=str(dumps) + "2")
    run(generate, "gh")
    (theirs,) = other.glob("*/GBS*/1")
    made.clear()
    init(dump_dir=str(dumps), match=match, wait_s=0)
    run(generate, "cd", first=7)
    (ours,) = dumps.glob("*/GBS*/1")
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    run(generate, "ab", "ef", first=8)
    assert made == ["ab"]


def test_a_hit_under_match_step_leaves_the_index_alone(init: Callable[..., Path]) -> None:
    dumps = init()
    generate = stage("column")
    with FaultyFiles(dumps) as seen:
        run(generate, "ab", "cd")
    of_index = [o.name for o in seen.operations if o.path.endswith(INDEX)]
    assert of_index.count("write") == of_index.count("open") == 2, "a line each"
    init()
    made.clear()
    with FaultyFiles(dumps) as seen:
        run(generate, "ab", "cd")
    assert made == []
    assert not [o for o in seen.operations if o.path.endswith(INDEX)]


def test_calls_side_by_side_never_take_one_dump(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their own steps, with equal prompts: both look before either has taken what it found."""

    @SkipManager.annotate(role="async_rollout", ignore=["sample_id"])
    async def generate(prompts: str, sample_id: str) -> int:
        return next(counter)

    async def both(*steps: int) -> list[int]:
        return await asyncio.gather(
            *(generate("p", sample_id=f"sample_0_{step}") for step in steps)
        )

    init("async_rollout")
    (dumped,) = asyncio.run(both(1))
    init("async_rollout", match="run")
    real, met = RunDumps.find, threading.Barrier(2)

    def together(self: Any, *args: Any) -> Any:
        found = [*real(self, *args)]
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.3)
        return iter(found)

    monkeypatch.setattr(RunDumps, "find", together)
    got = asyncio.run(both(5, 6))
    assert got.count(dumped) == 1
