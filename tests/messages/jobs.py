"""Of jobs that share a dump_dir: who generates a step, and what cannot be written."""

import json
import logging
import os

from rlskip.jobs.alive import LEASE as NAME
from rlskip.jobs.alive import WORK
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.records import Recorder
from tests.clock import MockClock

LEASE = "rlskip.jobs.lease"


def enter(folder, wait_s=1e9, silent=False, **owner):
    """Lack step 1, which another job has; `owner` changes what its job's file says."""
    SingleFlight(folder).enter(1, lambda: False).close()  # it goes before another job takes it
    (mine,) = (folder / WORK).glob("job-*")
    theirs = mine.with_name("job-0123456789abcdef")
    theirs.write_text(json.dumps({**json.loads(mine.read_text()), **owner}))
    (folder / WORK / f"{NAME}1").symlink_to("0123456789abcdef-0")
    if silent:
        os.utime(theirs, (0, 0))
    clock = MockClock()
    flight = SingleFlight(folder, wait_s=wait_s, clock=clock, sleep=clock.sleep)
    flight.enter(1, lambda: False).close()


def write_record(folder):
    (folder / "records").write_text("a file")
    Recorder(folder, "rollout").write("hit", step=1)


CASES = [
    ("a job that waits", lambda folder: enter(folder, wait_s=3600), logging.WARNING, LEASE),
    (
        "an owner that is gone",
        lambda folder: enter(folder, silent=True, host="elsewhere", sees="another"),
        logging.WARNING,
        LEASE,
    ),
    (
        "an owner that has ended",  # more than Linux gives: no such process
        lambda folder: enter(folder, pid=2**22 + 1),
        logging.WARNING,
        LEASE,
    ),
    ("records that cannot be written", write_record, logging.WARNING, "rlskip.jobs.records"),
]
