"""Runs on disk: what prune chooses, tells and spares, and what ls and verify report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlskip._human import size
from rlskip.config.steps import Steps, compact
from rlskip.dispatch.journal import append_sessions, read_sessions
from rlskip.runs import on_disk
from rlskip.runs.find import find_target
from rlskip.runs.opened import Run, Step
from rlskip.store import Identity, StepStore, dump
from rlskip.store.layout import Place, part_name
from tests.faulty_files import flip


def steps(run: Path) -> list[int]:
    return StepStore(run).steps()


def chosen(said: Any) -> list[str]:
    return sorted(f"{one['run'].split('_')[0]}/{one['name']}" for one in said.json)


def test_keep_last_counts_per_run_by_when_they_were_written(
    rlskip: Any, dumps: Path, run_dir: Path
) -> None:
    os.utime(run_dir / "1" / "gen_batch.dp", (2e9, 2e9))  # generated again, the last of all
    said = rlskip("prune", dumps, "--keep-last", 1, "--yes", "--json")
    assert chosen(said) == ["grpo-lr2/1", "grpo-lr2/2", "grpo/2", "grpo/3"]
    assert all(one["removed"] for one in said.json)
    assert steps(run_dir) == [1]
    assert rlskip("verify", "-d", dumps).code == 0
    assert rlskip("prune", dumps, "--keep-last", 2, "--json").json == [], "there are fewer"
    StepStore(run_dir).save(4, [1])
    StepStore(run_dir).quarantine(4, "a test")
    assert rlskip("prune", dumps, "--keep-last", 1, "--json").json == [], "step 4 has no dump"


def test_older_than(rlskip: Any, dumps: Path, run_dir: Path) -> None:
    for step in (2, 3):
        for file in (run_dir / str(step)).iterdir():
            os.utime(file)
    said = rlskip("prune", run_dir, "--older-than", "2h", "--json")
    assert chosen(said) == ["grpo/1"]
    assert rlskip("prune", dumps, "--older-than", "9999d", "--json").json == []


@pytest.mark.parametrize(
    "verb", ["prune --older-than 1s --json", "verify --json", "ls --steps --json"]
)
def test_what_a_live_run_removes_meanwhile_is_left_out(
    verb: str, rlskip: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `keep_last` does: a step is gone once the command has come upon it."""
    real, glob, step = os.scandir, Path.rglob, run_dir / "2"

    def scandir(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == step and "verify" not in verb:
            shutil.rmtree(step, ignore_errors=True)
        return real(path)

    def rglob(path: Path, pattern: str) -> Any:  # Python 3.13's has the scandir of its import
        if path == step:
            shutil.rmtree(step, ignore_errors=True)
        return glob(path, pattern)

    def opened(place: Place) -> Any:
        if place.step == 2:
            shutil.rmtree(step, ignore_errors=True)
        return held(place)

    held = on_disk.opened
    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "rglob", rglob)
    if "prune" not in verb:
        monkeypatch.setattr(on_disk, "opened", opened)
    name, *options = verb.split()
    where = [run_dir] if name != "verify" else ["-d", run_dir]
    said = rlskip(name, *where, *options)
    monkeypatch.undo()
    assert said.code == 0, said.err
    found = said.json[0]["dumps"] if name == "ls" else said.json
    assert sorted(one.get("name", one.get("dump")) for one in found) == ["1", "3"]


def test_quarantined_dumps_go_only_on_request(rlskip: Any, run_dir: Path) -> None:
    StepStore(run_dir).quarantine(2, "a test")
    assert "quarantined" in rlskip("ls", run_dir.parents[1]).out
    said = rlskip("prune", run_dir, "--quarantined", "--yes", "--json")
    assert [one["name"].split(".")[0] for one in said.json] == ["2"]
    assert not list(run_dir.glob("*.bad-*"))
    assert steps(run_dir) == [1, 3]


JOB = """
import sys
from pathlib import Path
from rlskip.jobs.lease import SingleFlight
from rlskip.store import dump
run, does = Path(sys.argv[1]), sys.argv[2]
flight = SingleFlight(run)
with dump.appending(run, 1) if does == "append" else flight.enter(1, lambda: False, "a-0"):
    print("at work", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("does", "limit"), [("append", ("--keep-last", 0)), ("generate", ("--older-than", "1s"))]
)
def test_what_another_process_appends_to_or_generates_is_never_removed(
    does: str, limit: tuple[str, object], rlskip: Any, run_dir: Path
) -> None:
    pipe = subprocess.PIPE
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(run_dir), does], stdin=pipe, stdout=pipe, text=True
    )
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "at work\n"
        said = rlskip("prune", run_dir, *limit, "--yes", "--json").json
        why = {"append": "a process appends to it", "generate": "a job generates it"}[does]
        assert [one["kept"] for one in said if one["kept"]] == [why]
        assert steps(run_dir) == [1]
        assert "1 job at work" in rlskip("ls", run_dir.parents[1]).out
        what = f"process {job.pid} on "
        assert what in rlskip("ls", run_dir).out
    finally:
        job.communicate("\n", timeout=60)
    assert "at work" not in rlskip("ls", run_dir.parents[1]).out
    rlskip("prune", run_dir, *limit, "--yes")
    assert steps(run_dir) == []


def test_what_is_kept_is_not_in_the_total(rlskip: Any, run_dir: Path) -> None:
    nbytes = sum(f.stat().st_size for step in "23" for f in (run_dir / step).iterdir())
    with dump.appending(run_dir, 1):
        said = rlskip("prune", run_dir, "--keep-last", 0)
    assert f"would remove 2 dumps, {size(nbytes)};" in said.out


def test_a_dump_that_cannot_be_removed_is_reported(
    rlskip: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: Path, root: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(dump, "remove", remove)
    answer = rlskip("prune", run_dir, "--keep-last", 2, "--yes", "--json")
    (one,) = answer.json
    assert (answer.code, "it cannot be removed: Permission" in one["kept"]) == (1, True)


def test_a_journal_is_listed_and_goes_by_age(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "killed_tiny" / "GBS4_N2_in6_out8"
    sessions = {("prompt", 0, 0): [{"responses": [1, 2]}]}
    append_sessions(run / "3.journal", Identity.of({"n": 2}), sessions)
    (line,) = rlskip("ls", tmp_path, "--json").json
    assert (line["journals"], line["quarantined"]) == (1, 0)
    assert "journals: 3.journal" in rlskip("ls", tmp_path, "--steps").out
    assert rlskip("prune", tmp_path, "--older-than", "1h", "--json").json == []
    os.utime(run / "3.journal", (0, 0))
    with dump.appending(run, 3):
        (said,) = rlskip("prune", tmp_path, "--older-than", "1h", "--yes", "--json").json
    kept = ("3.journal", False, "a process appends to it")
    assert (said["name"], said["removed"], said["kept"]) == kept
    rlskip("prune", tmp_path, "--older-than", "1h", "--yes")
    assert not list(run.glob("*.journal"))


def test_a_journal_that_prune_has_looked_at_is_begun_again(
    rlskip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "killed_tiny" / "GBS4_N2_in6_out8"
    path, identity = run / "3.journal", Identity.of({"n": 2})
    append_sessions(path, identity, {("prompt", 0, 0): [{"responses": [1]}]})
    os.utime(path, (0, 0))
    look = dump.in_use

    def looked(root: Path) -> dict[int, str]:
        found = look(root)
        append_sessions(path, identity, {("prompt", 0, 1): [{"responses": [2]}]})
        return found

    monkeypatch.setattr(dump, "in_use", looked)
    (said,) = rlskip("prune", tmp_path, "--older-than", "1h", "--yes", "--json").json
    assert said["removed"] is True
    append_sessions(path, identity, {("prompt", 0, 2): [{"responses": [3]}]})
    assert [*read_sessions(path, identity)] == [("prompt", 0, 2)]


# -- ls and verify report runs, steps and dumps, and change nothing -------------------------------


def listing(root: Path) -> dict[str, bytes]:
    """All files, but for the one that says that this process lives."""
    files = (path for path in root.rglob("*") if path.is_file() and "job-" not in path.name)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_ls_counts_runs_and_the_hits_of_other_jobs(rlskip: Any, dumps: Path) -> None:
    first, second = rlskip("ls", dumps, "--json").json
    assert first["run"] == "grpo-lr2_tiny/GBS4_N2_in6_out8"
    assert first["steps"] == [1, 2, 3]
    assert (first["hits"], second["hits"], second["misses"]) == (0, 3, 3)
    assert second["seconds_saved"] == pytest.approx(3 * 12.25 + 6)
    assert second["size"] == sum(p.stat().st_size for p in dumps.glob("grpo_tiny/*/[0-9]*/*"))


def test_verify_tells_the_bad_ones_and_touches_none(rlskip: Any, run_dir: Path) -> None:
    assert rlskip("verify", "-d", run_dir).code == 0
    flip(run_dir / "2" / "gen_batch.dp", 40)
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
