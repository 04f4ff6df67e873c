"""One call between the manager and its role: replay, else run the stage and keep its result."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

from rlskip.errors import MissError, RlskipError
from rlskip.skip.call import Call
from rlskip.skip.role import Role

log = logging.getLogger(__name__)

# Roles whose stage encloses the present call.
inside: ContextVar[frozenset[str]] = ContextVar("rlskip_inside", default=frozenset())


_FULL = "\n  -> free space there, or bound the dumps with skip.keep_last or skip.max_size"
_FORBIDDEN = "\n  -> make it writable for this user, or name another skip.dump_dir"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN),
}


class Miss:
    """What `replay` returns when no dump replaces the call.

    A class, because joblib and submitit copy a decorated function of ``__main__`` by value: a
    plain object would arrive in their workers as another object.
    """


def replay(role: Role, call: Call) -> Any:
    """What replaces the call, or `Miss`."""
    from rlskip.store import DumpError, RankTimeoutError

    if role.observes(call.stage):
        return Miss
    failure: Exception | None = None
    try:
        if role.find(call):
            result = role.replay(call)
            call.record("hit", step=call.step, **call.facts)
            return result
    except RankTimeoutError:
        raise
    except (DumpError, OSError, MemoryError) as error:
        failure = error
        log.warning(
            "rlskip: role %s: step %d counts as a miss: %s",
            role.role, call.step, str(error) or type(error).__name__,
        )  # fmt: skip
    call.record("miss", step=call.step)
    if role.local_config.on_miss == "error":
        reason = call.reason or getattr(failure, "what", "")
        for_call = f" for this call ({reason})" if reason else ""
        remedy = (
            f"generate it once with skip.on_miss=generate, or name other steps than {call.step}; "
            f"dumps are looked for in {role.local_config.dump_dir}"
        )
        raise MissError(
            f"step {call.step} has no usable dump{for_call}, and the stage must not run",
            f"skip.{role.role}.on_miss=error",
            getattr(failure, "remedy", "") or remedy,
        ) from failure
    role.before_stage(call)
    return Miss


def dump(role: Role, call: Call, result: Any) -> None:
    """Let the role keep `result`; if that fails, the rollouts reach the trainer."""
    try:
        role.keep(call, result)
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
    role.failures.add(kind)
    log.warning(
        "rlskip: step %d of role %s was NOT dumped, training goes on (said once; the summary of "
        "the job counts such steps): %s: %s%s",
        call.step, role.role, type(error).__name__, error, _REMEDIES.get(code or 0, ""),
        exc_info=None if isinstance(error, RlskipError | OSError) else error,
    )  # fmt: skip


@contextmanager
def running(role: Role, call: Call) -> Iterator[None]:
    """While the stage runs: its own calls of the role (of its base class, say) are part of it."""
    roles = inside.get()
    token = inside.set(roles if role.observes(call.stage) else roles | {role.role})
    try:
        with call.timed():
            yield
    finally:
        inside.reset(token)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """As `asyncio.to_thread`; where no thread can be started, the event loop is held instead."""
    outcome: Future[Any] = Future()
    begun = threading.Lock()
    context = copy_context()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        # A thread that nobody awaits any more still does its work.
        awaited = outcome.set_running_or_notify_cancel()
        try:
            result = context.run(function, *args)
        except BaseException as error:
            if awaited:
                outcome.set_exception(error)
        else:
            if awaited:
                outcome.set_result(result)

    try:
        asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError:  # the call is queued nevertheless: whichever comes first runs it
        run()
    return await asyncio.wrap_future(outcome)


def run_of(role: Role) -> dict[str, str]:
    """For the records: the role's directory relative to its dump_dir, where it has one."""
    if role.directory is None:
        return {}
    return {"run": os.path.relpath(role.directory, role.local_config.dump_dir)}
