"""Runs, steps and dumps on disk: `ls` and `verify` report them and change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlskip._human import size
from rlskip.config.steps import Steps, compact
from rlskip.runs.find import find_target
from rlskip.runs.opened import Run, Step
from rlskip.store import StepStore
from rlskip.store.layout import part_name


def listing(root: Path) -> dict[str, bytes]:
    """All files, but for the one that says that this process lives."""
    files = (path for path in root.rglob("*") if path.is_file() and "job-" not in path.name)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def damage(run_dir: Path, step: int) -> None:
    file = run_dir / str(step) / "gen_batch.dp"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)


def test_ls_counts_runs_and_the_hits_of_other_jobs(rlskip: Any, dumps: Path) -> None:
    first, second = rlskip("ls", dumps, "--json").json
    assert first["run"] == "grpo-lr2_tiny/GBS4_N2_in6_out8"
    assert first["steps"] == [1, 2, 3]
    assert (first["hits"], second["hits"], second["misses"]) == (0, 3, 3)
    assert second["seconds_saved"] == pytest.approx(3 * 12.25 + 6)
    assert second["size"] == sum(p.stat().st_size for p in dumps.glob("grpo_tiny/*/[0-9]*/*"))


def test_verify_tells_the_bad_ones_and_touches_none(rlskip: Any, run_dir: Path) -> None:
    assert rlskip("verify", "-d", run_dir).code == 0
    damage(run_dir, 2)
    (run_dir / "3" / "meta.json").unlink()
    before = listing(run_dir)
    said = rlskip("verify", "-d", run_dir)
    assert said.code == 1
    nbytes = sum(f.stat().st_size for step in "123" for f in (run_dir / step).iterdir())
    assert f"1 of 3 dumps are sound ({size(nbytes)} read)" in said.out
    verdicts = {v["dump"]: v["problem"] for v in rlskip("verify", "-d", run_dir, "--json").json}
    assert verdicts["1"] is None
    assert "altered" in verdicts["2"]
    assert "missing" in verdicts["3"]
    assert rlskip("verify", 1, "-d", run_dir).code == 0
    assert rlskip("verify", run_dir / "2").code == 1
    said = rlskip("show", 2, "-d", run_dir)
    assert (said.code, "altered" in said.err) == (2, True)
    assert rlskip("compare", 1, 2, "-d", run_dir).code == 2
    assert listing(run_dir) == before


def test_shards_and_mini_batches_are_dumps_of_their_step(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "e_p" / "s"
    first, second = (StepStore(run, rank=rank, world_size=2) for rank in (0, 1))
    for store in (first, second):
        store.save(1, [{"rank": store.rank}], info={"generation": "a"})
    for inner in (0, 1):
        StepStore(run).save(2, [{"inner": inner}], call=part_name(inner))
    (listed,) = rlskip("ls", run, "--json").json
    names = [one["dump"] for one in listed["dumps"]]
    assert names == ["1 (rank 0 of 2)", "1 (rank 1 of 2)", "2/0", "2/1"]
    assert rlskip("verify", "-d", run).code == 0
    for part in (["2/1", "-d", run], [run / "2.part-1"]):
        assert [one["dump"] for one in rlskip("show", *part, "--json").json] == ["2/1"]
    second.save(1, [{"rank": 1}], info={"generation": "b"})
    assert "of another call" in rlskip("verify", "-d", run).out
    first.save(1, [{"rank": 0}], info={"generation": "b"})
    assert rlskip("verify", "-d", run).code == 0
    second.quarantine(1, "a test")
    assert rlskip("verify", "-d", run).code == 1


def test_what_cannot_be_read_is_listed_and_a_rank_that_cannot_be_is_not(
    rlskip: Any, run_dir: Path
) -> None:
    (run_dir / "2" / "meta.json").write_text("{")
    assert rlskip("show", 2, "-d", run_dir).code == 2
    (run_dir / "4").symlink_to(run_dir / "1")
    run = next(r for r in rlskip("ls", run_dir.parents[1], "--json").json if "lr2" not in r["run"])
    assert (run["steps"], run["dumps"], run["unreadable"]) == ([1, 2, 3], 3, 1)
    (run_dir / "2" / "gen_batch.dp").unlink()
    shutil.copytree(run_dir / "3", run_dir / "3.r5-of-2")
    said = rlskip("verify", "-d", run_dir, "--json").json
    assert [one["dump"] for one in said if one["problem"]] == ["2"]


def test_a_home_directory_is_written_as_in_a_shell(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run_dir.parent))
    found = find_target(f"~/{run_dir.name}/2", Path("/nowhere"))
    assert found == Step(Run(run_dir.resolve()), 2)


@pytest.mark.parametrize("text", ["", "1", "1,2", "1-3", "1-3,7", "10-30:10,31", "0,5-8"])
def test_steps_are_written_as_the_grammar_reads_them(text: str) -> None:
    steps = Steps.parse(text) if text else []
    assert compact([step for step in range(100) if step in steps]) == text
