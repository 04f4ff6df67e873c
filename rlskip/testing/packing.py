"""An oracle for packing: a packed forward pass against each row on its own, in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Forward = Callable[[nn.Module, dict[str, list[list[int]]]], Sequence[Tensor]]


def assert_exact_packing(
    model: nn.Module,
    rows: dict[str, list[list[int]]] | None = None,
    forward: Forward | None = None,
    *,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> None:
    """Check a packed forward pass against the same model on each row alone.

    Log-probabilities, a loss and the gradient of every parameter are compared, in float64 and
    with the casts to float32 inside the model left out (layers of transformers normalise and
    exponentiate in float32, whose rounding would hide an error of the packing).

    Parameters
    ----------
    model
        A causal language model of transformers. It is copied; the copy is in evaluation mode.
    rows
        `input_ids` and `loss_mask` as lists of rows. By default the rows of
        :func:`generated_tries`, one check for each of them.
    forward
        Called with the copy and the rows; returns for each row the log-probabilities of its
        tokens, a tensor of ``(length,)``. Values at a row's first token and at tokens that
        `loss_mask` leaves out are ignored. By default rlskip's :func:`rlskip.merge.packed_forward`.
    tolerance
        The largest absolute difference of log-probabilities and loss, and the largest difference
        of a gradient relative to the largest entry of that parameter's gradient or 1.
    seed
        Of the weights of the loss, one per token, as advantages are.

    Raises
    ------
    AssertionError
        It names the row and the token, or the parameter, and both values.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    for case in [rows] if rows is not None else generated_tries(vocabulary):
        _compare(model, case, forward or _rlskips, tolerance, seed)


def generated_tries(vocabulary: int, seed: int = 0) -> Iterator[dict[str, list[list[int]]]]:
    """Rows that meet every shape of a trie.

    Branches at each depth, rows that end inside another one, identical rows, rows without a
    trained token, responses of one token, a row of one token, nothing shared, chains of turns with
    observations between them, and random tries.
    """
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return [int(token) for token in rng.integers(1, vocabulary, n)]

    prompt = draw(6)
    one, two = draw(5), draw(5)
    yield _trained_after(6, [[*prompt, *one], [*prompt, *two], [*prompt, *two]])
    yield _trained_after(2, [[*prompt[:d], *draw(8 - d)] for d in range(8)])
    yield _trained_after(3, [prompt[:d] for d in range(1, 7)])
    yield _trained_after(6, [prompt, [*prompt, 1], [*prompt, 2], [*prompt, 1, 2]])
    yield _trained_after(1, [draw(1), draw(7), draw(3)])
    turns = [[*prompt, *one], [*prompt, *one, *two], [*prompt, *one, *two, *draw(4)]]
    rows = _trained_after(6, [*turns, [*turns[1], *draw(3)]])
    for mask in rows["loss_mask"]:
        mask[11:14] = [0] * len(mask[11:14])
    yield rows
    for _ in range(6):
        lengths = rng.integers(1, 10, rng.integers(1, 9))
        ids = [[int(token) for token in rng.integers(1, 3, n)] for n in lengths]
        yield {
            "input_ids": ids,
            "loss_mask": [[int(flag) for flag in rng.integers(0, 2, len(row))] for row in ids],
        }


def _trained_after(prompt: int, rows: list[list[int]]) -> dict[str, list[list[int]]]:
    masks = [[int(place >= prompt) for place in range(len(row))] for row in rows]
    return {"input_ids": rows, "loss_mask": masks}


def _compare(
    model: nn.Module,
    rows: dict[str, list[list[int]]],
    forward: Forward,
    tolerance: float,
    seed: int,
) -> None:
    ids, masks = rows["input_ids"], rows["loss_mask"]
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(len(row), dtype=torch.float64, generator=generator)
        * torch.tensor([0, *mask[1:]], dtype=torch.float64)
        for row, mask in zip(ids, masks, strict=True)
    ]
    expected, found = (_run(model, rows, how, weights) for how in (_one_by_one, forward))
    for row, (a, b) in enumerate(zip(expected.log_probs, found.log_probs, strict=True)):
        if a.shape != b.shape:
            raise AssertionError(
                f"row {row}: {tuple(b.shape)} log-probs, expected {tuple(a.shape)}"
            )
        compared = torch.tensor([0, *masks[row][1:]], dtype=torch.bool)
        differs = compared & ~((a - b).abs() <= tolerance)  # NaN differs
        for token in differs.nonzero()[:1].flatten().tolist():
            raise AssertionError(
                f"row {row}, token {token}: log-prob {b[token]:.12g} packed, {a[token]:.12g} "
                f"alone (rows {ids})"
            )
    if not abs(expected.loss - found.loss) <= tolerance * max(1.0, abs(expected.loss)):
        raise AssertionError(f"loss {found.loss:.12g} packed, {expected.loss:.12g} alone")
    for name, gradient in expected.gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        off_by = float((gradient - found.gradients[name]).abs().max())
        if not off_by <= tolerance * scale:
            raise AssertionError(f"gradient of {name}: differs by {off_by:.3g} (rows {ids})")


class _Result(NamedTuple):
    log_probs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def _run(
    model: nn.Module, rows: dict[str, list[list[int]]], forward: Forward, weights: list[Tensor]
) -> _Result:
    model = copy.deepcopy(model).double().eval()
    for module in model.modules():
        module.forward = _in_float64(module.forward)  # type: ignore[method-assign]
    log_probs = list(forward(model, rows))
    loss = sum(
        ((w * values)[w != 0].sum() for w, values in zip(weights, log_probs, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    if loss.requires_grad:
        loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return _Result([values.detach() for values in log_probs], loss.item(), gradients)


def _one_by_one(model: nn.Module, rows: dict[str, list[list[int]]]) -> list[Tensor]:
    results = []
    for row in rows["input_ids"]:
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        after = torch.tensor(row[1:], dtype=torch.int64)
        chosen = logits.log_softmax(-1)[torch.arange(len(after)), after]
        results.append(torch.cat([chosen.new_zeros(1), chosen]))
    return results


def _rlskips(model: nn.Module, rows: dict[str, list[list[int]]]) -> list[Tensor]:
    from rlskip.merge.packed_forward import packed_forward
    from rlskip.merge.packing import pack

    results: dict[int, Tensor] = {}
    longest = max(map(len, rows["input_ids"]))
    for each in pack(rows, 2 * longest):
        log_probs = each.log_probs(packed_forward(model, each))
        results.update(zip(each.rows, log_probs.unbind(), strict=True))
    return [results[row] for row in range(len(results))]


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's `forward` under :class:`_StayInFloat64`.

    Each module is wrapped, and not the whole model, because gradient checkpointing calls the layers
    again in the backward pass, in which a mode of the forward pass has no effect.
    """

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _StayInFloat64.depth:
            return forward(*args, **kwargs)
        with _StayInFloat64():
            return forward(*args, **kwargs)

    return wrapped


class _StayInFloat64(TorchFunctionMode):
    """Cast to float64 where the code within casts to float32."""

    depth = 0

    def __enter__(self) -> Any:
        _StayInFloat64.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _StayInFloat64.depth -= 1
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)
