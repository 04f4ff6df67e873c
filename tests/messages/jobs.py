"""Of jobs that share a dump_dir: who generates a step, and what cannot be written."""

import json
import logging

from rlskip.jobs.alive import LEASE as NAME
from rlskip.jobs.alive import WORK
from rlskip.jobs.lease import Lease, SingleFlight
from rlskip.jobs.records import Recorder
from tests.clock import MockClock

LEASE = "rlskip.jobs.lease"


def enter(folder, wait_s=1e9, **owner):
    """Lack step 1, which another job has; `owner` changes what its job's file says."""
    assert Lease(folder, f"{NAME}1").acquire()
    (file,) = (folder / WORK).glob("job-*")
    file.write_text(json.dumps({**json.loads(file.read_text()), **owner}))
    clock = MockClock()
    flight = SingleFlight(folder, wait_s=wait_s, clock=clock, sleep=clock.sleep)
    flight.enter(1, lambda: False).release()


def write_record(folder):
    (folder / "records").write_text("a file")
    Recorder(folder, "rollout").write("hit", step=1)


CASES = [
    ("a job that waits", lambda folder: enter(folder, wait_s=3600), logging.WARNING, LEASE),
    ("an owner that hangs", lambda folder: enter(folder, wait_s=30), logging.WARNING, LEASE),
    ("an owner that is gone", enter, logging.WARNING, LEASE),
    (
        "an owner that has ended",  # more than Linux gives: no such process
        lambda folder: enter(folder, pid=2**22 + 1),
        logging.WARNING,
        LEASE,
    ),
    ("records that cannot be written", write_record, logging.WARNING, "rlskip.jobs.records"),
]
