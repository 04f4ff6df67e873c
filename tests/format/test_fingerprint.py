"""What counts as the same prompts."""

from __future__ import annotations

import enum
import io
import time
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from rlskip.store import UnsupportedTypeError, fingerprint


def _prompts() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(12).reshape(3, 4),
        "raw_prompt": np.array([[{"role": "user", "content": "hi"}], [], None], dtype=object),
        "task": ["a", "b", "c"],
        "uid": ["1", "2", "3"],
        "extra_info": [{"index": i, "uid": f"{i}"} for i in range(3)],
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(uid=["9", "8", "7"]),
        lambda p: p.update(request_id="r", sample_id="s", global_steps=7, meta_info={"t": 1}),
        lambda p: p.update(created_at=time.time(), timestamp=[1, 2, 3]),
        lambda p: [row.update(uid="9", timestamp=time.time()) for row in p["extra_info"]],
        lambda p: p.update(extra_info=NonTensorStack(*p["extra_info"])),
        lambda p: p.update(input_ids=p.pop("input_ids")),  # another order of keys
    ],
)
def test_uids_times_and_layout_do_not_change_the_fingerprint(change: Any) -> None:
    changed = _prompts()
    change(changed)
    assert fingerprint(changed) == fingerprint(_prompts())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["input_ids"].__setitem__((2, 3), 99),
        lambda p: p.update(input_ids=p["input_ids"][[1, 0, 2]]),  # another order of prompts
        lambda p: p["raw_prompt"][0][0].update(content="ho"),
        lambda p: p["raw_prompt"][0][0].update(uid="within a prompt it is content"),
        lambda p: p["extra_info"][2].update(index=7),
        lambda p: p.pop("task"),
        lambda p: p.update(new=None),
    ],
)
def test_content_changes_the_fingerprint(change: Any) -> None:
    changed = _prompts()
    change(changed)
    assert fingerprint(changed) != fingerprint(_prompts())


@given(st.lists(st.text()), st.lists(st.text()))
def test_adjacent_parts_are_hashed_separately(a: list[str], b: list[str]) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert fingerprint([a, b]) != fingerprint([[*a, *b]])


def test_batches_of_every_kind_are_compared_by_their_fields() -> None:
    class DataProto:
        def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
            self.batch, self.non_tensor_batch = batch, non_tensor_batch
            self.meta_info = meta_info

    ids, text = torch.arange(4).reshape(2, 2), np.array(["a", "b"], dtype=object)
    plain = {"ids": ids, "text": text}
    batch = TensorDict({"ids": ids}, [2])
    proto = DataProto(batch, {"text": text, "uid": text}, {"global_steps": 7})
    assert fingerprint(proto) == fingerprint(plain)
    batch["text"] = NonTensorStack("a", "b")
    assert fingerprint(batch) == fingerprint(plain)
    assert fingerprint(DataProto(None, {"text": text}, {})) == fingerprint({"text": text})


def test_the_caller_chooses_the_volatile_fields() -> None:
    assert fingerprint({"a": 1, "b": 2}, volatile=["b"]) == fingerprint({"a": 1}, volatile=[])


# -- equal values, dtypes and shapes ------------------------------------------------------


def _lazy(*parts: dict[str, Any]) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*(TensorDict(part, []) for part in parts))


_JAGGED = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
_ONE_ZERO = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
_ROWS = [torch.arange(2), torch.arange(2, 5)]
_NEGATIVE_NAN = np.array([0xFFF8_0000_0000_0001], "u8").view("f8")


class _Split(enum.Enum):
    TRAIN = "train"
    TEST = "test"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (3, np.int64(3)),
        (3, torch.tensor(3)),
        (3, np.array(3)),
        (0.5, torch.tensor(0.5, dtype=torch.bfloat16)),
        (True, torch.tensor(True)),
        ("a", np.str_("a")),
        (float("nan"), np.float32("nan")),
        (float("nan"), float(_NEGATIVE_NAN[0])),
        (np.array([1.0, np.nan]), np.array([1.0, _NEGATIVE_NAN[0]])),
        (torch.tensor([np.nan], dtype=torch.bfloat16), -torch.tensor([np.nan]).bfloat16()),
        (torch.tensor([0.0, 1]), torch.tensor([-0.0, 1])),
        (0.0, -0.0),
        ({1: "a"}, {np.int64(1): "a"}),
        (np.array([1, 2], ">i8"), np.array([1, 2], "<i8")),
        (np.array(["a", ""], "<U5"), np.array(["a", ""], ">U1")),
        (np.array([b"ab"], "S9"), np.array([b"ab"])),
        (np.array([1, "a"], object), [1, "a"]),
        (np.empty(0, object), []),
        (np.array([[1, 2], [3, 4]], object), [[1, 2], [3, 4]]),
        (_JAGGED, _ROWS),
        (_JAGGED, np.array([row.numpy() for row in _ROWS], object)),
        (TensorDict({"x": _JAGGED}, [2]), {"x": _ROWS}),
        (_lazy({"x": _ROWS[0]}, {"x": _ROWS[1]}), {"x": _JAGGED}),
        (_lazy({"x": torch.ones(2)}, {"x": torch.zeros(2)}), {"x": _ONE_ZERO}),
        (
            _lazy({"x": torch.ones(2), "t": "a"}, {"x": torch.zeros(2), "t": "b"}),
            {"x": _ONE_ZERO, "t": ["a", "b"]},
        ),
        (torch.ones(3), torch.nn.Parameter(torch.ones(3))),
        (Path("a"), "a"),
        (Path("a/b"), PurePosixPath("a/b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_have_equal_fingerprints(a: Any, b: Any) -> None:
    assert fingerprint({"field": a}) == fingerprint({"field": b})
    assert fingerprint([a]) == fingerprint((b,))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        ({1: "a"}, {"1": "a"}),
        ("a", b"a"),
        (np.array([1, 2]), np.array([1, 2], np.int32)),
        (np.array([1, 2]), np.array([1, 2], ">i4").astype("<i4")),
        (np.array([1, 2]), [1, 2]),
        (np.arange(4).astype(object), np.arange(4).reshape(2, 2).astype(object)),
        (np.empty((0, 2), object), np.empty(0, object)),
        (np.zeros(1000), np.where(np.arange(1000) == 500, 1.0, 0.0)),
        (torch.tensor([np.nan]), torch.tensor([np.inf])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (_JAGGED, [_ROWS[1], _ROWS[0]]),
        (_JAGGED, torch.arange(5)),
        (_lazy({"x": _ROWS[0]}, {"x": _ROWS[1]}), _lazy({"x": _ROWS[1]}, {"x": _ROWS[0]})),
        (_lazy({"x": 1, "y": 1}, {"x": 1}), _lazy({"x": 1, "y": 2}, {"x": 1})),
        ({"a", "b"}, ["a", "b"]),
        (_Split.TRAIN, _Split.TEST),
        (3, _Split.TRAIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_have_different_fingerprints(a: Any, b: Any) -> None:
    assert fingerprint({"field": a}) != fingerprint({"field": b})


def test_of_an_image_its_pixels_count_and_no_notes() -> None:
    images = pytest.importorskip("PIL.Image")
    notes = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
    notes.add_text("Software", "another")

    def png(pixel: int = 1, **options: Any) -> Any:
        file = io.BytesIO()
        images.new("L", (2, 2), pixel).save(file, "PNG", **options)
        return images.open(file)

    assert fingerprint([png()]) == fingerprint([png(dpi=(9, 9), pnginfo=notes)])
    assert fingerprint([png()]) == fingerprint([images.new("L", (2, 2), 1)])
    assert fingerprint([png()]) != fingerprint([png(2)])
    assert fingerprint([png()]) != fingerprint([png().convert("RGB")])
    assert fingerprint([png()]) != fingerprint([png(transparency=1)])


def test_an_incomparable_value_is_named(incomparable: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"prompts\[0\]\['field'\]") as caught:
        fingerprint([{"field": incomparable}])
    assert "annotate(prompts=...)" in caught.value.remedy
    assert len(str(caught.value)) < 800


def test_nesting_is_bounded() -> None:
    value: Any = 1
    for _ in range(150):
        value = [value]
    with pytest.raises(UnsupportedTypeError, match="nested deeper than 100 levels"):
        fingerprint(value)
