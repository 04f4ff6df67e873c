"""The page as one HTML file: figures, and as many sessions as fit, compressed for its script.

Data is base64: an index, and a chunk for each dump with its sessions, which the script unpacks when
one is opened. The policy lets nothing run but the scripts of this package, and nothing load.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from rlskip._human import counted, duration, finite, size
from rlskip._version import __version__
from rlskip.batch.columns import columns_of
from rlskip.compare.records import RowValues
from rlskip.compare.sides import Dumps, Side, recorded_of
from rlskip.config.steps import compact
from rlskip.errors import RlskipError
from rlskip.format.dump_errors import DumpError
from rlskip.jobs.records import Tally, tally_steps
from rlskip.report.sessions import READ, Vocabulary, curves, prompt_of, rounded, session
from rlskip.runs.figures import Sessions, by_interest, group_figures, step_figures
from rlskip.runs.on_disk import Dump, dumps_at, spread
from rlskip.runs.opened import OF_SESSIONS

_SCRIPTS = (
    "uPlot.iife.min.js", "data.js", "tables.js", "charts.js", "views.js", "overview.js", "step.js",
    "sessions.js", "main.js",
)  # fmt: skip
_STYLES = ("uPlot.min.css", "page.css")
_INDEXED = 30  # bytes of a page for each session whose figures it lists
_SESSION, _TOKEN = 200.0, 4.0  # bytes of a page that a session is thought to take

Progress = Callable[[Sequence[Dump]], Iterable[Dump]]


class OneRun:
    """One run of a page, with what a job recorded that trained on its rollouts.

    ``shown`` are its sessions, the first to keep first, as places among all of the run.
    """

    def __init__(
        self, side: Side | Dumps, progress: Progress, success: float, max_bytes: int
    ) -> None:
        self.name, self._run = side.name, side.run
        self._records = side if isinstance(side, Side) else recorded_of(side.run)
        run, places = self._run, self._run.places()
        read = spread(list(places), READ)
        is_sampled = len(read) < len(places)
        dumps = [dump for step in read for dump in dumps_at(places[step], indexed=not is_sampled)]
        self._tally = sum(tally_steps(run.dump_dir).get(run.name, {}).values(), Tally())
        self.problems: list[tuple[str, str]] = []
        self.dumps = [(dump, self._counted(dump)) for dump in progress(dumps)]
        by_step = itertools.groupby(self.dumps, lambda one: one[0].step)
        found = [(step, list(some)) for step, some in by_step]
        wanted = [step for step, _ in found]
        self._steps = list(places) if is_sampled else wanted
        self._recorded, self._curves = list[int](), dict[str, list[float | None]]()
        if self._records is not None:
            self._recorded, self._curves, problems = curves(self._records, wanted)
            self.problems += problems
        self.steps = [(step, step_figures(dumps, success)) for step, dumps in found]
        known = [sessions for _, sessions in self.dumps]
        self._every = Sessions.joined(known)
        # Of which dump a session is, and which of the dump's sessions.
        self._dump = np.repeat(np.arange(len(known)), [len(one) for one in known])
        self._place = np.arange(len(self._dump)) - np.searchsorted(self._dump, self._dump)
        self._groups = [
            {"step": dump.step, "dump": dump.name, **figures}
            for dump, sessions in self.dumps
            for figures in group_figures(sessions)
        ]
        self._order = by_interest(self._every.group, self._every.reward)
        # By place: sessions of a group are next to each other.
        self._listed = np.sort(self._order[: max_bytes // _INDEXED])
        self.shown: list[int] = []
        self._read: dict[int, dict[str, Any]] = {}
        self._words: dict[int, Vocabulary] = {}
        self._prompts: dict[int, str] = {}  # by group

    def _counted(self, dump: Dump) -> Sessions:
        """The sessions of a dump; none where it cannot be read."""
        try:
            return Sessions.of(self._run.read(dump, OF_SESSIONS))
        except DumpError as error:
            self.problems.append((f"dump {dump.name}", error.what))
            return Sessions.joined([])

    def read_sessions(self, budget: int) -> None:
        """Read sessions that take about `budget` bytes of the page."""
        lengths = np.nan_to_num(self._every.length[self._order])
        n = int(np.searchsorted(np.cumsum(_SESSION + _TOKEN * lengths), budget))
        some = self._order[:n]
        for d in np.unique(self._dump[some]).tolist():
            self._read_dump(d, some[self._dump[some] == d].tolist())
        self.shown = [i for i in some.tolist() if i in self._read]

    def _read_dump(self, d: int, chosen: Sequence[int]) -> None:
        (dump, _), records = self.dumps[d], self._records
        try:
            rollouts = self._run.read(dump)
            sessions = rollouts.sessions
            recorded = RowValues(None if records is None else records.records(dump.step), rollouts)
            words = self._words[d] = Vocabulary(rollouts.decode or dump.decoder())
            for i in chosen:
                one = sessions[self._place[i]]
                self._read[i] = session(one, words, recorded)
                group = int(self._every.group[i])
                if group not in self._prompts:
                    self._prompts[group] = prompt_of(one, words)
        except (DumpError, IndexError) as error:  # IndexError: it was replaced meanwhile
            problem = error.what if isinstance(error, DumpError) else "it has changed"
            self.problems.append((f"dump {dump.name}", problem))

    def total(self, name: str) -> float:
        """A figure, summed over the steps that are read."""
        return sum(figures[name] or 0 for _, figures in self.steps)

    def index(self, chunks: list[str]) -> dict[str, Any]:
        """What the page lists of the run: steps, groups, sessions, and where these are shown.

        Adds to `chunks` for each dump of which sessions are shown these, in base64.
        """
        listed, by_dump = self._listed, dict[int, list[int]]()
        for i in sorted(self.shown):
            by_dump.setdefault(int(self._dump[i]), []).append(i)
        chunk, place = np.full(len(self._dump), -1), np.zeros(len(self._dump), np.int64)
        for d, some in by_dump.items():
            chunk[some], place[some] = len(chunks), np.arange(len(some))
            sessions = [self._read[i] for i in some]
            chunks.append(packed({"texts": self._words[d].texts, "sessions": sessions}))
        groups, group = np.unique(self._every.group[listed], return_inverse=True)
        shown = {*self._every.group[self.shown].tolist()}
        return {
            "name": self.name,
            "facts": self._facts(),
            "problems": self.problems,
            "steps": columns_of([{"step": step, **figures} for step, figures in self.steps]),
            "recorded": self._recorded,
            "curves": self._curves,
            "groups": {
                **columns_of([self._groups[g] for g in groups.tolist()]),
                "prompt": [self._prompts.get(g) if g in shown else None for g in groups.tolist()],
            },
            "sessions": {
                "group": group.tolist(),
                "number": self._every.number[listed].tolist(),
                "reward": rounded(self._every.reward[listed], 6),
                "length": rounded(self._every.length[listed], 6),
                "turns": self._every.turns[listed].tolist(),
                "chunk": chunk[listed].tolist(),
                "place": place[listed].tolist(),
            },
            "all": {"sessions": len(self._dump), "groups": len(self._groups)},
        }

    def _facts(self) -> list[tuple[str, str]]:
        if not self.dumps:
            return []
        seconds, tally = self.total("seconds"), self._tally
        metas = [dump.meta for dump, _ in self.dumps if dump.meta is not None]
        jobs = len({m.info["job"] for m in metas if isinstance(m.info.get("job"), str)})
        facts = {
            "run": self._run.name,
            "steps": f"{compact(self._steps)} ({len(self._steps):,})",
            "read": f"{n:,} steps, evenly" if (n := len(self.steps)) < len(self._steps) else "",
            "sessions": f"{len(self._dump):,} in {counted(len(self._groups), 'group')}",
            "on disk": size(sum(dump.size for dump, _ in self.dumps)),
            "generated in": duration(seconds) if seconds else "",
            "hits, misses": f"{tally.hits}, {tally.misses}" if tally.hits or tally.misses else "",
            "generation saved": duration(saved) if (saved := tally.seconds_saved) > 0 else "",
            "written": min((m.created for m in metas), default="")[:16].replace("T", " "),
            "by": f"{jobs} jobs" if jobs > 1 else "",
            "stages recorded by": "" if self._records is None else self._records.directory.name,
        }
        return [(name, value) for name, value in facts.items() if value]


def packed(data: Any) -> str:
    plain = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    packed = gzip.compress(plain.encode("utf-8", "replace"), 6, mtime=0)
    return base64.b64encode(packed).decode()


def render(
    shown: Sequence[Side | Dumps],
    *,
    success: float,
    max_bytes: int,
    verdict: Mapping[str, Any] | None = None,
    progress: Progress = iter,
) -> tuple[bytes, dict[str, int]]:
    """The page of one or two runs, of at most `max_bytes`: sessions that do not fit are left out.

    A session succeeds from a reward of `success` on. A `verdict` is ``said`` in a sentence,
    ``is_equal`` or not, and has a table of ``columns`` and ``rows``. Returned are the HTML, and how
    many sessions, groups and steps it shows. Raises RlskipError where not even the figures fit.
    """
    sides = [OneRun(one, progress, success, max_bytes // len(shown)) for one in shown]
    head = {"version": __version__, "success": success, "verdict": verdict}
    least = len(_page(head, sides))
    if least > max_bytes:
        what = f"the page has {size(least)} without any session, more than {size(max_bytes)}"
        raise RlskipError(what, "--max-mb", f"--max-mb {least / 1e6 + 1:.0f}")
    for side in sides:
        side.read_sessions((max_bytes - least) // len(sides))
    while len(html := _page(head, sides)) > max_bytes:
        share = (max_bytes - least) / (len(html) - least)
        for side in sides:
            side.shown = side.shown[: int(len(side.shown) * share * 0.97)]
    counts = {n: int(sum(side.total(n) for side in sides)) for n in ("sessions", "groups")}
    for name in ("shown", "steps"):
        counts[name] = sum(len(getattr(side, name)) for side in sides)
    return html, counts


def _page(head: dict[str, Any], sides: Sequence[OneRun]) -> bytes:
    chunks = list[str]()
    runs = [side.index(chunks) for side in sides]
    data = {"index": packed(finite({**head, "runs": runs}))}
    data |= {f"chunk-{i}": chunk for i, chunk in enumerate(chunks)}
    scripts, styles = ([_asset(name) for name in names] for names in (_SCRIPTS, _STYLES))
    allowed = [_allowed("script-src", scripts), _allowed("style-src", styles)]
    page = Template(_asset("page.html")).substitute(
        policy="; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *allowed]),
        title=escape(" and ".join(dict.fromkeys(side.name for side in sides))),
        styles="\n".join(f"<style>{style}</style>" for style in styles),
        data="\n".join(
            f'<script type="text/plain" id="{n}">{part}</script>' for n, part in data.items()
        ),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )
    return page.encode("utf-8", "replace")


def _asset(name: str) -> str:
    return (files("rlskip.report") / "assets" / name).read_text(encoding="utf-8")


def _allowed(kind: str, texts: Sequence[str]) -> str:
    """The part of the policy that lets these texts act, by their hashes."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join([kind, *(f"'sha256-{found}'" for found in hashes)])
