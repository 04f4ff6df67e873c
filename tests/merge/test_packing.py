"""Packs: each shared token once, and every row's tokens, ancestors and labels where they belong."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlskip.merge import MergeError, Pack, pack
from rlskip.merge.token_rows import token_rows
from rlskip.merge.trie import branches, cut
from rlskip.testing import assert_exact_packing

# Two tokens make rows that share prefixes, continue each other and repeat.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


def paths(packed: Pack) -> dict[int, list[int]]:
    """The positions of each row."""
    spans = pairwise(packed.offsets.tolist())
    return {
        row: packed.path[slice(*span)].tolist()
        for row, span in zip(packed.rows, spans, strict=True)
    }


@given(ROWS, st.integers(7, 20), st.data())
def test_a_position_attends_to_its_rows_tokens_and_to_nothing_else(
    rows: list[list[int]], max_tokens: int, data: st.DataObject
) -> None:
    groups = data.draw(
        st.none() | st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))
    )
    packs = pack(rows, max_tokens, groups=groups)
    assert sorted(row for each in packs for row in each.rows) == list(range(len(rows)))
    for each in packs:
        assert len(each) <= max_tokens
        mask = each.dense_mask()
        for row, path in paths(each).items():
            assert each.input_ids[path].tolist() == rows[row]
            assert each.position_ids[path].tolist() == list(range(len(path)))
            assert each.parents[path].tolist() == [-1, *path[:-1]]
            assert each.labels[path[:-1]].tolist() == rows[row][1:]
            for depth, position in enumerate(path):
                assert mask[position].nonzero().flatten().tolist() == path[: depth + 1]
        assert each.path.unique().tolist() == list(range(len(each))), "no position is unused"
        if groups is not None:
            shared = [
                {groups[r] for r, p in paths(each).items() if t in p} for t in range(len(each))
            ]
            assert all(len(groups_of) == 1 for groups_of in shared)


@given(ROWS)
def test_a_position_stands_for_each_token_and_the_token_after_it(rows: list[list[int]]) -> None:
    [packed] = pack(rows, 1000)
    nodes = {
        (tuple(row[: depth + 1]), row[depth + 1] if depth + 1 < len(row) else None)
        for row in rows
        for depth in range(len(row))
    }
    # The end of a row needs no position of its own where another row goes on.
    going_on = {prefix for prefix, after in nodes if after is not None}
    assert len(packed) == sum(
        after is not None or prefix not in going_on for prefix, after in nodes
    )


def fewest_positions(rows: list[list[int]], max_tokens: int) -> int:
    """The fewest positions over all ways to cut sorted rows into neighbours."""
    ordered = sorted(rows)
    best = [0] + [10**9] * len(rows)
    for stop in range(1, len(rows) + 1):
        for start in range(stop):
            size = branches(token_rows(ordered[start:stop]), np.arange(stop - start)).size
            if size <= max_tokens:
                best[stop] = min(best[stop], best[start] + size)
    return best[-1]


@given(ROWS, st.integers(7, 12))
def test_a_trie_is_cut_where_the_fewest_tokens_are_computed_twice(
    rows: list[list[int]], max_tokens: int
) -> None:
    trie = branches(token_rows(rows), np.arange(len(rows)))
    parts = list(cut(trie, max_tokens))
    assert sum(part.size for part in parts) == fewest_positions(rows, max_tokens)


def padded(rows: list[list[int]], width: int, left: bool) -> torch.Tensor:
    return torch.tensor(
        [[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows]
    )


def jagged(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_rows_may_come_in_any_form() -> None:
    ids, trained = [[5, 6, 7], [5, 6], [5, 9, 9, 9]], [[0, 1, 1], [0, 1], [0, 0, 1, 1]]
    exists = [[1] * len(row) for row in ids]
    forms: dict[str, Any] = {
        "lists": {"input_ids": ids, "loss_mask": trained},
        "arrays": {"input_ids": list(map(np.array, ids)), "loss_mask": trained},
        "no attention mask": {"input_ids": ids, "loss_mask": trained, "attention_mask": None},
        "a mask of bfloat16": {
            "input_ids": ids,
            "loss_mask": [torch.tensor(row, dtype=torch.bfloat16) for row in trained],
        },
        "jagged": TensorDict(
            {"input_ids": jagged(ids), "loss_mask": jagged(trained)}, batch_size=[3]
        ),
    }
    for side in (True, False):
        forms[f"padded, left={side}"] = {
            name: padded(rows, 6, side)
            for name, rows in (
                ("input_ids", ids), ("attention_mask", exists), ("loss_mask", trained)
            )
        }  # fmt: skip
    for name, form in forms.items():
        [packed] = pack(form, 100)
        for field in ("input_ids", "position_ids", "path", "offsets", "trained"):
            assert (
                getattr(packed, field).tolist()
                == getattr(pack(forms["lists"], 100)[0], field).tolist()
            ), name


@pytest.mark.parametrize(
    ("rows", "arguments", "where"),
    [
        ({"loss_mask": [[1]]}, {}, "input_ids"),
        ([[1], []], {}, "input_ids[1]"),
        ([[1, 2], [1, 2, 3]], {"max_tokens": 2}, "input_ids[1]"),
        ([[1]], {"max_tokens": "8"}, "max_tokens"),
        ([[1]], {"max_tokens": float("nan")}, "max_tokens"),
        ([[0.5]], {}, "input_ids"),
        ([[-1]], {}, "input_ids"),
        ([[[1]]], {}, "input_ids[0]"),
        (torch.zeros(2, dtype=torch.int64), {}, "input_ids"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1]]}, {}, "loss_mask"),
        ([[1], [2]], {"groups": ["a"]}, "groups"),
        ([[1], [2]], {"groups": ["a", []]}, "groups[1]"),
    ],
)
def test_rows_that_cannot_be_packed(rows: Any, arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(MergeError) as error:
        pack(rows, **{"max_tokens": 10, **arguments})
    assert error.value.where == where


def test_groups_may_be_a_tensor() -> None:
    [packed] = pack([[1, 2], [1, 3], [1, 2]], 10, groups=torch.tensor([0, 1, 0]))
    assert len(packed) == 4


def test_nothing_makes_no_pack() -> None:
    assert pack([], 10) == []


@given(ROWS, st.booleans(), st.data())
@settings(max_examples=40)
def test_values_come_back_per_row(
    rows: list[list[int]], only_needed: bool, data: st.DataObject
) -> None:
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=len(r), max_size=len(r))) for r in rows]
    for each in pack({"input_ids": rows, "loss_mask": masks}, 12):
        logits = torch.randn(len(each), 3, dtype=torch.float64)
        given_logits = logits[each.needed] if only_needed else logits
        log_probs, entropy = each.log_probs(given_logits), each.entropy(given_logits)
        for place, (row, path) in enumerate(paths(each).items()):
            expected = logits[path[:-1]].log_softmax(-1)
            mask = torch.tensor(masks[row][1:])
            chosen = expected[torch.arange(len(path) - 1), rows[row][1:]] * mask
            entropies = -(expected.exp() * expected).sum(-1) * mask
            for found, values in ((log_probs[place], chosen), (entropy[place], entropies)):
                assert torch.allclose(found, torch.cat([values.new_zeros(1), values]))


def test_half_precision_is_computed_in_float32_and_other_sizes_are_refused() -> None:
    [packed] = pack([[1, 2, 3]], 10)
    assert packed.log_probs(torch.zeros(3, 4, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(MergeError) as error:
        packed.log_probs(torch.zeros(7, 4))
    assert error.value.where == "logits"


def test_the_block_mask_is_the_dense_mask() -> None:
    [packed] = pack([[1, 2, 3, 4], [1, 2, 5], [1, 2], [7]], 100)
    mask = packed.block_mask(BLOCK_SIZE=1).to_dense()[0, 0].bool()
    assert torch.equal(mask, packed.dense_mask())


class Bigrams(torch.nn.Module):
    """A language model of which each token depends on the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9))
        self.table = torch.nn.Embedding(9, 9)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.mark.parametrize("spoilt", [None, 1, 2])
def test_the_oracle_ignores_values_that_no_loss_uses_and_names_others(spoilt: int | None) -> None:
    def forward(model: torch.nn.Module, rows: dict[str, list[list[int]]]) -> list[torch.Tensor]:
        (ids,) = rows["input_ids"]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        found = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        values = torch.cat([found.new_tensor([torch.nan]), found])
        return [values if spoilt is None else values.index_fill(0, torch.tensor(spoilt), torch.nan)]

    rows = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 1]]}
    names = pytest.raises(AssertionError, match="row 0, token 2")
    with names if spoilt == 2 else nullcontext():
        assert_exact_packing(Bigrams(), rows, forward)
