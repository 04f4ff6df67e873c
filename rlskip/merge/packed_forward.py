"""A forward pass of a Hugging Face causal model over a pack."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlskip.errors import RlskipError
from rlskip.merge.packing import Pack

_IMPLEMENTATION = "rlskip_packed"
# Settings of a config under which a token's state depends on more than the tokens before it and
# their depths, or on how rows are batched. Sources: the configs in transformers.models.
_NOT_EXACT = {
    "sliding_window": "a sliding window",
    "attention_chunk_size": "chunked attention",
    "keep_window_size": "a dynamic mask",
    "alibi": "ALiBi positions",
    "linear_conv_kernel_dim": "linear attention",
    "ssm_cfg": "a recurrent state",
    "state_size": "a recurrent state",
    "mamba_d_state": "a recurrent state",
    "attention_hidden_size": "a recurrent state",
    "lru_width": "a recurrent state",
    "relative_attention_num_buckets": "relative positions",
}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class PackingError(RlskipError, ValueError):
    """A model whose result on a pack would differ from its result on the rows."""


def packed_forward(model: nn.Module, pack: Pack) -> Tensor:
    """Run a causal model once over a pack, with the gradients of the separate rows.

    Parameters
    ----------
    model
        A causal language model of transformers whose attention is ``sdpa``, ``eager`` or
        ``flex_attention``. ``sdpa`` computes attention branch by branch, so that time and memory
        follow the tokens that attend to each other. The others take a mask of the whole pack, and
        so does ``sdpa`` with gradient checkpointing, or in models that do not take attention
        functions of others.
    pack
        From :func:`pack`.

    Returns
    -------
    Tensor
        Logits of shape ``(len(pack.needed), vocabulary)``, for :meth:`Pack.log_probs`.

    Raises
    ------
    PackingError
        The model's result would not be exact. :func:`refuse_inexact` lists the reasons.
    """
    refuse_inexact(model)
    device = next(model.parameters()).device
    inputs = {
        "input_ids": pack.input_ids[None].to(device),
        "position_ids": pack.position_ids[None].to(device),
        "logits_to_keep": pack.needed.to(device),
        "use_cache": False,
    }
    config = _text_config(model)
    implementation = config._attn_implementation
    recomputes = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if implementation == "flex_attention":
        logits = model(**inputs, attention_mask=pack.block_mask(device)).logits
    elif implementation == "sdpa" and not recomputes and _passes_branches(model):
        with _branch_by_branch(config, pack, device) as branches:
            logits = model(**inputs, rlskip_branches=branches).logits
    else:
        mask = pack.dense_mask().to(device)
        if implementation == "eager":  # it adds the mask to the scores
            dtype = next(model.parameters()).dtype
            scores = torch.zeros(mask.shape, dtype=dtype, device=device)
            mask = scores.masked_fill_(~mask, torch.finfo(dtype).min)
        logits = model(**inputs, attention_mask=mask[None, None]).logits
    result: Tensor = logits[0]
    return result


def refuse_inexact(model: nn.Module) -> None:
    """Refuse a model whose result on a pack would differ from its result on the rows.

    Raises
    ------
    PackingError
        The config names a sliding window, linear attention, a dynamic mask, a recurrent state,
        attention sinks, positions that are neither RoPE nor learned by position id, RoPE that
        depends on the batch's length, a mixture of experts' auxiliary loss, or dropout in
        training; or an adapter of PEFT adds virtual tokens.
    """
    config = _text_config(model)
    for reason in _reasons(model, config):
        raise _not_exact(reason, model)


def _not_exact(reason: str, model: nn.Module) -> PackingError:
    what = f"packing is not exact with {reason}"
    return PackingError(what, type(model).__name__, "train it on separate rows")


def _reasons(model: nn.Module, config: Any) -> Iterator[str]:
    # GPT-Neo has another name for them, and "local" for a window.
    layer_types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    for layer_type in sorted({*(layer_types or ())} - {"full_attention", "global"}):
        yield f"layers of the type {layer_type}"
    for name, what in _NOT_EXACT.items():
        if name == "sliding_window" and not _uses_sliding_window(config):
            continue
        if getattr(config, name, None):
            yield f"{what} (config.{name})"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        yield "attention sinks"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        yield f"RoPE of the type {kind}, which depends on the longest row of a batch"
    parameters = inspect.signature(_unwrapped(model).forward).parameters
    if not {"position_ids", "logits_to_keep"} <= parameters.keys():
        yield "a forward pass that takes no position_ids or no logits_to_keep"
    adapters = getattr(getattr(model, "module", model), "peft_config", {}).values()
    if any(adapter.is_prompt_learning for adapter in adapters):
        yield "an adapter that adds virtual tokens"
    if getattr(config, "output_router_logits", False):
        yield "the auxiliary loss of a mixture of experts (config.output_router_logits)"
    if config._attn_implementation not in ("sdpa", "eager", "flex_attention"):
        yield f"the attention {config._attn_implementation!r}: load it with sdpa or eager"
    if model.training and (
        getattr(config, "attention_dropout", None)
        or any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    ):
        yield "dropout, which differs from row to row: set it to 0 or call model.eval()"


def _uses_sliding_window(config: Any) -> bool:
    # Where layers have types, those decide (Qwen2's config names a window that it does not use).
    if getattr(config, "layer_types", None):
        return False
    return bool(getattr(config, "use_sliding_window", True))


def _unwrapped(model: nn.Module) -> Any:
    """The model of transformers in a wrapper, such as those of DDP and PEFT."""
    inner: Any = getattr(model, "module", model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _text_config(model: nn.Module) -> Any:
    config: Any = _unwrapped(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _passes_branches(model: nn.Module) -> bool:
    """Whether the model's layers give the attention function what its forward pass was given."""
    return bool(getattr(_unwrapped(model), "_supports_attention_backend", False))


class _Branch:
    """Consecutive positions, each after the one before it, and the positions before all of them.

    `before` names these by branch: the first so many positions of some earlier branches.
    """

    def __init__(self, length: int, before: list[tuple[int, int]], device: torch.device) -> None:
        self.length, self.before = length, before
        seen = sum(count for _, count in before)
        self.mask = torch.ones(length, seen + length, dtype=torch.bool, device=device).tril(seen)

    def keys(self, own: Tensor, states: Sequence[Tensor]) -> Tensor:
        """What the branch attends to, of each branch's states ``[1, heads, length, size]``."""
        if not self.before:
            return own
        return torch.cat([*(states[i][:, :, :count] for i, count in self.before), own], dim=2)


def _branches(pack: Pack, device: torch.device) -> list[_Branch]:
    parents = pack.parents.tolist()
    starts = [t for t, parent in enumerate(parents) if parent != t - 1 or t == 0]
    branches: list[_Branch] = []
    for start, stop in pairwise([*starts, len(parents)]):
        parent = parents[start]
        before: list[tuple[int, int]] = []
        if parent >= 0:
            above = bisect_right(starts, parent) - 1
            before = [*branches[above].before, (above, parent + 1 - starts[above])]
        branches.append(_Branch(stop - start, before, device))
    return branches


@contextmanager
def _branch_by_branch(config: Any, pack: Pack, device: torch.device) -> Iterator[list[_Branch]]:
    """Make the model's layers call :func:`_packed_attention` within the block."""
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATION, _packed_attention)
    usual = config._attn_implementation
    config._attn_implementation = _IMPLEMENTATION
    try:
        yield _branches(pack, device)
    finally:
        config._attn_implementation = usual


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rlskip_branches: list[_Branch],
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each branch to the tokens before it, in transformers' signature.

    Query, key and value have the shape ``[1, heads, T, size]``; the result ``[1, T, heads, size]``.
    """
    if attention_mask is not None:
        raise _not_exact("a mask that its layers make", module)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    # The gradient of a split is one concatenation, that of a slice as long as the whole pack.
    lengths = [branch.length for branch in rlskip_branches]
    queries, keys, values = (states.split(lengths, dim=2) for states in (query, key, value))
    outputs = [
        nn.functional.scaled_dot_product_attention(
            queries[i],
            branch.keys(keys[i], keys),
            branch.keys(values[i], values),
            attn_mask=branch.mask if branch.before else None,
            is_causal=not branch.before,
            scale=scaling,
        )
        for i, branch in enumerate(rlskip_branches)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
