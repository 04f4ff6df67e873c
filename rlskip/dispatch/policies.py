"""Policies: where a pending session runs, and when.

A policy is a function from a :class:`PendingSession` to a :class:`Placement`. It is called when
a session starts to wait, and for its rank again before it runs: other sessions of its prompt have
finished by then.

>>> def easy_prompts_first(session: PendingSession) -> Placement:
...     return Placement(rank=session.expected or 0.0)
"""

from __future__ import annotations

import contextlib
import math
import operator
import pkgutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rlskip.config.check import did_you_mean
from rlskip.errors import ConfigError
from rlskip.store import UnsupportedTypeError, fingerprint


@attrs.frozen
class PendingSession:
    """A session that waits, as policies see it.

    Its prompt's position in the batch and the batch's number of `prompts`; its id and its prompt's
    number `n` of sessions; its `number` among all sessions submitted so far; the number of
    `workers`; how many of its prompt's sessions have `started`; and their mean length, from those
    that have finished and from the history, or None when unknown (`expected`).
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
class Placement:
    """Where and when a session runs.

    `worker` runs it (another one if that is lost); None for the worker that runs the fewest
    sessions. Lower ranks go first; equal ranks in order of arrival.
    """

    worker: int | None = attrs.field(
        default=None, converter=attrs.converters.optional(operator.index)
    )
    rank: float = attrs.field(default=0.0, converter=float)


Policy = Callable[[PendingSession], Placement]

ANYWHERE = Placement()


def chunk(session: PendingSession) -> Placement:
    """Split the batch into one run of prompts per worker: a prompt stays on one worker."""
    return Placement(worker=session.prompt * session.workers // session.prompts)


def round_robin(session: PendingSession) -> Placement:
    """Assign sessions to workers in turn; the next batch continues where this one ended."""
    return Placement(worker=session.number % session.workers)


def least_loaded(session: PendingSession) -> Placement:
    """The next free slot takes the next session."""
    return ANYWHERE


def longest_first(session: PendingSession) -> Placement:
    """Start the sessions with the longest expected length first, so that no long one runs last.

    For a prompt without known lengths, one session runs first as a probe. While the probe runs,
    the prompt counts as longer than every known one, because it has outlived their probes.
    """
    if session.expected is not None:
        return Placement(rank=-session.expected)
    return Placement(rank=-math.inf if session.started == 0 else -1e300)


BLIND = (chunk, round_robin, least_loaded)
"""Policies that use no lengths."""

POLICIES: dict[str, Policy] = {policy.__name__: policy for policy in (*BLIND, longest_first)}


def find_policy(name: str) -> Policy:
    """The policy called `name`, or the function that ``package.module:function`` names."""
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        remedy = f"{did_you_mean(name, POLICIES)}; name your own as package.module:function"
        raise ConfigError(f"there is no policy {name!r}", "dispatch.policy", remedy)
    try:
        found: Policy = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}", "dispatch.policy") from error
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function", "dispatch.policy")
    return found


class History:
    """The mean length of a prompt's earlier sessions in this process, by its content."""

    def __init__(self, policy: Policy) -> None:
        self._is_used = policy not in BLIND
        self._lengths: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def look_up(self, prompts: Sequence[Any]) -> None:
        """Set what is known of prompts: nothing of one that cannot be compared."""
        for prompt in prompts if self._is_used else ():
            with contextlib.suppress(UnsupportedTypeError):
                prompt.known_as = name = fingerprint(prompt.fields)
                if count := self._counts[name]:
                    prompt.expected = self._lengths[name] / count

    def learn(self, prompt: Any, length: float) -> None:
        """Record the length of one more session of the prompt."""
        if prompt.known_as is not None:
            self._lengths[prompt.known_as] += length
            self._counts[prompt.known_as] += 1
