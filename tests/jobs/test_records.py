"""The records of hits and misses: appended by many, read by anybody, never in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlskip import record
from rlskip.compare.sides import find_side
from rlskip.jobs.records import (
    JOB_VARIABLE,
    Recorder,
    Tally,
    begin_job,
    end_job,
    has_token,
    job_id,
    leave_token,
    tally,
    tally_steps,
)
from tests.faults.operations import EVENTS, recorded

pytestmark = pytest.mark.usefixtures("job")


def test_events_are_counted_by_role_and_by_step_and_call(tmp_path: Path) -> None:
    for _ in range(2):
        assert recorded(tmp_path).unwritten == Tally()
    dump_dirs = {"rollout": str(tmp_path), "other": str(tmp_path)}
    assert tally(dump_dirs, "job") == {"rollout": EVENTS + EVENTS, "other": Tally()}
    assert tally(dump_dirs, "another job")["rollout"] == Tally()
    assert "0 bytes read, 0.0 s of" in str(Tally(seconds_saved=-0.1)), "loading may take longer"
    recorder = Recorder(tmp_path, "rollout")
    recorder.write("hit", run="e_p/shape", step=3, source=2, call="part-1")
    recorder.write("dumped", run="e_p/shape", step=3, call="part-1")
    steps = tally_steps(tmp_path)["e_p/shape"]
    counted = {key: (t.hits, t.misses, t.seconds_saved) for key, t in steps.items()}
    assert counted == {(2, None): (2, 0, 3.0), (4, None): (0, 2, 0.0), (2, "part-1"): (1, 0, 0.0)}


def test_only_a_job_that_began_here_ends_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def present() -> str:
        begin_job()
        return job_id()

    assert present() == "job", "the user named it"
    monkeypatch.delenv(JOB_VARIABLE)
    first = job_id()
    assert len({first, job_id(), present(), present()}) == 3
    begin_job(lasts=True)
    lasting = job_id()
    assert present() == lasting == end_job()
    assert JOB_VARIABLE not in os.environ
    monkeypatch.setenv(JOB_VARIABLE, first)  # inherited
    assert present() == first
    begin_job(lasts=True)
    assert job_id() != first


@pytest.mark.parametrize("name", ["my run", "a/b", "..", "jü", "~", "x" * 300, ""])
def test_a_job_may_have_any_name(tmp_path: Path, job_of: Any, name: str) -> None:
    job_of(name, lambda step: record("loss", 1.0))
    assert recorded(tmp_path).unwritten == Tally()
    assert tally({"rollout": str(tmp_path)}, job_id()) == {"rollout": EVENTS}
    assert {file.parent for file in tmp_path.rglob("*.jsonl")} == {tmp_path / "records" / job_id()}
    for called in (name, job_id()) if name.strip(".~") else (job_id(),):
        assert find_side(called, tmp_path).directory == tmp_path / "stages" / job_id()


def test_a_token_is_of_its_job_and_of_who_left_it(tmp_path: Path) -> None:
    assert not has_token(tmp_path, "rollout", "job")
    leave_token(tmp_path, "rollout")
    of = (("rollout", "job"), ("other", "job"), ("rollout", "another job"))
    assert [has_token(tmp_path, *one) for one in of] == [True, False, False]


def test_a_line_that_is_not_an_event_is_skipped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "rollout")
    odd = [("bytes", value) for value in ("x", None, -1, 1.5, 10**400, [1])]
    for fact in (*odd, ("call", [1]), ("seconds_saved", [1])):
        recorder.write("hit", run="e_p/shape", step=2, **dict([fact]))
    recorder.write("hit", step=object())  # nor is it JSON
    (file,) = (tmp_path / "records" / "job").iterdir()
    file.write_bytes(file.read_bytes() + b'{"role": ')  # of a write that failed half-way
    recorder.write("miss", run="e_p/shape", step=2)
    assert recorder.unwritten.hits == 1
    assert tally({"rollout": str(tmp_path)}, "job")["rollout"] == Tally(True, 0, 1)
