"""A decorated function: each call is replayed, or runs the stage, whose result its role keeps."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary

from rlskip.batch.meta import is_validation
from rlskip.batch.row_fields import RowsError
from rlskip.config.skip import to_generate
from rlskip.errors import ConfigError, MissError, RlskipError
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.jobs.records import Recorder
from rlskip.jobs.served import Enclosing, Needs, enclosing
from rlskip.skip.call import Call, Stage, StepNotSetError
from rlskip.skip.role import Role

log = logging.getLogger(__name__)

_REMEDY = (
    "\n  -> free space there, or bound the dumps with skip.keep_last; make it writable for this "
    "user, or name another skip.dump_dir"
)
_MOST_ENDING_S = 60.0
# Of each event loop, which a forked child has none of, the last call of each role.
_latest: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, threading.Event]] = (
    WeakKeyDictionary()
)


def decorated(manager: Any, stage: Stage) -> Callable[..., Any]:
    """The decorated function of `stage`, whose role `manager` turns on or off."""
    func = stage.func
    if inspect.isasyncgenfunction(func) or inspect.isgeneratorfunction(func):
        raise UnsupportedTypeError("it is a generator", stage.name, "return a list at once")
    if stage.holder:
        stage.refuse_unknown_names([stage.holder])
    is_async = any(map(inspect.iscoroutinefunction, (func, getattr(func, "__call__", None))))  # noqa: B004
    wrap = _wrap_async if is_async else _wrap_sync
    return functools.wraps(func)(wrap(manager, stage))


def _wrap_sync(manager: Any, stage: Stage) -> Callable[..., Any]:
    func, role = stage.func, stage.role

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        skip = manager.skip_instances.get(role)
        if skip is None:
            manager._guard(role)
        call = None if skip is None else _eligible_call(manager, skip, stage, args, kwargs)
        if call is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        with call:
            if replayed := replay(skip, call):
                return replayed[0]
            with _running(skip, call):
                result = func(*call.args, **call.kwargs)
            if inspect.iscoroutine(result) or asyncio.isfuture(result):
                result.close() if inspect.iscoroutine(result) else result.cancel()
                what = f"it is a plain function, and returns a {type(result).__name__}"
                raise ConfigError(what, stage.name, "decorate the function that is `async def`")
            dump(skip, call, result)
            return result

    return wrapper


def _wrap_async(manager: Any, stage: Stage) -> Callable[..., Any]:
    """As `_wrap_sync`, with everything that may touch the disk in a thread."""
    func, role = stage.func, stage.role

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        skip = manager.skip_instances.get(role)
        if skip is None:
            manager._guard(role)
        call = None if skip is None else _eligible_call(manager, skip, stage, args, kwargs)
        if call is None:
            return await func(*args, **kwargs)
        with call:
            loop, look = asyncio.get_running_loop(), copy_context()
            # Threads may overtake one another, and equal calls are told apart by their order.
            latest, call.chosen = _latest.setdefault(loop, {}), threading.Event()
            call.before, latest[role] = latest.get(role), call.chosen
            call.at_end(call.chosen.set)
            find = functools.partial(look.run, replay, skip, call)
            replayed = await loop.run_in_executor(_lookers(os.getpid()), find)
            if replayed:
                return replayed[0]
            with _running(skip, call):
                result = await func(*call.args, **call.kwargs)
            dumping = asyncio.ensure_future(asyncio.to_thread(dump, skip, call, result))
            # Its error is retrieved, also where nobody awaits it any more.
            dumping.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.shield(dumping)
            except asyncio.CancelledError:  # once it has ended, what it dumped is known
                await asyncio.wait([dumping], timeout=_MOST_ENDING_S)
                raise
            return result

    return wrapper


def _eligible_call(
    manager: Any, skip: Role, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """The call, where the role may act on it; None where the stage just runs."""
    observes = False
    if stage.options:
        skip.check_options(stage)
        observes = skip.observes(stage)
    if (recorder := skip.recorder) is None:
        where = skip.local_config.dump_dir
        recorder = skip.recorder = Recorder(where, skip.role)
        run = {"run": os.path.relpath(skip.dumps.directory, where)} if skip.dumps else {}
        recorder.write("consulted", stage=stage.name, **run)
    if stage.step_of is not None:
        if (step := stage.step_of(*args, **kwargs)) is None:
            return None
        manager.set_step(step)
    if observes:
        step = -1 if manager.step is None else manager.step
        return Call(stage, args, kwargs, step, recorder.write, is_observed=True)
    if stage.role in manager._unlisted or skip.role in enclosing.get().calls:
        return None
    skip.was_listed = True
    call = Call(stage, args, kwargs, record=recorder.write)
    if is_validation(call.prompts) and not skip.serves_validation:
        return None
    is_own = skip.support_online_step
    own = skip.extract_step(*args, **kwargs) if is_own else None
    # At once: the loop may go on meanwhile, or before a thread looks for the dump of this call.
    with manager._moving:
        step, is_listed = own if is_own else manager.step, stage.role not in manager._unlisted
        call.visit = None if step is None else skip.visit(step)
    if step is None:
        remedy = "call SkipManager.set_step(step) in the training loop, before the stage"
        where, remedy = stage.no_step or (stage.name, remedy)
        raise StepNotSetError(f"skip.{stage.role} is enabled, but no step is set", where, remedy)
    call.step = step
    # Of the loop's step `set_step` has looked it up.
    is_listed = step in skip.local_config.steps if is_own else is_listed
    return call if is_listed else None


def replay(role: Role, call: Call) -> tuple[Any] | None:
    """What replaces the call, in a tuple; None: the stage runs."""
    from rlskip.store import DumpError, RankTimeoutError, TooLargeDumpError

    if call.is_observed:
        return None
    failure: Exception | None = None
    try:
        if role.find(call):
            result = role.replay(call)
            role.has_replayed = True
            call.record("hit", step=call.step, **call.facts)
            if role.figures is not None:
                role.figures.append(role.count(call, result, replayed=True))
            change = call.stage.on_replay
            return (result if change is None else change(result),)
    except (RankTimeoutError, TooLargeDumpError):  # a sound dump: no miss in silence
        raise
    except (DumpError, OSError, MemoryError) as error:
        failure = error
        log_unusable(role.role, call, error)
    call.record("miss", step=call.step)
    if role.local_config.on_miss == "error":
        reason = call.reason or getattr(failure, "what", "")
        for_call = f" for this call ({reason})" if reason else ""
        what = f"step {call.step} has no usable dump{for_call}, and the stage must not run"
        remedy = getattr(failure, "remedy", "") or (
            f"generate it once with {to_generate(role.role, role.local_config)}, or name other "
            f"steps than {call.step}; dumps are looked for in {role.local_config.dump_dir}"
        )
        raise MissError(what, f"skip.{role.role}.on_miss=error", remedy) from failure
    if role.before_stage is not None:
        role.before_stage(call)
    return None


def log_unusable(role: str, call: Call, error: BaseException) -> None:
    """Say why a dump that was found is not used."""
    what = "rlskip: role %s: step %d counts as a miss: %s"
    log.warning(what, role, call.step, str(error) or type(error).__name__)


@contextmanager
def _running(role: Role, call: Call) -> Iterator[None]:
    """While the stage runs: its own calls of the role (of its base class, say) are part of it."""
    calls, running = enclosing.get().calls, list[Enclosing]()
    if not call.is_observed:
        # By what a journal knows it: a call with other arguments resumes none of its sessions.
        digest = call.identity.digest(whole=True) if call.name else ""
        calls = {**calls, role.role: f"{call.name}-{digest}{call.again}" if call.name else ""}
        running = running if role.dumps is None else role.dumps.ledger.running
    call.needs = Needs(call.stage.lacks)
    here = Enclosing(call.step, calls, call.needs)
    token = enclosing.set(here)
    running.append(here)
    try:
        with call.timed():
            yield
    finally:
        running.remove(here)
        enclosing.reset(token)


def dump(role: Role, call: Call, result: Any) -> None:
    """Let the role keep `result`; if that fails, the rollouts reach the trainer.

    But RowsError is raised: the stage's description fits no dump of this run.
    """
    if role.figures is not None and not call.is_observed:
        role.figures.append(role.count(call, result, replayed=False))
    try:
        role.keep(call, result)
    except RowsError:
        raise
    except Exception as error:
        not_dumped(role, call, error)


def not_dumped(role: Role, call: Call, error: BaseException) -> None:
    """Count rollouts that could not be dumped; say why, and what helps, once for each kind."""
    call.record("lost", step=call.step)
    code = error.errno if isinstance(error, OSError) else None
    kind = f"{type(error).__name__} {code}"
    if kind in role.failures:
        log.debug("rlskip: step %d of role %s was NOT dumped: %s", call.step, role.role, error)
        return
    role.failures |= {kind}
    log.warning(
        "rlskip: step %d of role %s was NOT dumped, training goes on (said once; the summary of "
        "the job counts such steps): %s: %s%s",
        call.step, role.role, type(error).__name__, error, _REMEDY if code else "",
        exc_info=None if isinstance(error, RlskipError | OSError) else error,
    )  # fmt: skip


@functools.cache
def _lookers(process: int) -> ThreadPoolExecutor:
    """Threads of a process that look for dumps, and wait there for those of other jobs.

    They have none of asyncio's own, which are few: what the others wait for needs these, stages
    and the dumps of what they return.
    """
    return ThreadPoolExecutor(256, "rlskip-look")
