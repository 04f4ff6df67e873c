"""Several ranks call the stage together: shards, and hit or miss agreed by all."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import rlskip.skip.roles  # noqa: F401 - here once, not in every child
from rlskip import SkipManager
from rlskip.errors import ConfigError


def _rank(rank: int, world: int, folder: str, steps: list[int]) -> None:
    # This file's own module is not importable by name in the child (importlib mode), so the
    # stage is made here.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "rollout": {"enable": True}}})
    generated = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, Any]:
        dist.barrier()  # a rank that generated alone would hang here
        generated.append(prompts[0])
        return {"rank": rank, "step": prompts[0]}

    for step in steps:
        SkipManager.set_step(step)
        assert generate([step]) == {"rank": rank, "step": step}
    Path(folder, f"generated-{rank}").write_text(" ".join(map(str, generated)))
    dist.barrier()
    dist.destroy_process_group()


def _repeating_rank(rank: int, world: int, folder: str) -> None:
    """Another job writes step 5 between two ranks' looks: rank 0 finds it, rank 1 does not."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    settings = {"dump_dir": f"{folder}/dumps", "action": "repeat", "wait_s": 0}
    SkipManager.init({"skip": {**settings, "rollout": {"enable": True}}})
    skip: Any = SkipManager.skip_instances["rollout"]
    for step in (3, 5):
        skip.store.save(step, step)
    dist.barrier()
    nearest = skip.store.nearest
    skip.store.nearest = lambda step: nearest(step) if rank == 0 else 3

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> None: ...

    SkipManager.set_step(7)
    assert generate([7]) == 5

    def fail(step: int) -> None:
        raise OSError(5, "Input/output error")

    skip.store.nearest = fail  # asked on rank 0 only; the other must not wait for it
    assert generate([7]) is None, "generated on every rank"
    dist.barrier()
    dist.destroy_process_group()


def test_repeat_takes_the_same_step_on_every_rank(tmp_path: Path) -> None:
    mp.start_processes(_repeating_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork")


def _sampling_rank(rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "async_rollout": {"enable": True}}})

    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: list[int], sample_id: str) -> None: ...

    with pytest.raises(ConfigError, match=r"skip.async_rollout.enable: .* has 2 ranks here"):
        asyncio.run(generate([1], sample_id="sample_0_1"))
    dist.barrier()
    dist.destroy_process_group()


def test_samples_side_by_side_are_refused_with_several_ranks(tmp_path: Path) -> None:
    mp.start_processes(_sampling_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork")


def run(folder: Path, steps: list[int], world: int = 2) -> list[str]:
    (folder / "rendezvous").unlink(missing_ok=True)
    mp.start_processes(_rank, args=(world, str(folder), steps), nprocs=world, start_method="fork")
    return [(folder / f"generated-{rank}").read_text() for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_all_hit_or_all_miss(tmp_path: Path, world: int) -> None:
    assert run(tmp_path, [1, 2, 3], world) == ["1 2 3"] * world
    assert run(tmp_path, [1, 2, 3], world) == [""] * world
    missing, broken = (
        next(tmp_path.glob(f"dumps/*/*/{step}/gen_batch.r1-of-{world}.dp")) for step in (2, 3)
    )
    missing.unlink()
    broken.write_bytes(broken.read_bytes()[:-9])
    assert run(tmp_path, [1, 2, 3], world) == ["2 3"] * world
    assert run(tmp_path, [1, 2, 3], world) == [""] * world


def test_shards_of_two_jobs_are_a_miss(tmp_path: Path) -> None:
    """As they lie where the second job was killed when only rank 1 had written."""
    run(tmp_path, [1])
    (first,) = tmp_path.glob("dumps/*/*/1")
    old = {file: file.read_bytes() for file in first.glob("*.r0-of-2.*")}
    next(first.glob("meta.r1-of-2.json")).unlink()
    assert run(tmp_path, [1]) == ["1", "1"]
    assert run(tmp_path, [1]) == ["", ""]
    for file, content in old.items():
        file.write_bytes(content)
    assert run(tmp_path, [1]) == ["1", "1"]
    assert run(tmp_path, [1]) == ["", ""]


def _late_rank(rank: int, world: int, folder: str) -> None:
    """Another job replaces both shards after rank 0 has loaded its own, before rank 1 has."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "rollout": {"enable": True}}})
    skip: Any = SkipManager.skip_instances["rollout"]

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> str:
        return "anew"

    SkipManager.set_step(1)
    assert generate([1]) == "anew"
    load, replacing = skip.store.load_with_meta, [True]

    def replaced(step: int) -> Any:
        meta = skip.store.read_meta(step)
        loaded = load(step) if rank == 0 else None
        dist.barrier()
        if replacing:
            replacing.clear()
            info = {**meta.info, "generation": "abc"}
            skip.store.save(step, "another job's", identity=meta.identity, info=info)
            dist.barrier()
        return loaded or load(step)

    skip.store.load_with_meta = replaced
    assert generate([1]) == "anew"  # on both: none trains on the other job's beside it
    assert generate([1]) == "anew"
    dist.barrier()
    dist.destroy_process_group()


def test_a_step_replaced_between_two_ranks_loads_is_a_miss(tmp_path: Path) -> None:
    mp.start_processes(_late_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork")


def _rank_apart(rank: int, world: int, folder: str) -> None:
    """A dump_dir on the local disk of each node, as rank 2 has it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    dumps = f"{folder}/{'shared' if rank < 2 else 'local'}"
    SkipManager.init({"skip": {"dump_dir": dumps, "rollout": {"enable": True}}})

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> None:
        raise AssertionError("generated")

    SkipManager.set_step(1)
    with pytest.raises(ConfigError, match="rank 2 of 3 does not see what rank 0 writes there"):
        generate([1])
    dist.barrier()
    assert not list(Path(folder, "shared").glob(".rlskip*")), "the token is gone"
    dist.destroy_process_group()


def test_ranks_that_do_not_share_a_dump_dir_are_named_at_the_first_call(tmp_path: Path) -> None:
    mp.start_processes(_rank_apart, args=(3, str(tmp_path)), nprocs=3, start_method="fork")
