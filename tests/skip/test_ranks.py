"""Several ranks call the stage together: shards, and hit or miss agreed by all.

The ranks are real processes; what such tests cost is why most rules are tested with simulated ones
(test_calls_stateful.py, test_ranks_leave_together.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import rlskip.skip.roles  # noqa: F401 - here once, not in every child
from rlskip import SkipManager
from rlskip.errors import ConfigError
from rlskip.jobs import ranks
from rlskip.store import RankTimeoutError


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


# -- steps -------------------------------------------------------------------------------------


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


# -- what is refused ---------------------------------------------------------------------------


ONLY_ON_ONE = {
    "enable": ("async_rollout", {}),
    "match": ("rollout", {"match": "prompt"}),
    "action": ("rollout", {"action": "repeat"}),
}


def _refused(rank: int, folder: str) -> None:
    for key, (role, skip) in ONLY_ON_ONE.items():
        start(folder, role, **skip)

        @SkipManager.annotate(role=role)
        def generate(prompts: list[int], sample_id: str) -> None: ...

        SkipManager.set_step(1)
        with pytest.raises(ConfigError, match="has 2 ranks here") as caught:
            generate([1], sample_id="sample_0_1")
        assert caught.value.where == f"skip.{role}.{key}"


def test_what_works_on_one_rank_only_is_refused_on_several(tmp_path: Path) -> None:
    run(tmp_path, _refused)


@pytest.mark.parametrize("key", ["match", "action"])
def test_it_is_refused_before_the_first_step_where_ranks_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    role, skip = ONLY_ON_ONE[key]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="there are several ranks") as caught:
        start(str(tmp_path), role, **skip)
    assert caught.value.where == f"skip.{role}.{key}"


def _apart(rank: int, folder: str) -> None:
    """A dump_dir on the local disk of each node, as rank 2 has it."""
    ranks.PATIENCE_S = 0.2
    generate = counting(rank, start(folder, dump_dir=f"{folder}/{'shared' * (rank < 2) or 'own'}"))
    SkipManager.set_step(1)
    with pytest.raises(ConfigError, match="rank 2 of 3 does not see what rank 0 writes there"):
        generate("a")
    dist.barrier()
    assert not list(Path(folder, "shared").glob(".rlskip*")), "the token is gone"


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
