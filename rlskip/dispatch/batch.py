"""A batch: what a trainer has read into prompts, the handle to wait on, and what comes out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import attrs
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from rlskip.batch.columns import own, rows_of, select
from rlskip.batch.meta import plain
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch.scheduler import Job, SessionGroup
from rlskip.dispatch.sessions import BatchError, Session, as_failure, session_seed, text_of
from rlskip.jobs.served import Needs
from rlskip.keys import DO_SAMPLE, ROLLOUT_N, TRAIN, VAL, trajectory_key
from rlskip.queue.protocol import one_batch
from rlskip.queue.readiness import Partition, PromptOutcome

GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}  # for prompts with a false ``__do_sample__``


@attrs.define
class BatchReport:
    """The outcome of a batch, in numbers of its prompts and sessions; so far, while it runs.

    `resumed` sessions were taken from the journal, and count as succeeded; `failed` has the cause
    of each other one by uid and session id.
    """

    step: int
    partition: str
    prompts: int = 0
    sessions: int = 0
    resumed: int = 0
    succeeded: int = 0
    failed: dict[tuple[str, int], str] = attrs.field(factory=dict)
    attempts: int = 0

    @property
    def open(self) -> int:
        """How many sessions have not ended."""
        return self.sessions - self.succeeded - len(self.failed)


@attrs.define(eq=False)
class Group:
    """What the `n` sessions of the prompt `uid` of a `step` left.

    By session, `rows` has those of each one that succeeded (none if they are in a queue), and
    `failed` why each other one failed.
    """

    uid: str
    step: int
    n: int
    rows: dict[int, list[dict[str, Any]]] = attrs.field(factory=dict)
    failed: dict[int, str] = attrs.field(factory=dict)

    @property
    def running(self) -> bool:
        """Whether it lacks a session."""
        return len(self.rows) + len(self.failed) < self.n

    def outcome(self) -> PromptOutcome:
        """How errors and messages name it."""
        succeeded, failed = tuple(sorted(self.rows)), tuple(sorted(self.failed.items()))
        return PromptOutcome(self.uid, self.step, None, self.n, succeeded, failed)


@attrs.define(eq=False, kw_only=True)
class Prompt(SessionGroup):
    """One prompt of a batch; ``open`` holds the sessions that have no outcome yet."""

    batch: BatchHandle
    uid: str
    fields: Mapping[str, Any]  # taken from the batch once, for all its sessions
    sampling: Mapping[str, Any]
    sampled: bool  # or greedy
    info: Mapping[str, Any]
    journal_name: str | None = None
    packed: bytes | None = None  # for Ray's actors
    open: set[int]
    group: Group
    id: int = attrs.field(factory=itertools.count().__next__, init=False)

    def session(self, job: Job, seed: int) -> Session:
        """What the worker of an attempt is told."""
        return Session(
            uid=self.uid,
            session_id=job.session_id,
            n=self.n,
            attempt=job.attempt,
            seed=session_seed(seed, self.batch.step, self.prompt, job.session_id),
            partition=self.batch.partition,
            journal_name=self.journal_name,
            **self.info,
        )


class BatchHandle(Future[BatchReport]):
    """A submitted batch: wait for its :meth:`result`, or await it; ``report`` has it so far."""

    def __init__(self, groups: Any, step: int, validate: bool) -> None:
        super().__init__()
        self.step = step
        self.partition = VAL if validate else TRAIN
        self.report = BatchReport(step, self.partition)
        # Where calls find its groups: those that any call takes, or those of one call. None: rows
        # and markers go to the dispatcher's queue.
        self.within: Partition | None = None
        # Its prompts, until it ends: they know it, too, and what forms a circle is freed late.
        self.prompts: list[Prompt] = []
        self.found: list[Group] = []  # of its prompts
        # Holds the mark that its journal grows, if it has one.
        self.appending: contextlib.ExitStack | None = None
        self.needs = Needs()  # of the stage that submits it
        self.error: BaseException | None = None  # why it was given up
        self.released = False  # whether its uids are free, because calls find its groups no more
        self.stopped = ""  # why its sessions that have no outcome fail
        self.begun = threading.Event()  # set once its roots are in the queue, or cannot be
        self._groups = groups  # which run it

    def groups(self, timeout: float | None = None) -> list[Group]:
        """Wait as :meth:`result` does, and take the groups: ``collect()`` has them no more."""
        self.result(timeout)
        self._groups.release(self)
        for group in self.found:
            for session, rows in group.rows.items():
                group.rows[session] = [dict(row) for row in rows]
        return self.found

    def result(self, timeout: float | None = None) -> BatchReport:
        """Wait until every session has an outcome and, with a queue, its marker.

        Raises TimeoutError after `timeout` seconds, while the batch goes on; or what kept the batch
        from being written to the queue.
        """
        # Future.result() raises a class of its own before Python 3.11.
        if not wait([self], timeout).done:
            unended = f"{self.report.open} of {self.report.sessions} sessions"
            raise TimeoutError(f"step {self.step}: {unended} have not ended after {timeout:g} s")
        return super().result()

    def __await__(self) -> Generator[Any, None, BatchReport]:
        # A caller that stops waiting must not cancel it for the others.
        return asyncio.shield(asyncio.wrap_future(self)).__await__()

    def add_done_callback(self, call: Callable[..., object]) -> None:
        """As a Future's, on a thread of its own, where it may use the dispatcher."""
        super().add_done_callback(
            lambda its: threading.Thread(target=call, args=(its,), daemon=True).start()
        )

    def cancel(self) -> bool:
        """Stop its sessions: each one without an outcome fails, and ``collect()`` has none."""
        self._groups.cancel(self)
        return False  # it has a report all the same


def read_batch(
    prompts: TensorDictBase | Sequence[Mapping[str, Any]],
    config: DispatchConfig,
    groups: Any,
    step: int | None,
    validate: bool | None,
) -> BatchHandle:
    """Read what ``RolloutDispatcher.submit`` takes; raises :class:`BatchError`."""
    if isinstance(prompts, TensorDictBase) and prompts.batch_dims != 1:
        raise BatchError(f"batch size {tuple(prompts.batch_size)}", remedy="expected (prompts,)")
    where, rows = "", rows_of(prompts)
    try:
        samples = [{(where := str(k)): own(value) for k, value in row.items()} for row in rows]
    except Exception as error:
        what = f"a prompt cannot be copied: {text_of(as_failure(error))}"
        raise BatchError(what, where, "leave this field out of the batch") from error
    if not samples:
        remedy = "pass a TensorDict of batch size (prompts,), or a list of one mapping per prompt"
        raise BatchError("the batch has no prompts", remedy=remedy)
    step = step_number(_common("global_steps", samples) if step is None else step)
    validate = bool(_common("validate", samples, False)) if validate is None else validate
    index = [sample.get("index", i) for i, sample in enumerate(samples)]
    infos = build_trajectory_info(step, index, validate)
    batch = BatchHandle(groups, step, validate)
    usual = dict((config.val_sampling if validate else config.sampling) or {})
    greedy = {**usual, **GREEDY}
    for i, (sample, info) in enumerate(zip(samples, infos, strict=True)):
        sample.pop("validate", None)
        own_n = sample.pop(ROLLOUT_N, None)
        n = (config.val_n if validate else config.n) if own_n is None else _whole(own_n)
        sampled = bool(sample.pop(DO_SAMPLE, True)) or validate
        if n is None or n < 1:
            raise BatchError(f"{own_n!r} sessions for prompt {i}", ROLLOUT_N, "set at least one")
        uid = str(plain(sample.get("uid", "")))
        if uid in ("", "None"):
            raise BatchError(f"prompt {i} has no uid", "uid", "add a field that names each prompt")
        batch.found.append(Group(uid, step, n))
        batch.prompts.append(
            Prompt(
                prompt=i,
                prompts=len(samples),
                n=n,
                batch=batch,
                uid=uid,
                open=set(range(n)),
                group=batch.found[-1],
                fields=sample,
                sampling=usual if sampled else greedy,
                sampled=sampled,
                info=info,
            )
        )
    twice = [uid for uid, count in Counter(p.uid for p in batch.prompts).items() if count > 1]
    if twice:
        raise BatchError(f"duplicate uids: {', '.join(twice[:10])}", "uid")
    batch.report.prompts = len(samples)
    batch.report.sessions = sum(prompt.n for prompt in batch.prompts)
    return batch


def joined(groups: Sequence[Group], partition: str, fill_missing: bool) -> TensorDict:
    """Groups as :func:`one_batch`, by group, session and index, with uid and session_id."""
    by_key: dict[str, Any] = {}
    uids: list[NonTensorData] = []
    sessions: list[int] = []
    for group in groups:
        uid = NonTensorData(group.uid)  # one a prompt: one a row takes longer than all else here
        for session, rows in sorted(group.rows.items()):
            for i, row in enumerate(rows):
                by_key[trajectory_key(group.uid, session, i)] = row
                uids.append(uid)
                sessions.append(session)
    if fill_missing and any("uid" in row or "session_id" in row for row in by_key.values()):
        for row, its, session in zip(by_key.values(), uids, sessions, strict=True):
            row.setdefault("uid", its.data)
            row.setdefault("session_id", torch.tensor(session))
    batch = one_batch(by_key, partition, fill_missing, own=True)
    if "uid" not in batch:
        batch["uid"] = NonTensorStack(*uids)
    if "session_id" not in batch:
        batch["session_id"] = torch.tensor(sessions)
    return batch


def extract_sample(batch: Any, i: int) -> dict[str, Any]:
    """Return sample `i` of a batch as a plain dict that shares no memory with it.

    `batch` is a TensorDict of batch size ``(prompts,)``, a mapping of columns, or one mapping per
    prompt. Tensors come without the batch dimension, batch-wide data (NonTensorData) in every
    sample. A view would carry the storage of the whole batch through every serialisation.
    """
    (row,) = rows_of(select(batch, [i]))
    return {str(key): own(value) for key, value in row.items()}


def build_trajectory_info(step: Any, index: Any, validate: Any) -> list[dict[str, Any]]:
    """Name each prompt of a batch in plain Python scalars.

    `step` is a number, or a tensor or array of one; `index` each prompt's number in the data set, a
    tensor, an array or a list. Returns dicts with ``step``, ``sample_index``, ``rollout_n`` (0 for
    an index that differs from the one before, else one more) and ``validate``.
    """
    step, validate = plain(step), bool(plain(validate))
    info: list[dict[str, Any]] = []
    for i in map(plain, plain(index)):
        again = bool(info) and info[-1]["sample_index"] == i
        number = info[-1]["rollout_n"] + 1 if again else 0
        info += [{"step": step, "sample_index": i, "rollout_n": number, "validate": validate}]
    return info


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many tokens were generated, by the response masks, else by the responses; 0: unknown."""
    tokens = 0
    for row in rows:
        mask, responses = row.get("response_mask"), row.get("responses")
        with contextlib.suppress(BaseException):  # fields of these names may hold anything
            if mask is not None:
                tokens += int(mask.sum() if hasattr(mask, "sum") else sum(mask))
            elif responses is not None:
                tokens += len(responses)
    return tokens


def step_number(step: Any) -> int:
    """The trainer's step as an int; raises :class:`BatchError`."""
    if step is None:
        remedy = "pass step=... or add the field to the batch"
        raise BatchError("no step is given", "global_steps", remedy)
    number = _whole(step)
    if number is None:
        raise BatchError(f"expected a whole number, got {step!r:.100}", "global_steps")
    return number


def _common(name: str, samples: Sequence[Mapping[str, Any]], usual: Any = None) -> Any:
    """What all prompts of a batch have in a field: `usual` where they have none."""
    values = [plain(sample.get(name, usual)) for sample in samples]
    if odd := [i for i, value in enumerate(values) if value != values[0]]:
        what = f"prompt {odd[0]} has {values[odd[0]]!r}, and prompt 0 has {values[0]!r}"
        raise BatchError(what, name, "submit the prompts of each in a batch of their own")
    return values[0]


def _whole(value: Any) -> int | None:
    """A number without a fraction, of any type, as an int; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = int(value)
        return number if number == value else None
    return None
