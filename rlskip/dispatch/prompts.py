"""Read a trainer's batch: its prompts, each with its number of sessions and its sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from rlskip.batch.columns import own, rows_of
from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.history import History
from rlskip.dispatch.units import BatchError, Sample, build_trajectory_info
from rlskip.keys import DO_SAMPLE, ROLLOUT_N, TRAIN, VAL
from rlskip.store import fingerprint

GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}
"""Sampling parameters of a training prompt whose ``__do_sample__`` is false."""


class Copies:
    """Tells apart prompts of equal content that are submitted at one step, in any batch."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._uids: dict[str, dict[str, int]] = {}

    def number(self, step: int, content: str, uid: str) -> int:
        """Its number among them; a uid that is submitted again keeps its own."""
        if step != self._step:
            self._step, self._uids = step, {}
        uids = self._uids.setdefault(content, {})
        return uids.setdefault(uid, len(uids))


def read_batch(
    prompts: TensorDictBase | Sequence[Mapping[str, Any]],
    config: DispatchConfig,
    history: History | None,
    copies: Copies,
    step: int | None,
    validate: bool | None,
    partition: str | None,
) -> BatchHandle:
    """Read what ``RolloutDispatcher.submit`` takes; raises :class:`BatchError`."""
    if isinstance(prompts, TensorDictBase) and prompts.batch_dims != 1:
        raise BatchError(f"batch size {tuple(prompts.batch_size)}", remedy="expected (prompts,)")
    samples = [own(row) for row in rows_of(prompts)]
    if not samples:
        raise BatchError("the batch has no prompts")
    first = samples[0]
    step = first.get("global_steps") if step is None else step
    if step is None:
        raise BatchError(
            "no step is given", "global_steps", "pass step=... or add the field to the batch"
        )
    validate = bool(first.get("validate", False)) if validate is None else validate
    index = [sample.get("index", i) for i, sample in enumerate(samples)]
    infos = build_trajectory_info(step, index, validate)
    partition = partition or (VAL if validate else TRAIN)
    batch = BatchHandle(infos[0]["step"], partition, validate)
    usual = dict((config.val_sampling if validate else config.sampling) or {})
    greedy = {**usual, **GREEDY}
    for i, (sample, info) in enumerate(zip(samples, infos, strict=True)):
        sample.pop("validate", None)
        n = sample.pop(ROLLOUT_N, None)
        n = (config.val_n if validate else config.n) if n is None else int(n)
        sampled = bool(sample.pop(DO_SAMPLE, True)) or validate
        if n is None or n < 1:
            raise BatchError(f"{n!r} sessions for prompt {i}", ROLLOUT_N, "set at least one")
        if "uid" not in sample:
            raise BatchError("the batch has no uids", "uid", "add a field that names each prompt")
        prompt = Prompt(
            prompt=i,
            prompts=len(samples),
            n=n,
            batch=batch,
            uid=str(sample["uid"]),
            sample=Sample(sample),
            sampling=usual if sampled else greedy,
            info=info,
        )
        if history is not None:
            prompt.known_as = history.key(sample)
            prompt.expected = history.expected(prompt.known_as)
        if config.journal and not validate:
            content = fingerprint({**sample, DO_SAMPLE: sampled})
            prompt.journal_key = content, copies.number(batch.step, content, prompt.uid)
        batch.prompts.append(prompt)
    twice = [uid for uid, count in Counter(p.uid for p in batch.prompts).items() if count > 1]
    if twice:
        raise BatchError(f"duplicate uids: {', '.join(twice[:10])}", "uid")
    batch.sessions = batch.unwritten = sum(prompt.n for prompt in batch.prompts)
    return batch
