"""What a batch shows: which session ran where and when, and how far it is.

A timeline is a trace for Perfetto and a picture; progress is a bar in the terminal.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.errors import RlskipError

_INSTALL = 'pip install "rlskip[train]"'
_BLUE, _YELLOW, _RED = "#1f6f8b", "#c9a227", "#b3362b"


@attrs.frozen
class Span:
    """One attempt at a session. Times are in seconds since the batch was submitted.

    ``queued`` is when it started to wait, ``error`` why it failed, ``tokens`` its token count.
    """

    worker: int
    prompt: int
    uid: str
    session: int
    attempt: int
    queued: float
    started: float
    ended: float
    tokens: int = 0
    error: str | None = None


def lanes(spans: Sequence[Span]) -> list[int]:
    """For each span, the lowest lane of its worker that is free while it runs."""
    free: dict[int, list[int]] = defaultdict(list)
    busy: dict[int, list[tuple[float, int]]] = defaultdict(list)
    out = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].started):
        span = spans[i]
        idle, ending = free[span.worker], busy[span.worker]
        while ending and ending[0][0] <= span.started:
            heapq.heappush(idle, heapq.heappop(ending)[1])
        out[i] = heapq.heappop(idle) if idle else len(ending)  # all lower lanes are busy
        heapq.heappush(ending, (span.ended, out[i]))
    return out


def write_timeline(spans: Sequence[Span], directory: str, name: str, title: str) -> None:
    """Write ``{name}.json`` and ``{name}.png``; there must be spans."""
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(spans, folder / f"{name}.json")
    write_picture(spans, folder / f"{name}.png", title)


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write Chrome trace JSON: a process per worker, a thread per lane, a slice per attempt.

    The time that an attempt waited is a slice in the process ``queue``.
    """
    workers = sorted({span.worker for span in spans})
    names = {-1: "queue", **{worker: f"worker {worker}" for worker in workers}}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": worker + 1, "args": {"name": name}}
        for worker, name in names.items()
    ]
    for number, (span, lane) in enumerate(zip(spans, lanes(spans), strict=True)):
        name = f"{span.uid} session {span.session}"
        name += f" attempt {span.attempt}" if span.attempt else ""
        args = {
            "uid": span.uid,
            "session": span.session,
            "attempt": span.attempt,
            "tokens": span.tokens,
            "queued_s": round(span.started - span.queued, 6),
            "error": span.error,
        }
        category = "session" if span.error is None else "failed"
        common = {"name": name, "cat": category, "args": args}
        times = {"ts": span.started * 1e6, "dur": (span.ended - span.started) * 1e6}
        events.append({**common, "ph": "X", "pid": span.worker + 1, "tid": lane, **times})
        for phase, at in (("b", span.queued), ("e", span.started)):
            waits = {"ph": phase, "pid": 0, "tid": 0, "id": number, "ts": at * 1e6}
            events.append({**common, "cat": "queued", **waits})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_picture(spans: Sequence[Span], path: Path, title: str) -> None:
    """Write a PNG: the sessions that run and wait above, each attempt in its lane below.

    Needs matplotlib (extra ``train``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        what = "the picture of a timeline needs matplotlib"
        raise RlskipError(what, "dispatch.timeline_dir", _INSTALL) from error

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True, height_ratios=[1, 3])

    for label, color, edges in (
        ("running", _BLUE, [(s.started, s.ended) for s in spans]),
        ("waiting", _YELLOW, [(s.queued, s.started) for s in spans]),
    ):
        changes = sorted([(a, 1) for a, _ in edges] + [(b, -1) for _, b in edges])
        times = [0.0, *(at for at, _ in changes)]
        counts = [0, *itertools.accumulate(change for _, change in changes)]
        above.step(times, counts, where="post", color=color, label=label)
    above.set_ylabel("sessions")
    above.legend(loc="upper right", frameon=False, ncols=2)

    # The lanes of a worker are adjacent, with a gap before the next worker's.
    lane_of = lanes(spans)
    depth: dict[int, int] = {}
    for span, lane in zip(spans, lane_of, strict=True):
        depth[span.worker] = max(depth.get(span.worker, 0), lane + 1)
    base, bottom = {}, 0.0
    for worker in sorted(depth):
        base[worker] = bottom
        bottom += depth[worker] + 0.6
    width = min(12.0, 300 / bottom)  # in points, of which the axes have about 350
    for label, color, is_kind in (
        ("session", _BLUE, lambda span: span.error is None and not span.attempt),
        ("retried session", _YELLOW, lambda span: span.error is None and span.attempt),
        ("failed attempt", _RED, lambda span: span.error is not None),
    ):
        some = [
            (base[span.worker] + lane + 0.5, span.started, span.ended)
            for span, lane in zip(spans, lane_of, strict=True)
            if is_kind(span)
        ]
        heights, starts, ends = zip(*some, strict=True) if some else ((), (), ())
        below.hlines(heights, starts, ends, color=color, linewidth=width, label=label)
    below.set_xlim(0, max(span.ended for span in spans) * 1.01)
    below.set_ylim(bottom, -0.6)
    below.set_yticks([base[w] + depth[w] / 2 for w in base], [f"worker {w}" for w in base])
    below.tick_params(axis="y", length=0)
    below.set_xlabel("seconds")
    below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, ncols=3)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


class Progress:
    """A progress bar: sessions finished, tokens per second, time left. Needs tqdm."""

    def __init__(self, step: int, sessions: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            what = "a progress bar needs tqdm"
            raise RlskipError(what, "dispatch.progress", _INSTALL) from error

        self._bar = tqdm(total=sessions, desc=f"step {step}", unit="session", leave=False)
        self._began = time.perf_counter()
        self._tokens = self._failed = 0

    def update(self, tokens: int, failed: bool) -> None:
        self._tokens += tokens
        self._failed += failed
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        failures = {"failed": self._failed} if self._failed else {}
        with contextlib.suppress(Exception):  # the terminal may be gone
            self._bar.set_postfix({"tok/s": f"{rate:,.0f}", **failures}, refresh=False)
            self._bar.update()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._bar.close()
