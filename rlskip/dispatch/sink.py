"""What a batch and its sessions leave outside the process, and what a killed step takes back.

Sessions go to a queue, and to the step's journal, which is removed once

- the dump of its step is there,
- a later step is submitted, or a batch was sampled: a dump may be that of another call, and
- no prompt of its step is in the queue any more, where groups are sampled one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any

import xxhash

from rlskip import keys as names
from rlskip.batch.meta import plain
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.journal import Journaled, JournalWriter, read_sessions
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    BatchError,
    NoAnswerError,
    as_failure,
    cause_of,
    returned,
    text_of,
)
from rlskip.format.fingerprint import canonical
from rlskip.format.prompt_digests import digests_of
from rlskip.jobs.ranks import shard
from rlskip.jobs.served import ledger_of
from rlskip.queue import TrajectoryQueue
from rlskip.store import Identity, StepStore, UnsupportedTypeError, dump, fingerprint
from rlskip.store.layout import journal_name, journaled_steps

logger = logging.getLogger(__name__)

_MOST = 1024  # sessions of one write
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
        # For workers, too, which may be in other processes.
        self.writer = JournalWriter(store.directory, identity)
        self._store = store
        self._queue = queue
        self._max_span = max_span

    def name(self, batch: BatchHandle) -> None:
        """Set what journals know prompts by: step, content, call and rank, and number in the step.

        The call is the enclosing one of a stage. A uid and the like count if a prompt has no other
        field. A prompt that is submitted again has another number, in this run and in the next: a
        run never resumes what it has generated itself.
        """
        ledger, calls = ledger_of(self._store.directory), dict[str, str]()
        if len(callers := ledger.callers(batch.step)) > 1:
            what = "calls of a stage run, and the thread that submits is none of theirs"
            remedy = "copy the context of the call (contextvars.copy_context().run)"
            self.writer.warn(f"step {batch.step}", f"{len(callers)} {what}: {remedy}")
            return
        for caller in callers:
            batch.needs = caller.needs
            calls = {role: name for role, name in caller.calls.items() if name}
        # Ranks that sample the same prompts share the journal, and each has draws of its own.
        of_rank = {"rank": rank} if (rank := self._store.rank or shard()[0]) else {}
        contents: dict[Prompt, str] = {}
        for prompt in batch.prompts:
            try:
                (digest,) = digests_of([prompt.fields])
                digest = digest or fingerprint(prompt.fields, volatile=())
            except UnsupportedTypeError as error:
                self.writer.warn(f"step {batch.step}", f"{error.where}: {error.what}")
                continue
            made = canonical({**calls, **of_rank, names.DO_SAMPLE: prompt.sampled})
            contents[prompt] = xxhash.xxh3_128_hexdigest(f"{digest} {made}".encode())
        with ledger.lock:  # dispatchers of one store may submit side by side
            if batch.step in ledger.journaled and batch.step not in ledger.copies:
                return  # it comes back too late, and is not journaled
            ledger.copies[batch.step] = copies = ledger.copies.pop(batch.step, Counter())
            for old in list(ledger.copies)[:-_OPEN]:
                del ledger.copies[old]
            for prompt, content in contents.items():
                # Sessions that a group has which served: this prompt asks for other draws.
                while ledger.served[name := f"{batch.step}-{content}-{copies[content]}"]:
                    copies[content] += 1
                prompt.journal_name = name
                copies[content] += 1

    async def resume(self, batch: BatchHandle) -> dict[str, dict[int, Journaled]]:
        """Open the step's journal for a batch; returns its sessions there, by uid and number."""
        opened = timeouts.in_thread(self._open, batch.step)
        if error := await timeouts.failure_of(opened, timeouts.WRITE_S, "the disk"):
            self.writer.warn(f"step {batch.step}", text_of(error))
            for prompt in batch.prompts:
                prompt.journal_name = None
            return {}
        batch.appending, entries = opened.result()
        journaled = ledger_of(self._store.directory).journaled
        is_new = batch.step not in journaled  # else its journal holds sessions of this run, too
        journaled.add(batch.step)
        found = defaultdict[str, dict[int, Journaled]](dict)
        refused: Counter[str] = Counter()
        for prompt in batch.prompts:
            for session in sorted(prompt.open):
                its = entries.get((prompt.journal_name, session))
                if (entry := _read(its, prompt)) is None:
                    continue
                if why_not := self._why_not(entry, batch):
                    refused[why_not] += 1
                else:
                    found[prompt.uid][session] = entry
        path = self._store.directory / journal_name(batch.step)
        if count := sum(map(len, found.values())):
            text = "rlskip: step %d: %d of %d sessions are resumed from %s"
            logger.info(text, batch.step, count, batch.report.sessions, path)
        elif not refused and is_new and entries:
            refused["they are of other prompts"] = len(entries)
        for cause, number in refused.items():
            text = "rlskip: %s: %d sessions are not resumed: %s"
            logger.warning(text, path, number, cause)
        return found

    def _open(self, step: int) -> tuple[contextlib.ExitStack, dict[Hashable, Any]]:
        self.tidy(before=step)
        directory = self._store.directory
        with contextlib.ExitStack() as appending:
            # The mark first: `rlskip prune` looks for it just before it removes an old journal. One
            # that had looked already takes the file; the next append begins another one.
            appending.enter_context(dump.appending(directory, step))
            entries = read_sessions(directory / journal_name(step), self.writer.identity)
            return appending.pop_all(), entries

    def _why_not(self, entry: Journaled, batch: BatchHandle) -> str | None:
        """Why a session is not resumed in a batch; None if it is.

        Rows that are tagged with the weights that sampled them are resumed only if the trainer
        could have sampled them now: by weights that it has had, and not too stale.
        """
        first, last = (
            [weights for tag in entry.tags if (weights := names.integer(tag.get(name))) is not None]
            for name in names.WEIGHT_TAGS
        )
        step = batch.step
        now = f"sampled them, and those are of step {step - 1}"
        if last and max(last) >= step:
            return f"weights of step {max(last)} {now}"
        if first and self._max_span is not None and step - min(first) > self._max_span:
            more = f"more than {self._max_span} steps (max_off_policy_threshold)"
            return f"weights of step {min(first)} {now}: {more}"
        return batch.needs.why_not(entry.rows, entry.lacks)

    def tidy(self, before: float = math.inf) -> None:
        """Remove the journals that are done with, of steps `before` this one."""
        there = [step for step in journaled_steps(self._store.directory) if step < before]
        metas = {step: self._store.read_meta(step) for step in there}
        # Of a queue's step single groups are dumped: others of it may still be generated.
        whole = {step for step, meta in metas.items() if meta and "groups" not in meta.info}
        done = {step for step in there if metas[step]} - whole
        if done and self._queue is not None:
            tags = self._queue.list(names.TRAIN).values()
            done -= {tag.get(names.GLOBAL_STEPS) for tag in tags if tag.get(names.IS_PROMPT)}
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
    """What the dispatcher journals of a session: nothing of one that failed, or was resumed."""
    prompt: Prompt = job.group
    if prompt.journal_name is None or job.rows is None or job.worker < 0:
        return {}
    lacks = prompt.batch.needs.lacking(job.rows)
    entry = Journaled(job.rows, job.tags, prompt.uid, lacks)
    return {(prompt.journal_name, job.session_id): entry.packed()}


class Sink:
    """The only writer of a dispatcher: it writes from a thread, each time within ``WRITE_S``.

    A write that takes longer is given up; nothing more is written until it returns. While one
    runs, what is to be written next gathers, so the number of writes depends on how long they take
    and not on the number of sessions.
    """

    def __init__(
        self,
        queue: TrajectoryQueue | None,
        journals: Journals | None,
        written: Callable[[Job, Exception | None], object],
    ) -> None:
        self._written = written
        self._queue: Any = queue  # which is there for batches that have a sink
        self._journals: Any = journals  # as well
        # `_writing` runs while something is gathered, and is None otherwise. What was gathered is
        # written in this order, and `_written` called once for each, with what kept its marker out.
        self._gathered: deque[Job] = deque()
        self._writing: asyncio.Task[None] | None = None
        # The roots of one batch and the sessions of others are put one after the other: a second
        # put beside one that the queue does not answer would hang as well, in a further thread.
        self._one = asyncio.Lock()
        self._put: asyncio.Future[None] | None = None  # the last one

    async def check(self, batch: BatchHandle) -> None:
        """Refuse a prompt of which the queue has sessions: those of two would be mixed."""
        keys = {*await timeouts.in_thread(self._queue.list, batch.partition, name="rlskip-queue")}
        uids = {prompt.uid: names.uid_of(prompt.uid) for prompt in batch.prompts}
        if held := uids.keys() & {names.uid_of(key) for key in keys}:
            raise BatchError(
                f"the queue still holds earlier prompts of the uids {', '.join(sorted(held)[:10])}",
                "uid",
                "clear() what was sampled, or evict() them, or give each a uid of its own",
            )
        for uid, of in uids.items():
            if of in keys or of in uids:
                raise BatchError(
                    f"the uid {uid!r} is a key of a session of the prompt {of!r}",
                    "uid",
                    "give it one that does not end in _sess0, or in _0_0, after another's uid",
                )

    async def open(self, batch: BatchHandle) -> dict[str, dict[int, Journaled]]:
        """Open the batch's journal, and write its roots; returns the sessions that are resumed."""
        is_journaled = any(prompt.journal_name for prompt in batch.prompts)
        resumed = await self._journals.resume(batch) if is_journaled else {}
        if batch.within is None:
            roots = {p.uid: names.prompt_tag(batch.step, p.n) for p in batch.prompts}
            for prompt in batch.prompts:
                roots[prompt.uid][names.EXPECTED_ROLLOUTS] = prompt.n
                if prompt.journal_name is not None:
                    roots[prompt.uid][names.JOURNAL_NAME] = prompt.journal_name
            if error := await self._try(self._put_tags, {batch.partition: roots}):
                raise error
        return resumed

    def write(self, job: Job) -> None:
        """Write a session that has ended, soon, and after all that ended before."""
        self._gathered.append(job)
        if self._writing is None:  # a task begins in the next turn: what else comes in this, joins
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._gathered:
            jobs = [self._gathered.popleft() for _ in range(min(len(self._gathered), _MOST))]
            entries: dict[int, dict[Hashable, Any]] = defaultdict(dict)
            for job in jobs:
                entries[job.group.batch.step].update(to_journal(job))
            for step, found in entries.items():
                if found:
                    await self._journals.writer.append(step, found)
            queued = [job for job in jobs if job.group.batch.within is None]
            error = await self._try(self._put_all, queued) if queued else None
            for job in jobs:
                again = error is not None and job.group.batch.within is None
                self._written(job, await self._put_alone(job) if again else None)
        self._writing = None

    async def _put_alone(self, job: Job) -> Exception | None:
        """What the queue refuses of one session must not keep out the others, nor its marker."""
        error = await self._try(self._put_all, [job])
        if error is not None and not job.error:
            job.rows = None
            job.error = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("rlskip: %s failed: %s", job, job.error)
            if not isinstance(error, NoAnswerError):  # else it may have both yet
                error = await self._try(self._put_all, [job])
        return error

    async def _try(self, put: Callable[[Any], None], what: Any) -> Exception | None:
        """Write something; returns what the queue raised, or that it did not answer."""
        async with self._one:
            if self._put is not None and not self._put.done():  # it had its time
                return NoAnswerError(f"the queue did not answer within {timeouts.WRITE_S:g} s")
            self._put = timeouts.in_thread(put, what, name="rlskip-queue")
            return await timeouts.failure_of(self._put, timeouts.WRITE_S, "the queue")

    def _put_all(self, jobs: list[Job]) -> None:
        # Rows are grouped by their fields, because a put takes rows of the same fields. Readers see
        # a session's marker after its rows.
        rows: dict[Any, tuple[list[str], list[Any], list[Any]]] = defaultdict(lambda: ([], [], []))
        markers: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for job in jobs:
            batch, uid, session = job.group.batch, job.group.uid, job.session_id
            # Rows that are returned are written once, here. A worker that writes its own (those it
            # journaled have tags) may still write for an attempt that was given up.
            attempt = job.attempt if job.rows is None or job.tags else 0
            tag = names.row_tag(batch.step, attempt)
            for i, row in enumerate(job.rows or ()):
                keys, fields, tags = rows[batch.partition, tuple(row)]
                index = attempt * names.ROWS_PER_ATTEMPT + i
                keys.append(names.trajectory_key(uid, session, index))
                fields.append(row)
                tags.append({**job.tags[i], **tag} if job.tags else tag)
            count = None if job.rows is None else len(job.rows)
            marker = names.session_tag(session, attempt, job.error or None, count)
            markers[batch.partition][names.session_key(uid, session)] = marker
        for (partition, _), (keys, fields, tags) in rows.items():
            self._queue.put(keys, partition, fields, tags)
        self._put_tags(markers)

    def _put_tags(self, tags: dict[str, dict[str, dict[str, Any]]]) -> None:
        for partition, by_key in tags.items():
            self._queue.put(list(by_key), partition, tags=list(by_key.values()))
