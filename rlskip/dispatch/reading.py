"""A batch as a trainer has it, read into prompts and their sessions."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from tensordict import TensorDictBase

from rlskip.batch.columns import own, rows_of, select
from rlskip.batch.meta import plain
from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import BatchHandle, Group, Held, Prompt
from rlskip.dispatch.sessions import BatchError
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.format.fingerprint import fingerprint
from rlskip.format.prompt_digests import digests_of
from rlskip.jobs.served import enclosing
from rlskip.keys import DO_SAMPLE, ROLLOUT_N, TRAIN, VAL
from rlskip.store.comparable import canonical

GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}
"""Sampling parameters of a training prompt whose ``__do_sample__`` is false."""


def read_batch(
    prompts: TensorDictBase | Sequence[Mapping[str, Any]],
    config: DispatchConfig,
    held: Held,
    step: int | None,
    validate: bool | None,
    partition: str | None,
) -> BatchHandle:
    """Read what ``RolloutDispatcher.submit`` takes; raises :class:`BatchError`."""
    if isinstance(prompts, TensorDictBase) and prompts.batch_dims != 1:
        raise BatchError(f"batch size {tuple(prompts.batch_size)}", remedy="expected (prompts,)")
    samples = [own(row) for row in rows_of(prompts)]
    if not samples:
        remedy = "pass a TensorDict of batch size (prompts,), or a list of one mapping per prompt"
        raise BatchError("the batch has no prompts", remedy=remedy)
    step = step_number(_common("global_steps", samples) if step is None else step)
    validate = bool(_common("validate", samples, False)) if validate is None else validate
    index = [sample.get("index", i) for i, sample in enumerate(samples)]
    infos = build_trajectory_info(step, index, validate)
    partition = partition or (VAL if validate else TRAIN)
    batch = BatchHandle(step, partition, validate, held)
    usual = dict((config.val_sampling if validate else config.sampling) or {})
    greedy = {**usual, **GREEDY}
    for i, (sample, info) in enumerate(zip(samples, infos, strict=True)):
        sample.pop("validate", None)
        own_n = sample.pop(ROLLOUT_N, None)
        n = (config.val_n if validate else config.n) if own_n is None else whole(own_n)
        sampled = bool(sample.pop(DO_SAMPLE, True)) or validate
        if n is None or n < 1:
            raise BatchError(f"{own_n!r} sessions for prompt {i}", ROLLOUT_N, "set at least one")
        uid = str(plain(sample.get("uid", "")))
        if not uid:
            raise BatchError("the batch has no uids", "uid", "add a field that names each prompt")
        batch.prompts.append(
            Prompt(
                prompt=i,
                prompts=len(samples),
                n=n,
                batch=batch,
                uid=uid,
                open=set(range(n)),
                group=Group(uid, step, n),
                fields=sample,
                sampling=usual if sampled else greedy,
                sampled=sampled,
                info=info,
            )
        )
    twice = [uid for uid, count in Counter(p.uid for p in batch.prompts).items() if count > 1]
    if twice:
        raise BatchError(f"duplicate uids: {', '.join(twice[:10])}", "uid")
    batch.sessions = batch.unwritten = sum(p.n for p in batch.prompts)
    return batch


def name_contents(batch: BatchHandle) -> None:
    """Set what journals know prompts by, among those of the enclosing call of a stage.

    Its uid and the like count if a prompt has no other field.
    """
    calls = {role: name for role, name in enclosing.get({}).items() if name}
    for prompt in batch.prompts:
        try:
            (digest,) = digests_of([prompt.fields])
            if digest is None:
                digest = fingerprint(prompt.fields, volatile=())
        except UnsupportedTypeError as error:
            batch.unjournaled = f"{error.where}: {error.what}"
            continue
        made = canonical({**calls, DO_SAMPLE: prompt.sampled})
        prompt.content = xxhash.xxh3_128_hexdigest(f"{digest} {made}".encode())


def extract_sample(batch: Any, i: int) -> dict[str, Any]:
    """Return sample `i` of a batch as a plain dict that shares no memory with it.

    `batch` is a TensorDict of batch size ``(prompts,)``, a mapping of columns, or one mapping per
    prompt. Tensors come without the batch dimension, batch-wide data (NonTensorData) in every
    sample. A view would carry the storage of the whole batch through every serialisation.
    """
    (row,) = rows_of(select(batch, [i]))
    return {str(key): own(value) for key, value in row.items()}


def _common(name: str, samples: Sequence[Mapping[str, Any]], usual: Any = None) -> Any:
    """What all prompts of a batch have in a field: `usual` where they have none."""
    values = [plain(sample.get(name, usual)) for sample in samples]
    if odd := [i for i, value in enumerate(values) if value != values[0]]:
        what = f"prompt {odd[0]} has {values[odd[0]]!r}, and prompt 0 has {values[0]!r}"
        raise BatchError(what, name, "submit the prompts of each in a batch of their own")
    return values[0]


def build_trajectory_info(step: Any, index: Any, validate: Any) -> list[dict[str, Any]]:
    """Name each prompt of a batch in plain Python scalars.

    `step` is a number, or a tensor or array of one; `index` each prompt's number in the data set, a
    tensor, an array or a list. Returns dicts with ``step``, ``sample_index``, ``rollout_n`` (0 for
    an index that differs from the one before, else one more) and ``validate``.
    """
    step, validate = _scalar(step), bool(_scalar(validate))
    info: list[dict[str, Any]] = []
    for i in index.tolist() if hasattr(index, "tolist") else index:
        i = _scalar(i)
        again = bool(info) and info[-1]["sample_index"] == i
        info.append(
            {
                "step": step,
                "sample_index": i,
                "rollout_n": info[-1]["rollout_n"] + 1 if again else 0,
                "validate": validate,
            }
        )
    return info


def whole(value: Any) -> int | None:
    """A number without a fraction, of any type, as an int; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = int(value)
        return number if number == value else None
    return None


def step_number(step: Any) -> int:
    """The trainer's step as an int; raises :class:`BatchError`."""
    if step is None:
        remedy = "pass step=... or add the field to the batch"
        raise BatchError("no step is given", "global_steps", remedy)
    number = whole(step)
    if number is None:
        raise BatchError(f"expected a whole number, got {step!r:.100}", "global_steps")
    return number


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
