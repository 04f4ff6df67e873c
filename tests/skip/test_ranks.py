"""Several ranks call the stage together: shards, and hit or miss agreed by all.

Real ranks are processes; what such tests cost is why most rules are tested with simulated ones,
here and in test_calls_stateful.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rlskip.skip.roles  # noqa: F401 - here once, not in every child
from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError, RlskipError
from rlskip.jobs.ranks import RankError
from rlskip.skip import agreement
from rlskip.skip.call import Call, Stage
from rlskip.skip.call_role import CallRole
from rlskip.skip.stage_runner import dump, replay
from rlskip.store import RankTimeoutError, TooLargeDumpError
from tests.skip.trainers import Hub, on_ranks


def _in_group(rank: int, world: int, folder: str, act: Callable[..., Any], *args: Any) -> None:
    """A rank's process: ``act(rank, folder, *args)`` while the group is there."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    act(rank, folder, *args)
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, act: Callable[..., Any], *args: Any, world: int = 2) -> None:
    (folder / "rendezvous").unlink(missing_ok=True)
    mp.start_processes(
        _in_group, args=(world, str(folder), act, *args), nprocs=world, start_method="fork"
    )


def start(folder: str, role: str = "rollout", **skip: Any) -> Any:
    """Turn a role on; the role."""
    skip.setdefault("dump_dir", f"{folder}/dumps")
    SkipManager.init({"skip": {**skip, role: {"enable": True}}})
    return SkipManager.skip_instances[role]


def counting(rank: int, role: Any) -> Any:
    """A stage of `rank` that counts its calls in ``role.made``."""
    role.made = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: str) -> dict[str, Any]:
        dist.barrier()  # a rank that generated alone would hang here
        role.made.append(prompts)
        return {"rank": rank, "of": prompts, "place": len(role.made)}

    return generate


def _steps(rank: int, folder: str, steps: str) -> None:
    role = start(folder)
    generate = counting(rank, role)
    will_replay = SkipManager.will_replay("rollout", map(int, steps))
    dist.barrier()
    for step in steps:
        SkipManager.set_step(int(step))
        got = generate(step)
        assert (got["rank"], got["of"]) == (rank, step)
    Path(folder, f"will-replay-{rank}").write_text(str(will_replay))
    Path(folder, f"generated-{rank}").write_text("".join(role.made))


def generated(folder: Path, steps: str, world: int = 2) -> list[str]:
    """The steps that each rank generates in a job."""
    run(folder, _steps, steps, world=world)
    return [(folder / f"generated-{rank}").read_text() for rank in range(world)]


def test_all_hit_or_all_miss(tmp_path: Path) -> None:
    world = 3
    assert generated(tmp_path, "123", world) == ["123"] * world
    assert generated(tmp_path, "123", world) == [""] * world
    assert {file.read_text() for file in tmp_path.glob("will-replay-*")} == {"True"}
    missing, broken = (
        next(tmp_path.glob(f"dumps/*/*/{step}.r1-of-{world}/gen_batch.dp")) for step in (2, 3)
    )
    shutil.rmtree(missing.parent)
    broken.write_bytes(broken.read_bytes()[:-9])
    assert generated(tmp_path, "123", world) == ["23"] * world
    assert generated(tmp_path, "123", world) == [""] * world


def test_shards_of_two_jobs_are_a_miss(tmp_path: Path) -> None:
    """As they lie where the second job was killed when only rank 1 had written."""
    generated(tmp_path, "1")
    first, second = (next(tmp_path.glob(f"dumps/*/*/1.r{rank}-of-2")) for rank in range(2))
    old = shutil.copytree(first, tmp_path / "old")
    shutil.rmtree(second)
    assert generated(tmp_path, "1") == ["1", "1"]
    assert generated(tmp_path, "1") == ["", ""]
    shutil.rmtree(first)
    shutil.copytree(old, first)
    assert generated(tmp_path, "1") == ["1", "1"]
    assert generated(tmp_path, "1") == ["", ""]


ONLY_ON_ONE = {
    "enable": ("async_rollout", {}),
    "match": ("rollout", {"match": "prompt"}),
    "action": ("rollout", {"action": "repeat"}),
}


def _refused(rank: int, folder: str) -> None:
    for key, (role, skip) in ONLY_ON_ONE.items():
        start(folder, role, **skip)
        generate = SkipManager.annotate(role=role)(lambda prompts, sample_id: None)
        SkipManager.set_step(1)
        with pytest.raises(ConfigError, match=rf"^skip\.{role}\.{key}: .*has 2 ranks here"):
            generate([1], sample_id="sample_0_1")


def test_what_works_on_one_rank_only_is_refused_on_several(tmp_path: Path) -> None:
    run(tmp_path, _refused)


@pytest.mark.parametrize("key", ["match", "action"])
def test_it_is_refused_before_the_first_step_where_ranks_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    role, skip = ONLY_ON_ONE[key]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=rf"^skip\.{role}\.{key}: .*there are several ranks"):
        start(str(tmp_path), role, **skip)


def _apart(rank: int, folder: str) -> None:
    """A dump_dir on the local disk of each node, as rank 2 has it."""
    agreement.SHOWN_S = 0.2
    generate = counting(rank, start(folder, dump_dir=f"{folder}/{'shared' * (rank < 2) or 'own'}"))
    SkipManager.set_step(1)
    with pytest.raises(ConfigError, match="rank 2 of 3 does not see what rank 0 writes there"):
        generate("a")
    dist.barrier()


def test_ranks_that_do_not_share_a_dump_dir_are_named_at_the_first_call(tmp_path: Path) -> None:
    run(tmp_path, _apart, world=3)


def _unequal(rank: int, folder: str) -> None:
    generate = counting(rank, start(folder))
    SkipManager.set_step(5)
    generate("a")
    if rank == 1:
        SkipManager.set_step(6)
    with pytest.raises(RankTimeoutError) as caught:
        generate("b")
    assert "rank 0 makes call 1 of step 5, rank 1 makes call 0 of step 6" in caught.value.what


def test_ranks_that_make_other_numbers_of_calls_are_named(tmp_path: Path) -> None:
    run(tmp_path, _unequal)


# -- simulated ranks: whatever each of them meets, all do the same, and what it costs ---------


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
        made = Stage(stage, "rollout", identity=identity)
        call = Call(made, (prompts,), {}, 1, visit=role.visit(1))
        with call:
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
