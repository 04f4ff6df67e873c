"""KVBatchMeta: the same fields and methods as TransferQueue's."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.queue import KVBatchMeta


def batch(*keys, **more):
    return KVBatchMeta(list(keys), [{"key": key} for key in keys], "train", **more)


def test_rows_are_selected_in_the_order_asked_for():
    picked = batch("a", "b", "c", extra_info={"t": 1}).select_keys(["c", "a"])
    assert picked == batch("c", "a", extra_info={"t": 1})
    with pytest.raises(RuntimeError, match="nope"):
        batch("a").select_keys(["nope"])


def test_reordering_takes_keys_and_tags_along():
    rows = batch("a", "b", "c")
    rows.reorder([2, 0, 1])
    assert rows == batch("c", "a", "b")
    with pytest.raises(ValueError, match="permutation"):
        rows.reorder([0, 0, 1])


@given(st.integers(0, 9), st.integers(1, 5))
def test_chunks_are_even_and_concatenate_to_the_whole(size, chunks):
    whole = batch(*map(str, range(size)), fields=["x"], extra_info={"rollout_root_keys": ["u"]})
    parts = whole.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert KVBatchMeta.concat(parts) == (whole if size else KVBatchMeta())


def test_batches_that_do_not_belong_together_are_not_concatenated():
    for other, message in (
        (KVBatchMeta(["b"], [{}], "val"), "partitions"),
        (batch("b", fields=["x"]), "fields"),
        (batch("b", extra_info={"temperature": 0.5}), "temperature"),
        (batch("a"), "duplicates"),
    ):
        with pytest.raises(ValueError, match=message):
            KVBatchMeta.concat([batch("a", extra_info={"temperature": 1.0}), other])


def test_tags_and_extra_info_are_copied():
    tag, extra = {"n": 1}, {"roots": ["u"]}
    meta = KVBatchMeta(["a"], [tag], "train", extra_info=extra)
    tag["n"], extra["roots"] = 2, []
    assert meta.tags == [{"n": 1}]
    assert meta.extra_info == {"roots": ["u"]}


def test_each_key_comes_once_with_one_tag():
    with pytest.raises(ValueError, match="2 keys, but 1 tags"):
        KVBatchMeta(["a", "b"], [{}])
    with pytest.raises(ValueError, match="duplicates among the keys"):
        KVBatchMeta(["a", "a"], [{}, {}])


def test_the_original_type_has_the_same_fields():
    original = pytest.importorskip("transfer_queue").KVBatchMeta
    names = [field.name for field in dataclasses.fields(original)]
    assert names == [field.name for field in dataclasses.fields(KVBatchMeta)]
    ours = batch("a", "b", "c", "d", "e", fields=["x"], extra_info={"rollout_root_keys": ["u"]})
    theirs = original(**vars(ours))
    for mine, its in zip(ours.chunk(3), theirs.chunk(3), strict=True):
        assert vars(mine).items() <= vars(its).items()
