"""Whatever kind of batch holds some rows, the same columns, rows, uids and meta come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.columns import (
    PromptsError,
    cells_of,
    column_length,
    columns_of,
    drop_fields,
    field_names,
    first_uid,
    is_data_proto,
    length_of,
    objects_of,
    own,
    rows_of,
    select,
    uids_of,
)
from rlskip.batch.meta import is_validation, meta_of, plain
from rlskip.batch.tables import DataProtoParts, Ragged, Table, Whole

Row = dict[str, Any]


def _whole(row: Row) -> Row:
    """All that a row holds, as plain Python."""
    return {**row, "image": {"size": [row["x"]]}, "source": "web"}


def _tensordict(rows: list[Row]) -> TensorDict:
    ids = torch.nested.as_nested_tensor([torch.tensor(r["ids"]) for r in rows], layout=torch.jagged)
    return TensorDict(
        {
            "uid": NonTensorStack(*(row["uid"] for row in rows)),
            "x": torch.tensor([row["x"] for row in rows]),
            "ids": ids,
            "image": TensorDict({"size": torch.tensor([[row["x"]] for row in rows])}, [len(rows)]),
            "tools": NonTensorStack(*(row["tools"] for row in rows)),
            "source": NonTensorData("web", batch_size=[len(rows)]),
        },
        [len(rows)],
    )


def _lazy(rows: list[Row]) -> Any:
    def one(row: Row) -> TensorDict:
        fields = {
            **{name: NonTensorData(row[name]) for name in ("uid", "tools")},
            **{name: torch.tensor(row[name]) for name in ("x", "ids")},
            "image": TensorDict({"size": torch.tensor([row["x"]])}, []),
            "source": NonTensorData("web"),
        }
        return TensorDict(fields, [])

    return LazyStackedTensorDict(*map(one, rows), stack_dim=0)


def _proto(rows: list[Row]) -> DataProtoParts:
    tensors = _tensordict(rows).select("x", "ids", "image", "source")
    objects = {name: objects_of([row[name] for row in rows]) for name in ("uid", "tools")}
    return DataProtoParts(tensors, objects, {"global_steps": 3})


def _table(rows: list[Row]) -> Table:
    columns = {
        "uid": [row["uid"] for row in rows],
        "x": np.array([row["x"] for row in rows]),
        "ids": Ragged(np.array(row["ids"]) for row in rows),
        "image": Table({"size": np.array([[row["x"]] for row in rows])}, [len(rows)]),
        "tools": [row["tools"] for row in rows],
        "source": Whole("web"),
    }
    return Table(columns, [len(rows)])


def _mapping(rows: list[Row]) -> dict[str, Any]:
    columns = {name: [_whole(row)[name] for row in rows] for name in _whole(rows[0])}
    uids, numbers = tuple(columns["uid"]), np.array(columns["x"])
    return columns | {"uid": uids, "x": numbers, "source": "web"}


def _list(rows: list[Row]) -> list[Row]:
    return [_whole(row) | {"ids": torch.tensor(row["ids"])} for row in rows]


KINDS: dict[str, Callable[[list[Row]], Any]] = {
    "TensorDict": _tensordict,
    "lazy": _lazy,
    "DataProto": _proto,
    "table": _table,
    "mapping": _mapping,
    "rows": _list,
}

_row = st.fixed_dictionaries(
    {
        "uid": st.text("abc", min_size=1, max_size=4),
        "x": st.integers(-9, 9),
        "ids": st.lists(st.integers(0, 9), min_size=1, max_size=4),
        "tools": st.lists(st.text(max_size=3), max_size=3),
    }
)
some_rows = st.lists(_row, min_size=1, max_size=6, unique_by=lambda row: row["uid"])


def _bare(value: Any) -> Any:
    """A cell as plain Python, so that kinds can be compared."""
    if isinstance(value, dict | TensorDict | LazyStackedTensorDict):
        return {str(key): _bare(item) for key, item in value.items()}
    return plain(value)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(rows=some_rows)
def test_every_kind_has_the_same_rows(kind: str, rows: list[Row]) -> None:
    batch = KINDS[kind](rows)
    assert length_of(batch) == len(rows)
    assert [_bare(row) for row in rows_of(batch)] == list(map(_whole, rows))
    assert uids_of(batch) == [row["uid"] for row in rows]
    assert first_uid([object(), 7, "a", {"x": [1]}, batch]) == rows[0]["uid"]
    assert field_names(batch) == {"uid", "x", "ids", "image", "tools", "source"}
    for name in ("uid", "x", "ids", "tools"):
        column = columns_of(batch)[name]
        assert column_length(column) == len(rows)
        assert [_bare(cell) for cell in cells_of(column) or ()] == [row[name] for row in rows]
        assert cells_of(column, len(rows) + 1) is None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data(), rows=some_rows)
def test_selected_rows_are_a_batch_of_the_same_kind(
    kind: str, data: st.DataObject, rows: list[Row]
) -> None:
    batch = KINDS[kind](rows)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6, unique=True))
    some = select(batch, picked)
    assert type(some) is type(batch)
    assert is_data_proto(some) == is_data_proto(batch)
    everything = [_bare(row) for row in rows_of(batch)]
    assert [_bare(row) for row in rows_of(some)] == [everything[i] for i in picked]
    assert [_bare(row) for row in rows_of(batch)] == everything


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_fields_leave_the_batch_as_it_was(kind: str) -> None:
    rows: list[Row] = [{"uid": u, "x": i, "ids": [i], "tools": []} for i, u in enumerate("ab")]
    batch = KINDS[kind](rows)
    kept = drop_fields(batch, ["x", "tools", "unknown"])
    assert type(kept) is type(batch)
    assert field_names(kept) == {"uid", "ids", "image", "source"}
    assert field_names(batch) >= {"x", "tools"}
    left = [{k: v for k, v in _whole(row).items() if k not in ("x", "tools")} for row in rows]
    assert [_bare(row) for row in rows_of(kept)] == left
    assert drop_fields(batch, ["unknown"]) is batch


@pytest.mark.parametrize(
    "value",
    [None, 7, "text", b"x", object(), [], (), [1, 2], {"a", "b"}, torch.ones(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_batch_has_no_columns(value: Any) -> None:
    assert columns_of(value) == {}
    assert rows_of(value) == []
    assert field_names(value) == set()
    assert drop_fields(value, ["x"]) is value
    assert not is_data_proto(value)
    with pytest.raises(PromptsError, match="no uids"):
        uids_of(value)


@pytest.mark.parametrize(
    "column",
    [torch.tensor(1), np.array(1), np.float64(1), NonTensorData([1, 2]), "ab", 1, None, {"a": 1}],
    ids=repr,
)
def test_a_value_for_the_whole_batch_is_in_every_row(column: Any) -> None:
    assert column_length(column) is None
    assert cells_of(column) is None
    batch = {"uid": ["a", "b"], "whole": column}
    assert [_bare(row["whole"]) for row in rows_of(batch)] == [_bare(column)] * 2
    assert select(batch, [1])["whole"] is column


def test_uids_decide_how_many_rows_a_mapping_has() -> None:
    assert length_of({"uid": ["a", "b"], "stop": [1, 2, 3], "words": [1, 2, 3]}) == 2
    assert length_of({"stop": [1, 2, 3], "x": [1, 2], "y": np.ones(2)}) == 2
    assert length_of({"stop": [1, 2, 3], "x": [1, 2]}) == 3
    assert length_of({"temperature": 1.0}) == 0
    assert select({"uid": ["a", "b"], "stop": [1, 2, 3]}, [1]) == {"uid": ["b"], "stop": [1, 2, 3]}


def test_prompts_without_uids_or_with_one_twice() -> None:
    with pytest.raises(PromptsError, match="no uids"):
        uids_of({"ids": [1, 2]})
    with pytest.raises(PromptsError, match="no uids"):
        uids_of({"uid": "a"})
    with pytest.raises(PromptsError, match="given twice: a"):
        uids_of({"uid": ["a", "a"]})
    assert uids_of({"uid": torch.tensor([3, 1])}) == ["3", "1"]
    assert first_uid([{"uid": "a"}]) == "a"
    assert first_uid([{"uid": NonTensorData("a")}]) == "a"
    assert first_uid([{"ids": [1]}]) is None


@pytest.mark.parametrize("wrap", [lambda m: {"meta_info": m}, lambda m: DataProtoParts(None, {}, m),
                                  lambda m: TensorDict({}, []).set_non_tensor("meta_info", m)],
                         ids=["mapping", "DataProto", "TensorDict"])  # fmt: skip
def test_meta_is_found_in_every_kind(wrap: Callable[[Any], Any]) -> None:
    assert meta_of(wrap({"validate": True, "step": 3})) == {"validate": True, "step": 3}
    assert is_validation(wrap({"validate": True}))
    assert not is_validation(wrap({"validate": False}))
    assert meta_of({"meta_info": 7}) == {}
    assert meta_of(7) == {}


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: {"a": [(x, 1)]}, lambda x: x["a"][0][0]),
        (NonTensorData, lambda x: x.data),
        (lambda x: TensorDict({"a": NonTensorData(x)}, []), lambda x: x["a"]),
    ],
)
@pytest.mark.parametrize("value", [[1, 2], np.array([1, 2])])
@pytest.mark.filterwarnings("error")
def test_a_copy_keeps_its_values(
    value: Any, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    inner = value.copy()
    copied = own(wrap(inner))
    inner[0] = 7
    assert list(unwrap(copied)) == [1, 2]


@pytest.mark.parametrize("view", [lambda t: t[1], lambda t: t.T, lambda t: t[:1].expand(4, 3)])
def test_a_view_is_copied_without_what_it_views(view: Callable[[Any], Any]) -> None:
    base = torch.arange(6).reshape(2, 3)
    expected = view(base).tolist()
    copied = own(view(base))
    base.zero_()
    assert copied.tolist() == expected
    assert copied.untyped_storage().nbytes() == 8 * copied.numel()
