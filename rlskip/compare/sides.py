"""What a user calls a run: a job's records, a Hydra output directory, a run or a dump_dir."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip._files import safe_name
from rlskip.batch.decoding import Decode
from rlskip.batch.rows import RowColumns, Rows
from rlskip.compare.records import Part, StepRecords
from rlskip.compare.rounding import Rounding
from rlskip.compare.steps import compare_step
from rlskip.compare.verdict import Comparison, StepResult
from rlskip.config.steps import Steps, compact
from rlskip.format.dump_errors import DumpError
from rlskip.jobs.records import SUMMARY, read_events
from rlskip.runs.columns import plain, values
from rlskip.runs.conversation import recorded
from rlskip.runs.find import Target, find_target
from rlskip.runs.on_disk import dumps_of, families
from rlskip.runs.opened import NoSuchPlaceError, Run, Step
from rlskip.runs.rollouts import Rollouts
from rlskip.stages.parts import MARK, ROW_COLUMNS, Entry, encode
from rlskip.store.dump import opened
from rlskip.store.layout import STAGES


@attrs.frozen
class Side:
    """The records of one job, in ``{dump_dir}/stages/{job}`` or a copy of it."""

    name: str
    directory: Path
    _decode: Decode | None = None

    def steps(self) -> list[int]:
        return sorted(families(self.directory))

    def records(self, step: int) -> StepRecords:
        """What was recorded at a step; raises DumpError."""
        return StepRecords(dumps_of(self.directory, step))

    @property
    def run(self) -> Run:
        """The run whose rollouts it trained on; an empty one where no dumps are beside them."""
        dump_dir = self.directory.parent.parent
        names = sorted(_runs_of(dump_dir, self.directory.name))
        runs = (Run(dump_dir / name, decode=self._decode) for name in names)
        return next(filter(len, runs), Run(dump_dir / "no" / "run"))


@attrs.define
class Dumps:
    """A run, a step or a call, whose rollouts are compared as records are.

    A step is compared under a `number`, by default its own. ``has_texts``: some of them have no
    tokens.
    """

    name: str
    target: Target
    number: int | None = None
    has_texts: bool = False

    @classmethod
    def pair(cls, a: Target, b: Target) -> tuple[Dumps, Dumps]:
        """Two sides; two steps are compared whatever their numbers are."""
        names = [one.name for one in (a, b)]
        if a.name == b.name:  # in two dump_dirs
            names = [f"{one.name} in {one.run.dump_dir}" for one in (a, b)]
        number = a.number if isinstance(a, Step) and isinstance(b, Step) else None
        return cls(names[0], a, number), cls(names[1], b, number)

    def steps(self) -> list[int]:
        """The steps that have dumps, ascending; NoSuchPlaceError where a named one has none."""
        if isinstance(self.target, Run):
            return self.target.steps()
        next(self.target.iter_dumps())
        return [self.target.number if self.number is None else self.number]

    def records(self, step: int) -> StepRecords:
        """The rollouts of a step; raises DumpError."""
        target = Step(self.target, step) if isinstance(self.target, Run) else self.target
        parts = []
        for rollouts in target.rollouts():
            self.has_texts |= not rollouts.has_tokens
            parts.append(part_of(rollouts))
        return StepRecords(parts)

    @property
    def run(self) -> Run:
        """The run, with the step alone that was named."""
        step = self.target
        return step if isinstance(step, Run) else step.run[step.number : step.number + 1]


def characters(codes: Sequence[int]) -> str:
    """The text of rows without tokens."""
    return "".join(map(chr, codes))


def part_of(rollouts: Rollouts) -> Part:
    """The rows of a dump and their values, as :mod:`rlskip.stages.parts` has them.

    Log-probs and rewards are stages of the rows. Rows of text are compared character by character,
    as if each were a token.
    """
    if not len(rollouts):
        none = np.empty(0, np.int64)
        return {"index": [], **{f"rows.{name}": none for name in ROW_COLUMNS}}
    rows = rollouts.tokens.rows or _rows_of_text(rollouts)
    groups, sessions, turns = (
        np.array([rollouts.cell(name, i) for i in range(len(rollouts))])
        for name in ("group", "session", "turn")
    )
    rows = attrs.evolve(rows, sessions=sessions, turns=turns)
    found: dict[str, Any] = {}
    if known := [p for p in rollouts.tokens.log_probs or () if p is not None]:
        pairs = zip(rollouts.tokens.log_probs or (), rows.response.lengths.tolist(), strict=True)
        dtype = known[0].dtype
        found["log_probs"] = [np.full(n, np.nan, dtype) if p is None else p for p, n in pairs]
        if any(isinstance(one, list | tuple) for one in rollouts.columns.of("log_probs") or ()):
            # Python's floats do not tell their precision.
            found["log_probs"] = [one.tolist() for one in found["log_probs"]]
    if any(reward is not None for reward in rollouts.totals):
        found["rewards"] = [np.nan if r is None else r for r in rollouts.totals]
    entries = [
        Entry.of(name, value, rows, order=order, rank=0)
        for order, (name, value) in enumerate(found.items())
    ]
    return encode(entries, tokens=False) | {
        **{f"rows.{name}": getattr(rows, name) for name in ROW_COLUMNS},
        "rows.groups": groups,
        "rows.tokens": rows.flat_tokens,
        "rows.sampled": rows.flat_sampled,
    }


def _rows_of_text(rollouts: Rollouts) -> Rows:
    """Rows whose tokens are the characters of their prompts and answers.

    Without a known answer a row is all that it has but its reward.
    """
    reward = rollouts.columns.name_of("reward")
    columns = {n: values(c) for n, c in rollouts.columns.columns.items()}
    found: dict[str, list[np.ndarray]] = {"prompt_ids": [], "completion_ids": []}
    for i, row in enumerate(rollouts):
        asked, said = recorded(row, "user"), recorded(row, "assistant")
        if said is None:
            known = None if rollouts.rewards[i] is None else reward
            said = repr({n: plain(cells[i]) for n, cells in columns.items() if n != known})
        for name, text in zip(found, (asked, said), strict=True):
            codes = "" if text is None else text if isinstance(text, str) else repr(text)
            found[name].append(np.array([ord(one) for one in codes], np.int64))
    return Rows.of(RowColumns.of(found))


def find_sides(
    a: str, b: str, within: Path, decode: Decode | None = None
) -> tuple[Side, Side] | tuple[Dumps, Dumps]:
    """The jobs that `a` and `b` mean; dumps where both have some and one has no records."""
    try:
        return find_side(a, within, decode), find_side(b, within, decode)
    except NoSuchPlaceError:
        # A job has no dumps: then what the other one lacks is said.
        jobs = (where / one for one in (a, b) for where in (Path(), within / STAGES))
        if any(recorded_at(job) for job in jobs if os.path.isdir(job)):
            raise
        # Of a name that means nothing it is said first: a side may only lack records.
        order = sorted((a, b), key=lambda name: os.path.exists(os.path.expanduser(name)))
        found = {name: find_target(name, within, decode) for name in order}
        return Dumps.pair(found[a], found[b])


def find_side(name: str, within: Path, decode: Decode | None = None) -> Side:
    """The job in the dump_dir `within`, or at a path, that `name` means; raises NoSuchPlaceError.

    A path is that of its records, of its Hydra output, of runs that it used, or of a dump_dir: then
    the newest job.
    """
    stages = within / STAGES
    named = (Path(os.path.expanduser(name)), stages / name, stages / safe_name(name))
    path = next(filter(os.path.exists, named), named[-1]).resolve()
    if not path.is_dir():
        raise NoSuchPlaceError("no such directory, nor a job with records", name)
    recorded = path  # or what the summary in a job's Hydra output names
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        recorded = Path(json.loads((path / SUMMARY).read_text(encoding="utf-8"))["stages"])
    if recorded_at(recorded):
        return Side(name, recorded, decode)
    if recorded != path:
        what = f"they were in {recorded}"
        raise NoSuchPlaceError("the records of this job are gone", str(path), what)
    if not (jobs := _jobs(path)):
        remedy = "record them: run the job again with +record=stages"
        raise NoSuchPlaceError("no stages were recorded here", name, remedy)
    more = f" (job {jobs[-1].name}, the newest of {len(jobs)})" if len(jobs) > 1 else ""
    return Side(name + more, jobs[-1], decode)


def recorded_of(run: Run) -> Side | None:
    """What the newest job recorded that used a run; None without one."""
    with contextlib.suppress(NoSuchPlaceError):
        return find_side(str(run.directory), run.dump_dir)
    return None


def recorded_at(directory: Path) -> str:
    """When the first step of a job's records in a directory was written; empty without any."""
    # Not by the index of what may be a run of many steps: one sound dump tells.
    for _, places in sorted(families(directory).items()):
        for place in places:
            with contextlib.suppress(DumpError), opened(place) as here:
                meta = here.read_meta()
                return meta.created if MARK in meta.info else ""
    return ""


def compare_sides(
    a: Side | Dumps,
    b: Side | Dumps,
    rounding: Rounding,
    wanted: Steps,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Comparison:
    """Compare two jobs or dumps, one step in memory at a time; `progress` shows how far it is.

    Raises NoSuchPlaceError without a common step among the `wanted`, DumpError where none is read.
    """
    mine, theirs = ({step for step in side.steps() if step in wanted} for side in (a, b))
    if not mine & theirs:
        one, other = (compact(sorted(side.steps())) or "none" for side in (a, b))
        among = "" if str(wanted) == "all" else f" among {wanted}"
        what = f"they have no common step{among}: A has {one}, B has {other}"
        raise NoSuchPlaceError(what, f"{a.name}, {b.name}")
    steps, unreadable, error = list[StepResult](), dict[int, str](), None
    for step in progress(sorted(mine & theirs)):
        try:
            steps.append(compare_step(step, a.records(step), b.records(step), rounding))
        except (DumpError, NoSuchPlaceError) as caught:  # a live run may have removed it meanwhile
            unreadable[step], error = str(caught).partition("\n")[0], caught
    if error is not None and not steps:
        raise error
    alone = sorted(mine - theirs), sorted(theirs - mine)
    return Comparison(a.name, b.name, steps, *alone, rounding.rule, unreadable)


def _jobs(path: Path) -> list[Path]:
    """The jobs with records in a dump_dir, or of runs at or below `path`, the newest last."""
    # {dump_dir}/{experiment}_{project}/{shape}[/{role}]
    within = (path, *path.parents[:3])
    dump_dir = next((one for one in within if (one / STAGES).is_dir()), None)
    if dump_dir is None:
        return []
    # By time, not by name: RLSKIP_JOB gives a job any name.
    every = [(recorded_at(job), job) for job in (dump_dir / STAGES).iterdir() if job.is_dir()]
    place = path.relative_to(dump_dir).parts

    def used(job: Path) -> bool:
        runs = (Path(run).parts for run in _runs_of(dump_dir, job.name))
        return not place or any(run[: len(place)] == place for run in runs)

    return [job for written, job in sorted(every) if written and used(job)]


def _runs_of(dump_dir: Path, job: str) -> set[str]:
    return {event.run for event in read_events(dump_dir, job) if event.run}
