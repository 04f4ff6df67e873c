"""Policies: where a waiting session goes, and when.

A policy is one function from what is known of a session (:class:`Waiting`) to its place
(:class:`Place`). It is called when a session starts to wait, and for the next session of a
group again whenever one of its siblings was handed out or has finished.

>>> def easy_prompts_first(session: Waiting) -> Place:
...     return Place(rank=session.expected or 0.0)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import attrs

from rlskip.config.check import did_you_mean
from rlskip.errors import ConfigError


@attrs.frozen
class Waiting:
    """What a policy may know of a session that waits.

    Parameters
    ----------
    prompt, prompts
        The position of its prompt in the batch, and how many prompts the batch has.
    session, n
        The session's id, and how many sessions its prompt gets.
    number
        How many sessions came before it, over all batches.
    workers
        How many workers there are.
    started
        How many sessions of its prompt have been handed out before.
    expected
        The mean length of the prompt's sessions, as far as they have finished or the history
        knows them; None when nothing is known.
    """

    prompt: int
    prompts: int
    session: int
    n: int
    number: int
    workers: int
    started: int
    expected: float | None


@attrs.frozen
class Place:
    """Where a session is to run, and its turn.

    Parameters
    ----------
    worker
        The one worker that may take it (another, when that one is lost); None for any: the
        worker with the fewest sessions in hand.
    rank
        Of the sessions that a worker may take, the lowest goes first; equal ones in order of
        arrival.
    """

    worker: int | None = None
    rank: float = 0.0


Policy = Callable[[Waiting], Place]

_ANYWHERE = Place()


def chunk(session: Waiting) -> Place:
    """The batch in as many runs of prompts as there are workers: a prompt stays on one."""
    return Place(worker=session.prompt * session.workers // session.prompts)


def round_robin(session: Waiting) -> Place:
    """Session after session to worker after worker; the next batch goes on where this ended."""
    return Place(worker=session.number % session.workers)


def least_loaded(session: Waiting) -> Place:
    """Whoever has a free slot takes the next session."""
    return _ANYWHERE


def longest_first(session: Waiting) -> Place:
    """The longest expected sessions first, so that none starts late and ends last.

    Of a prompt of which nothing is known, one session probes, before all else. While a probe
    runs on, its prompt counts as longer than any that is known: it outlives their probes.
    """
    if session.expected is not None:
        return Place(rank=-session.expected)
    return Place(rank=-math.inf if session.started == 0 else -1e300)


POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (chunk, round_robin, least_loaded, longest_first)
}


def find_policy(name: str) -> Policy:
    """The policy called `name`, or the function that ``package.module:function`` names.

    Raises
    ------
    ConfigError
        There is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError(
            f"there is no policy {name!r}",
            "dispatch.policy",
            f"{did_you_mean(name, POLICIES)}; your own is package.module:function",
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}", "dispatch.policy") from error
    if not callable(found):
        raise ConfigError(f"{name!r} is no function", "dispatch.policy")
    return found  # type: ignore[no-any-return]
