"""Resuming a step that was interrupted, from its journal; and when journals go.

A journal is removed once

- the dump of its step is there,
- a later step is submitted, or a batch was sampled: a dump may be that of another call, and
- no prompt of its step is in the queue any more, where groups are sampled one by one.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any

import attrs
import xxhash

from rlskip.batch.meta import plain
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.journal import Journaled, SessionJournal, WorkerJournal
from rlskip.dispatch.pools import returned
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import text_of
from rlskip.dispatch.timeouts import failure_of, in_thread
from rlskip.format.prompt_digests import digests_of
from rlskip.jobs.served import enclosing, ledger_of
from rlskip.keys import DO_SAMPLE, GLOBAL_STEPS, IS_PROMPT, TRAIN, WEIGHT_TAGS, integer
from rlskip.queue import TrajectoryQueue
from rlskip.store import Identity, StepStore, UnsupportedTypeError, fingerprint
from rlskip.store.comparable import canonical
from rlskip.store.layout import journal_name, journaled_steps

logger = logging.getLogger(__name__)

_OPEN = 8  # steps whose batches may run at once


def journal_identity(identity: Identity, config: DispatchConfig) -> Identity:
    """What sessions depend on besides their prompts: `identity` and parts of `config`."""
    sampling = {f"sampling.{name}": value for name, value in (config.sampling or {}).items()}
    return identity.adding({"n": config.n, **sampling, "dispatch.seed": config.seed})


class Journals:
    """The journals of a run, next to the dumps of its `store`.

    Sessions of another `identity` are not resumed, nor those that span more than `max_span` steps,
    from the first that their weights could generate to the one that resumes them: 1 is on-policy,
    None any number. `queue` is where the prompts are; None: in memory, until they are taken.
    """

    def __init__(
        self,
        store: StepStore,
        identity: Identity,
        queue: TrajectoryQueue | None,
        max_span: int | None = None,
    ) -> None:
        self.written = WorkerJournal(store.directory, identity)
        self._store = store
        self._queue = queue
        self._max_span = max_span

    def of_worker(self) -> WorkerJournal:
        """The journal for workers."""
        return attrs.evolve(self.written)

    def name(self, batch: BatchHandle) -> None:
        """Set what the journal knows prompts by: content and call, and number among the step's.

        The call is the enclosing one of a stage. A uid and the like count if a prompt has no other
        field. A prompt that is submitted again has another number, in this run and in the next: a
        run never resumes what it has generated itself.
        """
        calls = {role: name for role, name in enclosing.get({}).items() if name}
        contents: dict[Prompt, str] = {}
        for prompt in batch.prompts:
            try:
                (digest,) = digests_of([prompt.fields])
                digest = digest or fingerprint(prompt.fields, volatile=())
            except UnsupportedTypeError as error:
                self.written.warn(f"step {batch.step}", f"{error.where}: {error.what}")
                continue
            made = canonical({**calls, DO_SAMPLE: prompt.sampled})
            contents[prompt] = xxhash.xxh3_128_hexdigest(f"{digest} {made}".encode())
        ledger = ledger_of(self._store.directory)
        with ledger.lock:  # dispatchers of one store may submit side by side
            if batch.step in ledger.journaled and batch.step not in ledger.copies:
                return  # it comes back too late, and is not journaled
            ledger.copies[batch.step] = copies = ledger.copies.pop(batch.step, Counter())
            for old in list(ledger.copies)[:-_OPEN]:
                del ledger.copies[old]
            for prompt, content in contents.items():
                prompt.journal_key = content, copies[content]
                copies[content] += 1

    async def resume(self, batch: BatchHandle) -> dict[str, dict[int, Journaled]]:
        """Open the step's journal for a batch; returns its sessions there, by uid and number."""
        opened = in_thread(self._open, batch.step)
        if error := await failure_of(opened, timeouts.WRITE_S, "the disk"):
            self.written.warn(f"step {batch.step}", text_of(error))
            return {}
        batch.journal = journal = opened.result()
        journaled = ledger_of(self._store.directory).journaled
        is_new = batch.step not in journaled  # else its journal holds sessions of this run, too
        journaled.add(batch.step)
        found = defaultdict[str, dict[int, Journaled]](dict)
        refused: Counter[str] = Counter()
        for prompt in batch.prompts:
            for session in sorted(prompt.open) if prompt.journal_key else ():
                key = (*(prompt.journal_key or ()), session)
                if (entry := _read(journal.entries.get(key), prompt)) is None:
                    continue
                why_not = self._why_not(entry, batch.step)
                if why_not := why_not or batch.needs.why_not(entry.rows, entry.lacks):
                    refused[why_not] += 1
                else:
                    found[prompt.uid][session] = entry
        if count := sum(map(len, found.values())):
            text = "step %d: %d of %d sessions are resumed from %s"
            logger.info(text, batch.step, count, batch.report.sessions, journal.path)
        elif not refused and is_new and journal.entries:
            refused["they are of other prompts"] = len(journal.entries)
        for cause, number in refused.items():
            logger.warning("%s: %d sessions are not resumed: %s", journal.path, number, cause)
        return found

    def _open(self, step: int) -> SessionJournal:
        self.tidy(before=step)
        return SessionJournal(self._store.directory / journal_name(step), self.written.identity)

    def _why_not(self, entry: Journaled, step: int) -> str | None:
        """Why a session is not resumed at `step`; None if it is.

        Rows that are tagged with the weights that sampled them are resumed only if the trainer
        could have sampled them now: by weights that it has had, and not too stale.
        """
        first, last = (
            [weights for tag in entry.tags if (weights := integer(tag.get(name))) is not None]
            for name in WEIGHT_TAGS
        )
        now = f"sampled them, and those are of step {step - 1}"
        if last and max(last) >= step:
            return f"weights of step {max(last)} {now}"
        if first and self._max_span is not None and step - min(first) > self._max_span:
            more = f"more than {self._max_span} steps (max_off_policy_threshold)"
            return f"weights of step {min(first)} {now}: {more}"
        return None

    def tidy(self, before: float = math.inf) -> None:
        """Remove the journals that are done with, of steps `before` this one."""
        there = [step for step in journaled_steps(self._store.directory) if step < before]
        metas = {step: self._store.read_meta(step) for step in there}
        # Of a queue's step single groups are dumped: others of it may still be generated.
        whole = {step for step, meta in metas.items() if meta and "groups" not in meta.info}
        done = {step for step in there if metas[step]} - whole
        if done and self._queue is not None:
            tags = self._queue.list(TRAIN).values()
            done -= {tag.get(GLOBAL_STEPS) for tag in tags if tag.get(IS_PROMPT)}
        for step in done | whole:
            with contextlib.suppress(OSError):
                (self._store.directory / journal_name(step)).unlink()


def _read(entry: Any, prompt: Prompt) -> Journaled | None:
    """A session of `prompt`; rows that name the earlier prompt's uid name its.

    None for what is not one: a file may hold anything.
    """
    with contextlib.suppress(Exception):
        found = Journaled(*entry)
        if returned(found.rows) and len(found.tags) in (0, len(found.rows)):
            for row in found.rows:
                if "uid" in prompt.fields and str(plain(row.get("uid"))) == found.uid:
                    is_text = isinstance(row["uid"], str)
                    row["uid"] = prompt.uid if is_text else prompt.fields["uid"]
            return found
    return None


def to_journal(job: Job) -> dict[Hashable, Any]:
    """What the dispatcher journals of a session: nothing of one that failed, or is there."""
    prompt: Prompt = job.group
    if prompt.journal_key is None or job.rows is None or job.is_resumed:
        return {}
    lacks = prompt.batch.needs.lacking(job.rows)
    entry = Journaled(job.rows, job.tags, prompt.uid, lacks)
    return {(*prompt.journal_key, job.session_id): entry.packed()}
