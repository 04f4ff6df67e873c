"""SkipManager: which roles are on, which step it is, and the decorator between them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from rlskip import stages
from rlskip.batch import row_fields
from rlskip.config.check import raise_all
from rlskip.config.facts import COMPOSES_VARIABLE, retire_legacy_flag
from rlskip.config.nodes import read_record_of
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.config.skip import TRAINING_ROLES
from rlskip.errors import ConfigError, RlskipError
from rlskip.jobs.records import job_id, read_events, tally
from rlskip.jobs.served import forget_served
from rlskip.keys import integer
from rlskip.skip import said
from rlskip.skip.attach import attach, attached
from rlskip.skip.call import IdentitySpec, LacksSpec, PromptsSpec, RowsSpec, Stage, named
from rlskip.skip.role import Role
from rlskip.skip.stage_runner import decorated

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class SkipManager:
    """The process's enabled roles and the training loop's step. It has no instances."""

    #: The enabled roles.
    skip_instances: ClassVar[dict[str, Role]] = {}
    #: What `init` read; None before it.
    settings: ClassVar[SkipSettings | None] = None
    #: The step that `set_step` set last.
    step: ClassVar[int | None] = None
    #: Whether the host starts its inference engine (``skip.start_engine``).
    start_engine: ClassVar[bool] = True
    #: Roles of decorated functions that were called since `init` although their role is off.
    bypassed: ClassVar[set[str]] = set()

    # The roles of all functions that were decorated, and whether one that nobody calls was named.
    _decorated: ClassVar[set[str]] = set()
    _warned: ClassVar[bool] = False
    # Called with the role of a decorated function whose role is off.
    _guard: ClassVar[Callable[[str], None]] = staticmethod(said.refuse_chosen)
    # The roles that do not list the present step: looked up once per step, not on every call.
    _unlisted: ClassVar[frozenset[str]] = frozenset()
    # Held while the step changes, and with it its visits and the roles that do not list it.
    _moving: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def init(cls, config: Any) -> None:
        """Turn on the roles that `config` enables, and off all others.

        The functions that ``skip.attach`` names become stages, and those that were attached before
        are plain functions again. A node `record` says whether stages are recorded from now on.

        Parameters
        ----------
        config
            A full config (a DictConfig, a mapping or a dataclass), a SkipManagerConfig, or what
            :func:`~rlskip.config.settings.read_skip` returned. verl's legacy skip flag that is
            on together with ``skip.rollout.enable`` is set to False in it.

        Raises
        ------
        ConfigError
            The node `skip` or `record` has problems, a ``dump_dir`` cannot be written, or steps
            without a dump must not be generated. All are named, and every decorated function
            refuses to run.
        AttachError
            A module that is already imported has no function that ``skip.attach`` names.
        """
        cls._start(config)
        if isinstance(config, SkipSettings):
            return  # a host's, which records by itself
        said.warn_of_idle_keys(cls.settings.node if cls.settings else None, cls.skip_instances)
        try:
            recording = read_record_of(config)
        except ConfigError:
            cls._refuse("SkipManager.init failed")
            raise
        if recording is not None:
            stages.start(recording, lambda: cls.step)

    @classmethod
    def _start(cls, config: Any, *, flushes: bool = False, checks: bool = True) -> None:
        """As :meth:`init`, for a host.

        If it `flushes` when the job ends, whatever happens, ``background_write: auto`` writes dumps
        in the background. Without `checks`, where stages run on another machine, what the run
        could not do is not refused.
        """
        if os.environ.get(COMPOSES_VARIABLE):
            raise SystemExit
        try:
            cls.flush()  # what is still being written is there for the next
        except RlskipError as error:
            log.warning("rlskip: SkipManager.init does not wait longer: %s", error)
        cls._refuse("SkipManager.init failed")
        forget_served()
        settings = read_skip(config)
        said.refuse_without_node(config)
        roles = settings.roles
        for local_config in roles.values():
            if local_config.background_write == "auto":
                local_config.background_write = flushes
        # The roles first: they read the config as the user gave it.
        enabled: dict[str, Role] = {}
        if roles:
            from rlskip.skip.roles import make_roles  # a job that skips nothing needs no numpy

            made = make_roles(roles, settings.facts)
            enabled = {role: skip for role, skip in made.items() if skip.is_enabled()}
        if checks and enabled:
            from rlskip.skip.preflight import preflight

            # A host that learns its steps later looks itself.
            engine = settings.start_engine or not settings.facts.steps
            raise_all(preflight(enabled, settings.facts, engine=engine))
        if "rollout" in roles:
            retire_legacy_flag(settings.facts.config)
        attach(settings.attach, enabled, functools.partial(decorated, cls))
        cls.settings, cls.skip_instances = settings, enabled
        cls.start_engine = settings.start_engine
        cls._guard = cls.bypassed.add
        for role, skip in enabled.items():
            local, what = skip.local_config, "rlskip: role %s is on: %s at steps %s, dumps in %s"
            log.info(what, role, local.action, local.steps, local.dump_dir)

    @classmethod
    def set_step(cls, step: int) -> None:
        """Set the training loop's step, before the stages.

        Until it is called with another number, each dump of the step serves one call.

        Raises
        ------
        ConfigError
            `step` is not an integer >= 0 (Python's, numpy's, or a 0-d tensor).
        """
        number, enabled = _number(step, "SkipManager.set_step"), cls.skip_instances
        with cls._moving:
            before, cls.step = cls.step, number
            for skip in enabled.values() if number != before else ():
                skip.begin_visit()
            cls._unlisted = frozenset(
                role
                for role, skip in enabled.items()
                if not skip.support_online_step and number not in skip.local_config.steps
            )
        if number != before and before is not None and not cls._warned:
            cls._warned = said.warn_of_uncalled(enabled, cls.bypassed, cls._decorated, before)

    @classmethod
    def count_rollouts(cls) -> None:
        """Count from now on what :meth:`logged` returns, for a host that logs it."""
        if cls.settings is not None and cls.settings.log_metrics:
            for role in cls.skip_instances.keys() & set(TRAINING_ROLES):
                cls.skip_instances[role].figures = deque()

    @classmethod
    def logged(cls) -> dict[str, float]:
        """What the host logs of the rollouts since the last call; empty without any."""
        found: dict[str, float] = {}
        for skip in cls.skip_instances.values():
            figures, taken = skip.figures or deque(), [(0, 0, 0, 0.0)]
            while figures:  # one after the other: a stage may add to them meanwhile
                taken.append(figures.popleft())
            rollouts, replayed, off_policy, saved = map(sum, zip(*taken, strict=True))
            if rollouts:
                found["rlskip/replayed"] = replayed / rollouts
                found["rlskip/off_policy"] = off_policy / rollouts
                found["rlskip/seconds_saved"] = max(0.0, saved)
        return found

    @classmethod
    def will_replay(cls, role: str, steps: Iterable[int]) -> bool:
        """Whether each of `steps` can be replayed, so that a loop may leave its engine out.

        True if `role` is on, lists all of them, and each has a readable dump of the same config.
        Prompts are compared when the stage is called; with ``skip.on_miss=error`` those without a
        dump end the run by name.
        """
        if cls.settings is None or role not in cls.skip_instances:
            return False
        from rlskip.skip.preflight import unusable

        numbers = [_number(step, "SkipManager.will_replay") for step in steps]
        called_with = cls.settings.facts.called_with.get(role, {})
        return not unusable(cls.skip_instances[role], numbers, called_with)

    @classmethod
    def store(cls, role: str) -> Any:
        """The :class:`~rlskip.store.StepStore` of an enabled role; None without."""
        dumps = cls.skip_instances[role].dumps if role in cls.skip_instances else None
        return None if dumps is None else dumps.store

    @classmethod
    def flush(cls) -> None:
        """Wait until all dumps and records of stages are on disk."""
        for skip in cls.skip_instances.values():
            skip.flush()
        stages.flush()

    @classmethod
    def reset(cls) -> None:
        """Return to the state before `init`."""
        stages.stop()
        cls._turn_off(said.refuse_chosen)

    @classmethod
    def _refuse(cls, reason: str) -> None:
        """Let every decorated function raise from now on: none runs unskipped unnoticed."""
        cls._turn_off(functools.partial(said.refuse, reason))

    @classmethod
    def _turn_off(cls, guard: Callable[[str], None]) -> None:
        attached.clear()
        cls.step, cls._unlisted = None, frozenset()
        cls.bypassed, cls._warned = set(), False
        cls.settings, cls.skip_instances = None, {}
        cls.start_engine = True
        cls._guard = staticmethod(guard)

    @classmethod
    def annotate(
        cls,
        role: str,
        prompts: PromptsSpec = None,
        identity: IdentitySpec = None,
        stage: str | None = None,
        lacks: LacksSpec = None,
        ignore: Collection[str] = (),
        rows: RowsSpec = None,
        totals: Mapping[str, Callable[[Any], Any]] | None = None,
        on_replay: Callable[[Any], Any] | None = None,
        derived: bool = False,
        **options: Any,
    ) -> Callable[[F], F]:
        """Decorate the function that is stage `role`, plain or ``async``.

        Parameters
        ----------
        role
            The key under `skip` that configures it.
        prompts
            Name of the argument that holds the prompts, or a function of the call's arguments
            that returns them. Default: the argument called `prompts`, else the first after self
            that is not a step, seed or the like.
        identity
            What else must be equal for a dump to replace the call: a mapping of plain data, or a
            function of the call's arguments that returns one.
        stage
            The name of the function in the identity of its dumps; by default ``__qualname__``.
        lacks
            A function of a result that returns the names of fields which this run needs and the
            result does not have. A dump that lacks one is a mismatch, unless the stage did not
            return it then either.
        ignore
            Names of arguments that are not compared, besides self, the prompts, and such as never
            shape rollouts. ``["*"]``: compare none.
        rows
            What the fields of the stage's rows hold, where their names do not tell: a mapping with
            entries of :class:`~rlskip.batch.row_fields.RowFields`, or a function of a result that
            returns one. RowsError names a field that the result does not have.
        totals
            For ``skip.match=prompt``: what the result holds for a whole batch (metrics, say), by
            name as a function of the rows that were put together of several dumps.
        on_replay
            A function of a replayed result that returns what the call returns.
        derived
            Whether the prompts are what an earlier stage returned, such as sampled tokens: if that
            stage had to run again, a call may have other prompts than the dumps.
        options
            Options of the role (``BaseSkip.stage_options``); any other name is refused when the
            enabled role is first called.
        """
        said.refuse_misspelt(role)
        kinds = {"prompts": prompts, "identity": identity, "lacks": lacks, "ignore": ignore}
        said.refuse_other_kinds(role, **kinds, rows=rows, on_replay=on_replay)
        if isinstance(rows, Mapping):
            row_fields.check(rows)
        cls._decorated.add(role)

        def decorate(func: F) -> F:
            if isinstance(func, staticmethod | classmethod):
                return type(func)(decorate(func.__func__))  # type: ignore[return-value]
            said.refuse_other_objects(func)
            name = stage or named(func).__qualname__
            staged = Stage(
                func, role, prompts, identity, name, lacks, rows, totals or {}, options, ignore,
                on_replay, derived,
            )  # fmt: skip
            return decorated(cls, staged)  # type: ignore[return-value]

        return decorate


@atexit.register
def _say_what_is_kept() -> None:
    """Of a job that no summary ends: after Ctrl-C say how many steps of each role are dumped."""
    if getattr(sys, "last_type", None) is not KeyboardInterrupt:
        said.warn_of_unmet(SkipManager.skip_instances)
        for role, skip in SkipManager.skip_instances.items():
            if skip.recorder is not None and not skip.was_listed:
                said.warn_of_unlisted(role, skip.local_config)
            elif skip.recorder is not None and skip.failures:
                counts = tally({role: skip.local_config.dump_dir}, job_id())[role]
                log.warning("rlskip: role %s: %s", role, counts + skip.recorder.unwritten)
        return
    with contextlib.suppress(RlskipError, OSError):
        SkipManager.flush()
    for role, skip in SkipManager.skip_instances.items():
        if skip.recorder is not None:
            dump_dir = skip.local_config.dump_dir
            events = read_events(dump_dir, job_id())
            kept = {e.step for e in events if e.kind == "dumped" and e.role == role}
            what = "rlskip: interrupted; role %s: the rollouts of %d steps are kept in %s"
            log.warning(what, role, len(kept), skip.dumps.directory if skip.dumps else dump_dir)


def _number(step: Any, where: str) -> int:
    if (number := integer(step)) is None or number < 0:
        raise ConfigError(f"{step!r} is not a step", where, "pass an integer >= 0")
    return number
