"""Simulated ranks: whatever each of them meets, all do the same, and what it costs to agree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlskip.errors import MismatchError, RlskipError
from rlskip.jobs.ranks import RankError, RankTimeoutError
from rlskip.skip.call import Call, Stage
from rlskip.skip.call_role import CallRole
from rlskip.skip.stage_runner import dump, replay
from rlskip.store import TooLargeDumpError
from tests.skip.trainers import Hub, on_ranks

RANKS = 3
# What a rank meets at its call: its dump is not whole, its call is another one, or it raises.
NOT_WHOLE = ("gone", "meta damaged", "data damaged")
OTHER = ("other prompts", "uncomparable")
RAISES = ("raises before", "raises in load")
MEETS = st.sampled_from(["its dump", *NOT_WHOLE, *OTHER, *RAISES])
SKIP = st.fixed_dictionaries(
    {
        "on_mismatch": st.sampled_from(["error", "regenerate"]),
        "on_miss": st.sampled_from(["generate", "error"]),
        "wait_s": st.sampled_from([0, 60]),
    }
)


class UnforeseenError(Exception): ...


def fail(*args: Any, **kwargs: Any) -> Any:
    raise UnforeseenError


class Job:
    """Simulated ranks, one thread each, which wait for each other for a limited time."""

    def __init__(self, folder: Path, ranks: int = RANKS, patience: int = 20, **skip: Any) -> None:
        skip |= {"dump_dir": str(folder), "background_write": False, "restore_rng": True}
        self.hub = Hub(ranks, timeout_s=patience)
        self.roles = on_ranks(self.hub, **skip)

    def call(self, *meets: str) -> list[Any]:
        """What each rank gets: the result of its dump, None if it generates, or an error."""
        meets = meets or ("its dump",) * len(self.roles)
        with ThreadPoolExecutor(len(meets)) as threads:
            return list(threads.map(self._call, self.roles, meets))

    def _call(self, role: CallRole, meets: str) -> Any:
        def stage(prompts: Any) -> None: ...

        prompts = {"other prompts": ["b"], "uncomparable": [object()]}.get(meets, ["a"])
        identity = fail if meets == "raises before" else None
        if meets == "raises in load":
            role.dumps.store.load = fail  # type: ignore[method-assign]
        role.begin_visit()
        call = Call(Stage(stage, "rollout", identity=identity), (prompts,), {}, 1)
        with call.cleanup:
            try:
                replayed = replay(role, call)
            except Exception as error:
                return error
            if replayed is None:
                dump(role, call, f"rollouts of rank {role.ranks and role.ranks.group.rank}")
            return replayed and replayed[0]


def harm(folder: Path, rank: int, meets: str) -> None:
    shard = next(folder.glob(f"*/*/1.r{rank}-of-*"))
    dump, meta = shard / "gen_batch.dp", shard / "meta.json"
    if meets == "gone":
        dump.unlink()
        meta.unlink()
    for kind, file in (("meta damaged", meta), ("data damaged", dump)):
        if meets == kind:
            content = file.read_bytes()
            file.write_bytes(content[:20] + b"\xff\xfe" + content[22:])


def expected(meets: list[str], skip: dict[str, Any]) -> set[str]:
    """What may become of a call: ``replayed``, ``generated``, or ``refused``."""
    met, policy = {*meets}, skip["on_mismatch"]
    if "raises before" in met or ("uncomparable" in met and policy == "error"):
        return {"refused"}
    missed = "generated" if skip["on_miss"] == "generate" else "refused"
    if "raises in load" in met:  # if that rank comes to it
        return {"refused", *([missed] if met & {*NOT_WHOLE} or len(met) > 1 else [])}
    if met & {*NOT_WHOLE}:
        return {missed}
    if not met & {*OTHER}:
        return {"replayed"}
    return {"refused" if policy == "error" else missed}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """Makes a folder with step 1 as the ranks are to meet it."""
    source = tmp_path_factory.mktemp("dumps")
    assert Job(source).call() == [None] * RANKS

    def copy(meets: list[str]) -> Path:
        folder = tmp_path_factory.mktemp("dumps")
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for rank, what in enumerate(meets):
            harm(folder, rank, what)
        return folder

    return copy


def case(*meets: str, **skip: Any) -> Any:
    usual = {"on_mismatch": "error", "on_miss": "generate", "wait_s": 0}
    return example(meets=[*meets], skip={**usual, **skip})


@pytest.mark.usefixtures("no_fsync")
@settings(max_examples=30)
@given(meets=st.lists(MEETS, min_size=RANKS, max_size=RANKS), skip=SKIP)
@case("other prompts", "meta damaged", "other prompts")
@case("its dump", "other prompts", "its dump")
@case("its dump", "uncomparable", "its dump", wait_s=60)
@case("its dump", "its dump", "raises in load")
def test_all_ranks_replay_or_generate_or_raise(
    dumped: Callable[[list[str]], Path], meets: list[str], skip: dict[str, Any]
) -> None:
    if (skip["on_mismatch"], skip["on_miss"]) == ("regenerate", "error"):
        skip = {**skip, "on_miss": "generate"}  # refused together
    got = Job(dumped(meets), **skip).call(*meets)
    errors = [one for one in got if isinstance(one, Exception)]
    assert len(errors) in (0, RANKS), got
    assert all(isinstance(error, RlskipError | UnforeseenError) for error in errors)
    assert not any(isinstance(error, RankTimeoutError) for error in errors)
    (what,) = {"refused" if errors else "generated" if one is None else "replayed" for one in got}
    assert what in expected(meets, skip)
    raised = [str(rank) for rank, one in enumerate(got) if not isinstance(one, RankError)]
    named = f"rank {', '.join(raised)} of {RANKS} raised an error"
    assert all(named in str(error) for error in errors if isinstance(error, RankError))


def test_a_rank_whose_dump_fits_names_the_one_that_makes_another_call(tmp_path: Path) -> None:
    Job(tmp_path).call()
    got = Job(tmp_path).call("its dump", "other prompts", "its dump")
    assert [type(error) for error in got] == [MismatchError] * RANKS
    assert "row 0 is 'b' now, 'a' in the dump" in str(got[1])
    assert "rank 1 of 3 makes another call than the dump of step 1 was made for" in str(got[0])


@pytest.mark.parametrize(
    "world",
    [
        2,
        16,
        pytest.param(128, marks=pytest.mark.slow),
        # A thousand threads and one interpreter lock: many minutes on two cores.
        pytest.param(1024, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_a_hit_takes_one_exchange_whatever_the_number_of_ranks(tmp_path: Path, world: int) -> None:
    job = Job(tmp_path, world, patience=600)
    assert job.call() == [None] * world
    assert len(job.hub.rounds) == 3
    for _ in range(2):
        job.hub.rounds.clear()
        assert job.call() == [f"rollouts of rank {rank}" for rank in range(world)]
        assert job.hub.rounds == [7]


def test_a_shard_that_one_rank_lacks_the_memory_for_is_not_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.call()
    store = job.roles[1].dumps.store
    store._max_bytes = 1
    assert [type(error) for error in job.call()] == [RankError, TooLargeDumpError, RankError]
    store._max_bytes = None
    assert job.call() == [f"rollouts of rank {rank}" for rank in range(RANKS)]
