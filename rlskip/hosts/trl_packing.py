"""TRL's log-probabilities from packed rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rlskip._wrap import AttachError
from rlskip.merge.packed_forward import PackingError, packed_forward, refuse_inexact
from rlskip.merge.packing import Pack, pack

SEAM = "_get_per_token_logps_and_entropies"


def compute_packed(trainer: Any, max_tokens: int) -> None:
    """Let `trainer` compute log-probabilities and entropies on packs of `max_tokens` positions.

    This holds for the old, the reference and the policy's log-probabilities: the trainer has one
    method for them all.

    Raises
    ------
    AttachError
        This version of the trainer does not have the seam.
    PackingError
        The model's result would not be exact on packs.
    """
    if not hasattr(trainer, SEAM):
        raise AttachError(
            f"{type(trainer).__name__} has no method {SEAM}", "pack", "attach without pack"
        )
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            refuse_inexact(model)
    packed: Any = functools.partial(_on_packs, trainer, max_tokens)
    present = vars(trainer).get(SEAM)
    if isinstance(present, functools.partial) and present.func is not _on_packs:
        packed = functools.partial(present.func, packed)  # what records the log-probs stays around
    setattr(trainer, SEAM, packed)


def _on_packs(
    trainer: Any,
    max_tokens: int,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **images: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """What replaces the trainer's method, with its arguments and results."""
    given = [name for name, value in images.items() if value is not None]
    if given or compute_aux_loss:
        what = ", ".join(given) or "the auxiliary loss of a mixture of experts"
        raise PackingError(f"packing does not support {what}", "pack", "attach without pack")
    exists = attention_mask.bool()
    trained = exists.clone()
    trained[:, :-logits_to_keep] = False
    rows = {"input_ids": input_ids, "attention_mask": exists, "loss_mask": trained}
    log_probs = torch.zeros(input_ids.shape, device=input_ids.device)
    entropies = torch.zeros_like(log_probs)
    packs = pack(rows, max_tokens)
    for i, each in enumerate(packs + _repeated(trainer.accelerator, packs)):
        with trainer.accelerator.autocast():
            logits = packed_forward(model, each)
        logits = logits / trainer.temperature
        if i >= len(packs):  # its gradients are 0
            log_probs = log_probs + 0 * each.log_probs(logits).values().sum()
            continue
        tokens = torch.zeros_like(exists)
        tokens[sorted(each.rows)] = exists[sorted(each.rows)]
        log_probs = _filled(log_probs, tokens, each.rows, each.log_probs(logits))
        if compute_entropy:
            entropies = _filled(entropies, tokens, each.rows, each.entropy(logits))
    kept = slice(input_ids.shape[1] - logits_to_keep, None)
    return log_probs[:, kept], entropies[:, kept] if compute_entropy else None, None


def _repeated(accelerator: Any, packs: list[Pack]) -> list[Pack]:
    """As many packs as this process has fewer than another one.

    A model in a wrapper such as DDP's waits in each pass for that of the other processes.
    """
    counts = accelerator.gather(torch.tensor([len(packs)], device=accelerator.device))
    return [min(packs, key=len)] * (int(counts.max()) - len(packs))


def _filled(table: Tensor, where: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """`table` with the values of each row, in the order of `rows`, at the marked places."""
    parts = values.unbind()
    ordered = [parts[place] for place in sorted(range(len(rows)), key=rows.__getitem__)]
    return table.to(values.dtype).masked_scatter(where, torch.cat(ordered))
