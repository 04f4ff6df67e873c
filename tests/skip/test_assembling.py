"""Rows of several batches as one, of every kind that a stage may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from rlskip.batch.columns import rows_of
from rlskip.batch.row_fields import RowFields
from rlskip.batch.tables import DataProtoParts
from rlskip.skip.assembling import Assembly, AssemblyError
from rlskip.skip.prompt_rows import some_rows


def ragged(values: list[int]) -> torch.Tensor:
    parts = [torch.arange(1 + value % 3) for value in values]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def proto(values: list[int]) -> DataProtoParts:
    wide = torch.tensor(values)[:, None, None].expand(-1, 3, 2).clone()
    return DataProtoParts(
        TensorDict({"value": torch.tensor(values), "wide": wide}, [len(values)]),
        {"name": np.array([f"n{v}" for v in values], object), "y": np.array(values) / 2},
        {"metrics": [{"v": v} for v in values], "same": [1, 2, 3, 4, 5, 6, 7]},
    )


def table(values: list[int]) -> TensorDict:
    columns = {
        "value": torch.tensor(values, dtype=torch.bfloat16),
        "part": ragged(values),
        "name": NonTensorStack(*(f"n{v}" for v in values)),
        "nested": TensorDict({"twice": 2 * torch.tensor(values)}, [len(values)]),
        "same": NonTensorData("all"),
        "many": NonTensorData([7, 8]),
    }
    return TensorDict(columns, [len(values)], device="cpu")


def stack(values: list[int]) -> Any:
    rows = [TensorDict({"value": torch.tensor(v), "many": torch.zeros(v % 3)}) for v in values]
    return lazy_stack(rows)


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "DataProto": proto,
    "TensorDict": table,
    "lazy stack": stack,
    "mapping": lambda values: {
        "value": values,
        "pair": tuple(values),
        "text": np.array([f"{v:b}" for v in values]),
        "flat": np.array(values, np.int32),
        "wide": np.array(values, np.float32)[:, None].repeat(2, 1),
        "extra": {"twice": [2 * v for v in values]},
        "same": {"x": 1},
    },
    "rows": lambda values: [{"value": v, "own": [v]} for v in values],
    "values": lambda values: values,
    "tensor": lambda values: torch.tensor(values)[:, None].repeat(1, 2),
    "array": lambda values: np.array(values),
}
NONE = RowFields()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value.keys()}  # noqa: SIM118 - a TensorDict
    return value


def rows(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [plain(row) for row in batch]
    found = rows_of(batch) or [*batch]
    if isinstance(batch, DataProtoParts):
        pairs = zip(found, batch.meta_info["metrics"], strict=True)
        found = [{**row, "metrics": metric} for row, metric in pairs]
    if isinstance(batch, dict):
        pairs = zip(found, batch["extra"]["twice"], strict=True)
        found = [{**row, "extra": twice} for row, twice in pairs]
    return [plain(row) for row in found]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_rows_of_any_batches_are_one_batch(kind: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    starts = [10 * i for i in range(len(sizes))]
    batches = [KINDS[kind]([*range(a, a + n)]) for a, n in zip(starts, sizes, strict=True)]
    places = [(i, row) for i, n in enumerate(sizes) for row in range(n)]
    wanted = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=6))
    chosen: list[list[int]] = [[] for _ in batches]
    picks = []
    for i, row in wanted:
        picks.append((i, len(chosen[i])))
        chosen[i].append(row)
    used = [i for i, some in enumerate(chosen) if some]
    parts = [some_rows(batches[i], NONE, chosen[i]) for i in used]
    picks = [(used.index(i), row) for i, row in picks]
    digests = [str(place) for place in wanted]
    found = Assembly(parts, NONE, picks, {}, digests, range(len(wanted)), {}).batch()
    assert type(found) is type(batches[0])
    originals = [rows(batch) for batch in batches]
    assert rows(found) == [originals[i][row] for i, row in wanted]
    if kind == "DataProto":
        assert found.meta_info["same"] == [1, 2, 3, 4, 5, 6, 7]
    if kind == "TensorDict":
        assert (found["same"], found["many"], found.device.type) == ("all", [7, 8], "cpu")
        assert found["value"].dtype is torch.bfloat16
        assert type(found["nested"]) is TensorDict


@pytest.mark.parametrize(
    ("pair", "what"),
    [
        (({"x": [1]}, {"x": [1], "y": [2]}), "some dumps have y"),
        (({"x": [1]}, [1]), "no rows"),
        ((5, 6), "a int: no rows"),
        (({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}), "nothing tells how it is padded"),
    ],
)
def test_what_is_not_one_batch_is_refused_by_name(pair: Any, what: str) -> None:
    with pytest.raises(AssemblyError, match=what):
        Assembly(pair, NONE, [(0, 0), (1, 0)], {}, ["a", "b"], [0, 1], {}).batch()


@pytest.mark.parametrize("kind", ["DataProto", "mapping", "TensorDict"])
def test_of_meta_info_only_what_all_have_is_kept(kind: str) -> None:
    def batch(step: int) -> Any:
        meta = {"timing": {"s": 0.1 * step}, "acc": step, f"only_{step}": 1, "same": {"n": 8}}
        said = np.array([step], object)
        if kind == "mapping":
            return {"said": said, "meta_info": meta}
        if kind == "TensorDict":
            return TensorDict({"said": torch.ones(1), "meta_info": NonTensorData(meta)}, [1])
        return DataProtoParts(None, {"said": said}, meta)

    parts = [batch(step) for step in (1, 2)]
    found = Assembly(parts, NONE, [(1, 0), (0, 0)], {}, ["a", "b"], [0, 1], {}).batch()
    meta = found.meta_info if kind == "DataProto" else found["meta_info"]
    assert meta == {"timing": {}, "same": {"n": 8}}


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"response_mask": (torch.ones(1, 2),) * 2}, "response_mask has 2 values in ro"),
        ({"response_mask": (torch.ones(1, 2), torch.ones(1, 3))}, "nothing tells how it is padded"),
        ({}, "the token that pads responses is not known"),
        (
            {"rollout_log_probs": ([[-1.0] * 3], [[-1.0] * 4])},
            "rollout_log_probs has 3 values in r",
        ),
    ],
)
def test_values_that_do_not_fit_their_tokens_are_neither_cut_nor_extended(
    more: dict[str, Any], what: str
) -> None:
    parts = []
    for i, width in enumerate((3, 4)):
        responses = torch.ones(1, width, dtype=torch.int64)
        parts.append({"responses": responses, **{name: pair[i] for name, pair in more.items()}})
    fields = RowFields.of(parts[0], {"pad": 0 if more else None})
    with pytest.raises(AssemblyError, match=what):
        Assembly(parts, fields, [(0, 0), (1, 0)], {}, ["a", "b"], [0, 1], {}).batch()


def test_empty_responses_are_padded_as_others_are() -> None:
    tokens = [torch.ones(1, width, dtype=torch.int64) for width in (0, 1, 2)]
    parts = [dict(zip("rwp", (tokens[w], tokens[w + 1], tokens[1]), strict=True)) for w in (0, 1)]
    fields = RowFields(prompt="p", response="r", attention="w")
    found = Assembly(parts, fields, [(0, 0), (1, 0)], {}, ["a", "b"], [0, 1], {}).batch()
    assert found["w"].tolist() == [[1, 0], [1, 1]]
