"""How many calls a step had, as far as its dumps and the records tell."""

from __future__ import annotations

import math
from datetime import datetime

from rlskip.jobs.records import DumpedCalls
from rlskip.store import DumpMeta


class Traces:
    """What the dumps of a step tell of how many calls it had, as far as they were read.

    Each records how many there were when it was written; the records of the jobs that wrote them
    name the dumps that came later.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._jobs: set[str] = set()
        self._since = math.inf

    def add(self, meta: DumpMeta) -> None:
        calls, job = meta.info.get("calls"), meta.info.get("job")
        self._calls = max(self._calls, calls if type(calls) is int else 0)
        self._jobs |= {job} if isinstance(job, str) else set()
        self._since = min(self._since, datetime.fromisoformat(meta.created).timestamp())

    def calls(self, step: int, dumped: DumpedCalls | None) -> int:
        """How many calls the step had at least. Those before its first dump do not count."""
        later = 0 if dumped is None else dumped.count(step, self._jobs, self._since)
        return max(self._calls, later)
