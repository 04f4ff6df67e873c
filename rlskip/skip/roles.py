"""The built-in roles: a stage that returns its rollouts, per step or per sample."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, ClassVar, TypeGuard

import attrs
import torch
from tensordict import TensorDictBase

import rlskip
from rlskip.config.skip import AsyncRolloutSkipConfig, RoleConfig, RolloutSkipConfig, look_up
from rlskip.errors import ConfigError, MismatchError, RlskipError
from rlskip.skip.base import SKIP_REGISTRY, BaseSkip, SkipAction, register_skip
from rlskip.skip.call import Call, current_call, meta_of, unwrapped
from rlskip.skip.fields import drop_fields, field_names, score_fields
from rlskip.skip.records import job_id
from rlskip.skip.rng import capture_rng, restore_rng
from rlskip.store import (
    CorruptDumpError,
    DumpMeta,
    Identity,
    RankGroup,
    SingleFlight,
    StepStore,
    Writer,
    fingerprint,
    run_directory,
)
from rlskip.store.ranks import world_size
from rlskip.store.writer import WriterTimeoutError

__all__ = ["SKIP_REGISTRY", "AsyncRolloutSkip", "RolloutSkip", "parse_async_rollout_sample_step"]

log = logging.getLogger(__name__)

# Sampling parameters of the host's config that decide what a prompt's rollouts look like. The
# seed is not among them: another draw from the same distribution is as good a sample.
_SAMPLING = ("temperature", "top_p", "top_k", "do_sample", "repetition_penalty", "ignore_eos")
# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model.path"


@register_skip("rollout", config=RolloutSkipConfig)
class RolloutSkip(BaseSkip):
    """Caches what one call of the stage returned and replays it.

    ``cache`` replays the dump of the very step, provided that the prompts (by content), n,
    lengths and sampling parameters equal those it was made with. ``repeat`` takes, where the
    step has no dump, the nearest earlier step's, else the nearest later one's, and checks no
    prompts.
    """

    support_actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    def __init__(self, local_config: RoleConfig, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        c = local_config
        assert c.dump_dir is not None
        assert c.experiment_name is not None
        assert c.project_name is not None
        assert c.wait_s is not None
        # A host that knows no such number still gets a directory of its own.
        shape = (x if x is not None else "any" for x in (c.gbs, c.n, c.prompt_len, c.response_len))
        self.directory = run_directory(c.dump_dir, c.experiment_name, c.project_name, *shape)
        self._in_background = bool(c.background_write)
        self._waits = c.wait_s > 0 and c.on_miss == "generate"
        self._said: set[str] = set()

    @functools.cached_property
    def ranks(self) -> RankGroup:
        # Not in __init__: a job starts before torch.distributed knows its ranks.
        return RankGroup(_RANKS_S)

    @functools.cached_property
    def store(self) -> StepStore:
        return StepStore(
            self.directory,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            keep_last=self.local_config.keep_last,
            max_size=self.local_config.max_size,
        )

    @functools.cached_property
    def writer(self) -> Writer:
        return Writer(self.store)

    @functools.cached_property
    def flight(self) -> SingleFlight:
        return SingleFlight(self.directory, self.ranks, wait_s=self.local_config.wait_s)

    # -- the three questions -----------------------------------------------------------

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        call = current_call(func, *args, **kwargs)
        self._wait_for_writer()
        hit = False
        try:
            source = self._stand_in(step)
            # Before the stage runs: it may alter its input (verl's adds `priority` in place).
            identity = call.identity = self._identity(call)
            hit = self._can_replay(source, identity)
        finally:
            # Also when this rank is about to raise: the others must not wait for it.
            hit = self.ranks.agree(hit, f"step {step}")
        if hit or not self._waits:
            return hit

        def is_there() -> bool:
            source = self._stand_in(step)
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return self._can_replay(source, identity)

        lease = self.flight.enter(step, is_there)
        if lease is None:
            return True
        call.cleanup.add(lease.release)
        return False

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        began = time.perf_counter()
        rollouts, meta = self._load(step)
        source = meta.step
        if self.local_config.restore_rng:
            restore_rng(self.store.load_aside(source))
        seconds = time.perf_counter() - began
        current_call(func, *args, **kwargs).facts.update(
            source=source,
            bytes=meta.nbytes,
            seconds_saved=meta.info.get("seconds", seconds) - seconds,
        )
        self._tell(step, source, meta)
        return self._without_dropped(rollouts)

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        call = current_call(self.prepare_data, *args, **kwargs)
        info = {"seconds": call.seconds, "job": job_id()}
        if self.ranks.world_size > 1:
            info["generation"] = self.ranks.decision
        dump: dict[str, Any] = {
            "identity": call.identity or self._identity(call),
            "info": info,
            "aside": capture_rng(),
        }
        if not self._in_background:
            meta = self.store.save(step, result, **dump)
            call.record("dumped", step=step, bytes=meta.nbytes)
            return
        # The writer, not the end of this call, gives the lease back.
        release = call.cleanup.pop_all().close

        def done(meta: DumpMeta | None, error: BaseException | None) -> None:
            release()
            if meta is not None:
                call.record("dumped", step=step, bytes=meta.nbytes)

        try:
            self.writer.save(step, result, **dump, done=done)
        except BaseException:
            release()
            raise

    def flush(self) -> None:
        if self._in_background:
            self.writer.flush()

    # -- which dump, and what is in it ---------------------------------------------------

    def _wait_for_writer(self) -> None:
        """So that what was generated a moment ago stands in, too."""
        if not self._in_background:
            return
        try:
            self.writer.wait()
        except WriterTimeoutError as error:
            # A dump is there whole or not at all, so to look without it is safe.
            log.warning("rlskip: role %s goes on without waiting longer: %s", self.role, error)

    def _stand_in(self, step: int) -> int | None:
        """The step whose dump is to stand in for `step`; worked out anew on every call.

        The same on every rank, though another job may be writing: what rank 0 finds.
        """
        if self.local_config.action != SkipAction.REPEAT:
            return step
        found = None
        try:
            if self.ranks.rank == 0:
                found = self.store.nearest(step)
        finally:
            # Also when rank 0 is about to raise: the others must not wait for it.
            found = self.ranks.follow(-1 if found is None else found, f"step {step}")
        return None if found < 0 else found

    def _can_replay(self, source: int | None, identity: Identity) -> bool:
        meta = None if source is None else self.store.peek(source)
        if meta is None:
            return False
        return self.local_config.action == SkipAction.REPEAT or self._same(identity, meta)

    def _load(self, step: int) -> tuple[Any, DumpMeta]:
        """The rollouts that stand in for `step`, verified; on every rank or on none."""
        loaded, generation = None, 0
        try:
            source = self._stand_in(step)
            if source is None:
                raise CorruptDumpError("the dump is gone", str(self.directory / str(step)))
            loaded = self.store.load_with_meta(source)
            generation = int(loaded[1].info.get("generation", "0"), 16)
        finally:
            # Another job may be replacing the shards, one rank's after the other's.
            same = self.ranks.follow(generation, f"step {step}") == generation
            everywhere = self.ranks.agree(loaded is not None and same, f"step {step}")
        if not everywhere:
            raise CorruptDumpError(
                "another rank's shard is unusable, or of another call", str(self.directory)
            )
        return loaded

    def _identity(self, call: Call) -> Identity:
        return attrs.evolve(
            self._conditions,
            prompts=fingerprint(call.prompts),
            extra=self._extra(call),
        )

    def _extra(self, call: Call) -> dict[str, Any]:
        """What the call adds to the identity: the stage's own, and other sampling than usual.

        A host may ask for it in the prompts' meta, for a greedy baseline, say.
        """
        meta = meta_of(call.prompts) or {}
        asked = {name: unwrapped(meta[name]) for name in _SAMPLING if name in meta}
        usual = self._conditions.sampling
        unusual = {k: v for k, v in asked.items() if k not in usual or usual[k] != v}
        return {
            **{f"meta_info.{name}": value for name, value in unusual.items()},
            **call.stage.identity_of(call.args, call.kwargs),
        }

    @functools.cached_property
    def _conditions(self) -> Identity:
        """What the config alone says of how rollouts are made."""
        c, config = self.local_config, self.global_config
        sampling = {name: look_up(config, f"{_ROLLOUT}.{name}") for name in _SAMPLING}
        return Identity(
            n=c.n,
            prompt_len=c.prompt_len,
            response_len=c.response_len,
            sampling={name: value for name, value in sampling.items() if value is not None},
            model=look_up(config, _MODEL),
            versions=_versions(),
        )

    def _same(self, present: Identity, meta: DumpMeta) -> bool:
        """Whether the dump was made for this very call, or may be used all the same."""
        if meta.identity is None:
            self._once("no-identity", "dumps in %s name no prompts; not compared", self.directory)
            return True
        differs, noteworthy = present.differences(meta.identity)
        if noteworthy:
            self._once("noteworthy", "replayed although it differs: %s", "; ".join(noteworthy))
        if not differs:
            return True
        what = f"the dump of step {meta.step} was made for another call: {'; '.join(differs)}"
        if self.local_config.on_mismatch == "ignore":
            self._once("ignored", "%s; replayed all the same (on_mismatch=ignore)", what)
            return True
        if self.local_config.on_mismatch == "regenerate":
            self.store.set_aside(meta.step, what)
            return False
        raise MismatchError(
            what,
            str(self.directory / str(meta.step)),
            f"three ways on: skip.{self.role}.on_mismatch=regenerate runs the stage and replaces "
            "the dump (the old one is kept aside); on_mismatch=ignore replays it all the same; "
            "another skip.dump_dir or trainer.experiment_name starts afresh",
        )

    # -- what the user hears -------------------------------------------------------------

    def _tell(self, step: int, source: int, meta: DumpMeta) -> None:
        made = f"made {_age(meta.created)} ago by job {meta.info.get('job', 'unknown')}"
        if source == step:
            log.info("rlskip: step %d replayed from %s, %s", step, self.directory / str(step), made)
        else:
            log.info(
                "rlskip: step %d REPEATS step %d from %s, %s; its prompts were not checked",
                step, source, self.directory / str(source), made,
            )  # fmt: skip
        self._once("off-policy", "replayed rollouts are off-policy for the present weights")

    def _without_dropped(self, rollouts: Any) -> Any:
        unwanted = self.local_config.drop_fields or []
        unknown = sorted(set(unwanted) - field_names(rollouts))
        if unknown:
            self._once(
                "unknown-fields", "drop_fields names %s, which the dump does not have; it has %s",
                ", ".join(unknown), ", ".join(sorted(field_names(rollouts))),
            )  # fmt: skip
        rollouts = drop_fields(rollouts, unwanted)
        scores = score_fields(rollouts)
        if scores:
            self._once(
                "scores", "scores are replayed with the rollouts (%s); to compute them again: "
                "skip.drop_fields=[%s]", ", ".join(scores), ",".join(scores),
            )  # fmt: skip
        return rollouts

    def _once(self, topic: str, message: str, *values: Any) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning(f"rlskip: role {self.role}: {message}", *values)


@register_skip("async_rollout", config=AsyncRolloutSkipConfig)
class AsyncRolloutSkip(RolloutSkip):
    """As `rollout`, for one sample a call: the step is the sample's place in the feed order."""

    support_online_step: ClassVar[bool] = True

    def __init__(self, local_config: RoleConfig, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        # Its calls run side by side in threads already; many may be under way at once, and none
        # must keep a thread from the others by waiting.
        self._in_background = self._waits = False

    @functools.cached_property
    def ranks(self) -> RankGroup:
        if (ranks := world_size()) > 1:
            raise ConfigError(
                f"torch.distributed has {ranks} ranks here, and samples generated side by side "
                "come in no order in which ranks could decide together",
                f"skip.{self.role}.enable",
                "use skip.rollout, or generate in a process outside torch.distributed",
            )
        return RankGroup()

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The feed-order index of the call's ``sample_id``, or else of its prompts' uid."""
        sample_id = kwargs.get("sample_id")
        if sample_id is None:
            sample_id = next((arg for arg in args if isinstance(arg, str)), None)
        if sample_id is None:
            sample_id = _uid_of([*args, *kwargs.values()])
        return parse_async_rollout_sample_step(sample_id)


_SAMPLE_ID = re.compile(r"(?:uid_)?sample_(\d+)_(\d+)", re.ASCII)


class SampleIdError(RlskipError, ValueError):
    """A sample id from which no step can be read."""


def parse_async_rollout_sample_step(sample_id: Any) -> int:
    """Feed-order index of ``sample_{epoch}_{index}`` (also ``uid_sample_{epoch}_{index}``).

    >>> parse_async_rollout_sample_step("sample_0_42")
    42
    """
    match = _SAMPLE_ID.fullmatch(sample_id) if isinstance(sample_id, str) else None
    if match is None:
        raise SampleIdError(
            f"{sample_id!r} is no sample id",
            "skip.async_rollout",
            "expected sample_{epoch}_{index}, as the argument sample_id or as the prompts' uid",
        )
    return int(match[2])


def _uid_of(arguments: list[Any]) -> str | None:
    """The first row's uid of the first argument that has one."""
    for argument in arguments:
        for place in (getattr(argument, "non_tensor_batch", None), argument):
            uids = place.get("uid", None) if _is_mapping(place) else None
            if uids is None:
                continue
            # NonTensorData and NonTensorStack say tolist(), as arrays do.
            uids = uids.tolist() if hasattr(uids, "tolist") else uids
            return str(uids if isinstance(uids, str) else next(iter(uids), None))
    return None


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping | TensorDictBase)


def _versions() -> Mapping[str, str]:
    # Plain text: torch's own kind of string parses both sides whenever it is compared.
    return {"rlskip": rlskip.__version__, "torch": str(torch.__version__)}


def _age(created: str) -> str:
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
