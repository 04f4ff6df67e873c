"""rlskip's replay buffer behind the seam ``trainer.v1.sampler.custom_sampler`` of verl.

verl loads this module as ``pkg://rlskip.hosts.verl.buffer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from rlskip.config.replay import ReplayConfig
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.hosts.verl.facts import SAMPLER_KEY
from rlskip.hosts.verl.run_queue import run_queue, tidy_journals
from rlskip.keys import IS_PROMPT, ROLLOUT_ROOT_KEYS, TRAIN, VAL, uid_of
from rlskip.queue import PromptOutcome, ReplayBuffer
from rlskip.skip import SkipManager

# By partition: the sampling that the role of training, or that of validation, observes.
_SAMPLE: dict[str, Callable[..., Any]] = {
    partition: SkipManager.annotate(role=role, phase="sample", queue=lambda *_: run_queue())(
        ReplayBuffer.sample
    )
    for partition, role in ((TRAIN, "rollout_tq"), (VAL, VALIDATION_ROLE))
}


class FailClosedReplayBuffer:
    """A replay buffer for verl's V1 trainers that returns complete groups, or raises.

    Parameters
    ----------
    trainer_mode
        ``sync``, ``colocate_async`` or ``separate_async``.
    trainer_config
        ``trainer.v1.<trainer_mode>``; unused.
    max_off_policy_threshold, max_off_policy_strategy
        Those of ``trainer.v1.sampler``, unused: `sampler_kwargs` has them.
    sampler_kwargs
        All keys of `replay` (:class:`~rlskip.config.replay.ReplayConfig`), filled in by rlskip's
        plug-in. `n` and `val_n` are required: verl's prompts do not carry the number of sessions
        to expect.
    refill_fn
        Submits the given number of fresh prompts.
    """

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Mapping[str, Any] | DictConfig | None = None,
        refill_fn: Callable[[int], Any] | None = None,
    ) -> None:
        given: dict[str, Any] = dict(sampler_kwargs or {})  # type: ignore[arg-type]
        if given.get("n") is None or given.get("val_n") is None:
            raise ConfigError(
                "the number of sessions a prompt gets is not set, so no group is known to be "
                "complete",
                f"{SAMPLER_KEY}.sampler_kwargs",
                "set `replay` and let rlskip's plug-in for verl fill this in (is "
                "VERL_USE_EXTERNAL_PLUGINS set to none?)",
            )
        settings = ReplayConfig(**given)
        self._queue = run_queue()
        self._refill_fn = refill_fn
        # A sync step samples everything it submitted; with `drop`, everything that is left of it.
        self._whole_steps = trainer_mode == "sync" and settings.on_incomplete == "drop"
        refill = None if refill_fn is None else self._refill
        self._buffer = ReplayBuffer(self._queue, settings, refill=refill, on_evict=_evicted)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int | None = None
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """As :meth:`rlskip.queue.ReplayBuffer.sample`; verl's trainer deletes the rows itself."""
        sample = _SAMPLE.get(partition_id, ReplayBuffer.sample)
        size = None if self._whole_steps else batch_size
        batch, metrics = sample(self._buffer, global_steps, partition_id, size)
        self._delete_all_but(batch.keys, batch.extra_info.pop(ROLLOUT_ROOT_KEYS), partition_id)
        tidy_journals()
        return KVBatchMeta(**vars(batch)), metrics

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """The number of groups that could be sampled now."""
        return self._buffer.get_sampleable_count(global_steps, partition_id)

    def _delete_all_but(self, rows: list[str], uids: list[str], partition_id: str) -> None:
        """Delete the sampled prompts' roots, markers and other rows; verl deletes only `rows`."""
        sampled, prompts = set(rows), set(uids)
        left = [
            key
            for key in self._queue.list(partition_id)
            if key not in sampled and (key in prompts or uid_of(key) in prompts)
        ]
        self._queue.delete(left, partition_id)

    def _refill(self, partition_id: str, evicted: list[PromptOutcome]) -> list[str]:
        """Have the trainer submit as many fresh prompts; returns their uids: the new roots."""
        assert self._refill_fn is not None
        before = self._roots(partition_id)
        self._refill_fn(len(evicted))
        return [uid for uid in self._roots(partition_id) if uid not in before]

    def _roots(self, partition_id: str) -> dict[str, Any]:
        listing = self._queue.list(partition_id)
        return {key: tag for key, tag in listing.items() if tag.get(IS_PROMPT)}


@SkipManager.annotate(role="rollout_tq", phase="evict", queue=lambda *_: run_queue())
def _evicted(batch: Any) -> Any:
    """Groups that the buffer is about to delete, for the dump."""
    return batch
