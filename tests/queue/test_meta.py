"""KVBatchMeta: the same fields as TransferQueue's."""

import dataclasses

import pytest

from rlskip.queue import KVBatchMeta


def test_tags_and_extra_info_are_copied():
    tag, extra = {"n": 1}, {"roots": ["u"]}
    meta = KVBatchMeta(["a"], [tag], "train", extra_info=extra)
    tag["n"], extra["roots"] = 2, []
    assert meta.tags == [{"n": 1}]
    assert meta.extra_info == {"roots": ["u"]}


def test_the_original_type_has_the_same_fields():
    original = pytest.importorskip("transfer_queue").KVBatchMeta
    ours = KVBatchMeta(["a", "b"], [{}, {"n": 1}], "train", ["x"], {"rollout_root_keys": ["u"]})
    assert [field.name for field in dataclasses.fields(original)] == list(vars(ours))
    assert vars(ours).items() <= vars(original(**vars(ours))).items()
