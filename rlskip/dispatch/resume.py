"""Resuming a step that was interrupted: a run's journals, and the sessions that they hold.

Sessions are appended as they finish: by the dispatcher if it writes their rows, else by the worker
that does (:class:`WorkerJournal`). The next run that submits the step takes them by the call of a
stage that submits them, the content of their prompt and their number, and generates the others. A
journal is removed once

- the dump of its step is there,
- a later step is submitted, or a batch was sampled: a dump may be that of another call, and
- no prompt of its step is in the queue any more, where groups are sampled one by one.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from rlskip.batch.meta import plain
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.journal import Appender, SessionJournal
from rlskip.dispatch.pools import returned
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import Session
from rlskip.format.fingerprint import canonical
from rlskip.format.prompt_digests import digests_of
from rlskip.jobs.served import enclosing, ledger_of
from rlskip.keys import DO_SAMPLE, GLOBAL_STEPS, IS_PROMPT, TRAIN, WEIGHT_TAGS, integer
from rlskip.queue import TrajectoryQueue
from rlskip.store import Identity, StepStore, UnsupportedTypeError, fingerprint
from rlskip.store.layout import journal_name, journaled_steps

logger = logging.getLogger(__name__)

_OPEN = 8  # steps whose batches may run at once


@attrs.frozen
class Journaled:
    """A finished session: its rows, and what else of it must be known to resume it.

    `tags` are those of the rows, if a worker wrote them itself; `uid` is its prompt's; `lacks` is
    what it lacked of what its stage needed (:class:`rlskip.jobs.served.Needs`).
    """

    rows: list[dict[str, Any]]
    tags: Sequence[Mapping[str, Any]] = ()
    uid: str | None = None
    lacks: Sequence[str] = ()

    def packed(self) -> tuple[Any, ...]:
        """What a journal holds of it: plain mappings, as the format keeps no other."""
        return [{**row} for row in self.rows], self.tags, self.uid, self.lacks

    @classmethod
    def unpacked(cls, entry: Any, prompt: Prompt) -> Journaled | None:
        """A session of `prompt`; rows that name the earlier prompt's uid name its.

        None for what is not one: a file may hold anything.
        """
        with contextlib.suppress(Exception):
            found = cls(*entry)
            if returned(found.rows)[0] and len(found.tags) in (0, len(found.rows)):
                for row in found.rows:
                    if "uid" in prompt.fields and str(plain(row.get("uid"))) == found.uid:
                        is_text = isinstance(row["uid"], str)
                        row["uid"] = prompt.uid if is_text else prompt.fields["uid"]
                return found
        return None


def journal_identity(identity: Identity, config: DispatchConfig) -> Identity:
    """What sessions depend on besides their prompts: `identity` and parts of `config`."""
    sampling = {f"sampling.{name}": value for name, value in (config.sampling or {}).items()}
    return identity.adding({"n": config.n, **sampling, "dispatch.seed": config.seed})


@attrs.define(eq=False)
class Journals:
    """The journals of a run, next to the dumps of its `store`.

    Sessions of another `identity` are not resumed, nor those that span more than `max_span` steps,
    from the first that their weights could generate to the one that resumes them: 1 is on-policy,
    None any number. `queue` is where the prompts are; None: in memory, until they are taken.
    """

    _store: StepStore
    identity: Identity
    _queue: TrajectoryQueue | None
    _max_span: int | None = None
    _partitions: set[str] = attrs.field(factory=lambda: {TRAIN}, init=False)  # of prompts

    def open(self, step: int) -> SessionJournal:
        """Remove the earlier journals that are done with, and open that of `step`."""
        self.tidy(before=step)
        return SessionJournal(self._path(step), self.identity)

    def tidy(self, before: float = math.inf) -> None:
        """Remove the journals that are done with, of steps `before` this one."""
        there = [step for step in journaled_steps(self._store.directory) if step < before]
        metas = {step: self._store.read_meta(step) for step in there}
        # Of a queue's step single groups are dumped: others of it may still be generated.
        whole = {step for step, meta in metas.items() if meta and "groups" not in meta.info}
        done = {step for step in there if metas[step]} - whole
        if done and self._queue is not None:
            for partition in tuple(self._partitions):
                tags = self._queue.list(partition).values()
                done -= {tag.get(GLOBAL_STEPS) for tag in tags if tag.get(IS_PROMPT)}
        for step in done | whole:
            with contextlib.suppress(OSError):
                self._path(step).unlink()

    def name_contents(self, batch: BatchHandle) -> None:
        """Set what journals know prompts by, among those of the enclosing call of a stage.

        Its uid and the like count if a prompt has no other field.
        """
        calls = {role: name for role, name in enclosing.get({}).items() if name}
        for prompt in batch.prompts:
            try:
                (digest,) = digests_of([prompt.fields])
                if digest is None:
                    digest = fingerprint(prompt.fields, volatile=())
            except UnsupportedTypeError as error:
                batch.unjournaled = f"{error.where}: {error.what}"
                continue
            made = canonical({**calls, DO_SAMPLE: prompt.sampled})
            prompt.content = xxhash.xxh3_128_hexdigest(f"{digest} {made}".encode())

    def number(self, batch: BatchHandle) -> None:
        """Name prompts for the journal: by content, and by number among those of the step.

        A prompt that is submitted again has another number, in this run and in the next: a run
        never resumes what it has generated itself. A step that comes back too late is not
        journaled.
        """
        self._partitions.add(batch.partition)
        ledger = ledger_of(self._store.directory)
        with ledger.lock:  # dispatchers of one store may submit side by side
            if batch.step in ledger.journaled and batch.step not in ledger.copies:
                return
            ledger.copies[batch.step] = copies = ledger.copies.pop(batch.step, Counter())
            for old in list(ledger.copies)[:-_OPEN]:
                del ledger.copies[old]
            for prompt in batch.prompts:
                if prompt.content is not None:
                    prompt.journal_key = prompt.content, copies[prompt.content]
                    copies[prompt.content] += 1

    def resume(self, batch: BatchHandle) -> dict[str, dict[int, Journaled]]:
        """The sessions of `batch` that its journal holds, by uid and number."""
        journal, found = batch.journal, defaultdict[str, dict[int, Journaled]](dict)
        if journal is None:
            return found
        journaled = ledger_of(self._store.directory).journaled
        is_new = batch.step not in journaled  # else its journal holds sessions of this run, too
        journaled.add(batch.step)
        refused: Counter[str] = Counter()
        for prompt in batch.prompts:
            for session in sorted(prompt.open) if prompt.journal_key else ():
                key = (*(prompt.journal_key or ()), session)
                entry = Journaled.unpacked(journal.entries.get(key), prompt)
                if entry is not None:
                    why_not = self.why_not(entry, batch.step)
                    why_not = why_not or batch.needs.why_not(entry.rows, entry.lacks)
                    if not why_not:
                        found[prompt.uid][session] = entry
                        continue
                    refused[why_not] += 1
                journal.entries.pop(key, None)  # what is generated instead is journaled
        if count := sum(map(len, found.values())):
            text = "step %d: %d of %d sessions are resumed from %s"
            logger.info(text, batch.step, count, batch.report.sessions, journal.path)
        elif not refused and is_new and journal.entries:
            refused["they are of other prompts"] = len(journal.entries)
        for why_not, number in refused.items():
            logger.warning("%s: %d sessions are not resumed: %s", journal.path, number, why_not)
        return found

    def why_not(self, entry: Journaled, step: int) -> str | None:
        """Why a session is not resumed at `step`; None if it is.

        Rows that are tagged with the weights that sampled them are resumed only if the trainer
        could have sampled them now: by weights that it has had, and not too stale.
        """
        first, last = (
            [weights for tag in entry.tags if (weights := integer(tag.get(name))) is not None]
            for name in WEIGHT_TAGS
        )
        if not first or not last:
            return None
        now = f"sampled them, and those are of step {step - 1}"
        if max(last) >= step:
            return f"weights of step {max(last)} {now}"
        if self._max_span is not None and step - min(first) > self._max_span:
            more = f"more than {self._max_span} steps (max_off_policy_threshold)"
            return f"weights of step {min(first)} {now}: {more}"
        return None

    def of_worker(self, seconds: float) -> WorkerJournal:
        """The journal for workers."""
        return WorkerJournal(self._store.directory, self.identity, Appender(seconds))

    def _path(self, step: int) -> Path:
        return self._store.directory / journal_name(step)


def to_journal(job: Job) -> dict[Hashable, Any]:
    """What the dispatcher adds to the batch's journal: a session that is not in it."""
    prompt: Prompt = job.group
    journal = prompt.batch.journal
    if journal is None or prompt.journal_key is None or job.rows is None:
        return {}
    key = (*prompt.journal_key, job.session_id)
    if key in journal.entries:
        return {}
    lacks = prompt.batch.needs.lacking(job.rows)
    return {key: Journaled(job.rows, list(job.tags), prompt.uid, lacks).packed()}


@attrs.define(eq=False)
class WorkerJournal:
    """For a worker that writes its rows itself; it can be sent to another process."""

    _directory: Path
    _identity: Identity
    _appender: Appender

    async def add(
        self, session: Session, rows: list[dict[str, Any]], tags: Sequence[Mapping[str, Any]]
    ) -> None:
        """Append a finished session."""
        if session.prompt_key is not None:
            path = self._directory / journal_name(session.step)
            journal = SessionJournal(path, self._identity, read=False)
            key = (*session.prompt_key, session.session_id)
            entry = Journaled(rows, tags, session.uid).packed()
            await self._appender.append(journal, {key: entry})
            journal.close()
