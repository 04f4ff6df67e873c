"""What counts as the same prompts, and what as the same call."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlskip.store import Identity, UnsupportedTypeError, fingerprint


def _prompts() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(12).reshape(3, 4),
        "raw_prompt": np.array([[{"role": "user", "content": "hi"}], [], None], dtype=object),
        "weights": np.ones(3, np.float32),
        "task": ["a", "b", "c"],
        "uid": ["1", "2", "3"],
    }


def test_the_same_prompts_have_the_same_fingerprint() -> None:
    prompts = _prompts()
    assert fingerprint(prompts) == fingerprint(_prompts())
    assert len(fingerprint(prompts)) == 32
    int(fingerprint(prompts), 16)


def test_in_another_process_too() -> None:
    code = "from rlskip.store import fingerprint; print(fingerprint({'a': ['x', {'b', 'c'}, 1.5]}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == fingerprint({"a": ["x", {"c", "b"}, 1.5]})


def test_it_is_frozen() -> None:
    """Dumps on disk carry these: another value makes them all mismatch."""
    plain = {"ids": torch.arange(5), "text": ["a", None, 1.5, True], "n": np.int64(3)}
    assert fingerprint(plain) == "ec84abfbfd4df9ad5360ea7d52572b4e"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(uid=["9", "8", "7"]),
        lambda p: p.update(request_id="r", sample_id="s", global_steps=7, meta_info={"t": 1}),
        lambda p: p.update(input_ids=p.pop("input_ids")),  # another order of keys
        lambda p: p.update(input_ids=p["input_ids"].T.contiguous().T),  # another layout
        lambda p: p.update(input_ids=p["input_ids"].numpy()),
        lambda p: p.update(task=("a", "b", "c")),
        lambda p: p.update(task=np.array(["a", "b", "c"], dtype=object)),
        lambda p: p.update(weights=torch.ones(3)),
        lambda p: p.update(weights=torch.nn.Parameter(torch.ones(3))),
    ],
)
def test_circumstance_does_not_count(change: Any) -> None:
    changed = _prompts()
    change(changed)
    assert fingerprint(changed) == fingerprint(_prompts())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["input_ids"].__setitem__((2, 3), 99),
        lambda p: p.update(input_ids=p["input_ids"].reshape(4, 3)),
        lambda p: p.update(input_ids=p["input_ids"].to(torch.int32)),
        lambda p: p.update(input_ids=p["input_ids"][[1, 0, 2]]),  # another order of prompts
        lambda p: p["raw_prompt"][0][0].update(content="ho"),
        lambda p: p["raw_prompt"][0][0].update(uid="within a prompt it is content"),
        lambda p: p.pop("task"),
        lambda p: p.update(new=None),
        lambda p: p.update(task=["ab", "", "c"]),
        lambda p: p.update(task=["a", "b", b"c"]),
    ],
)
def test_content_counts(change: Any) -> None:
    changed = _prompts()
    change(changed)
    assert fingerprint(changed) != fingerprint(_prompts())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_anything_that_dumps_keep_has_a_fingerprint(
    data: st.DataObject, values: st.SearchStrategy
) -> None:
    value = data.draw(values)
    assert fingerprint(value) == fingerprint(value)


@given(st.lists(st.text()), st.lists(st.text()))
def test_parts_do_not_run_together(a: list[str], b: list[str]) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert fingerprint([a, b]) != fingerprint([[*a, *b]])


def test_batches_count_by_their_fields() -> None:
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


def test_volatile_fields_are_the_callers_to_choose() -> None:
    assert fingerprint({"a": 1, "b": 2}, volatile=["b"]) == fingerprint({"a": 1}, volatile=[])


def test_what_has_no_codec_is_named() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"builtins\.object"):
        fingerprint({"a": [object()]})


# -- identities --------------------------------------------------------------------------


def _identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "prompts": "ab",
        "n": 8,
        "prompt_len": 1024,
        "response_len": 4096,
        "sampling": {"temperature": 1.0, "top_p": 0.9, "stop": ("a", "b")},
        "extra": {"tools": {"search": True}},
        "model": "some/model",
        "versions": {"torch": "2.13.0"},
    }
    return Identity(**{**values, **changes})


def test_equal_identities_do_not_differ() -> None:
    assert _identity().differences(_identity()) == ([], [])
    through_json = Identity.from_json(json.loads(json.dumps(_identity().as_json())))
    assert through_json == _identity()
    assert _identity().differences(through_json) == ([], [])


@pytest.mark.parametrize(
    ("changes", "must", "warn"),
    [
        ({"n": 4}, ["n: 4 now, 8 in the dump"], []),
        ({"prompts": "cd"}, ["prompts: 'cd' now, 'ab' in the dump"], []),
        (
            {"sampling": {"temperature": 0.7, "stop": ["a", "b"], "min_p": 0.1}},
            [
                "sampling.min_p: 0.1 now, absent in the dump",
                "sampling.temperature: 0.7 now, 1.0 in the dump",
                "sampling.top_p: absent now, 0.9 in the dump",
            ],
            [],
        ),
        (
            {"extra": {"tools": {"search": False}}},
            ["extra.tools.search: False now, True in the dump"],
            [],
        ),
        ({"model": "another"}, [], ["model: 'another' now, 'some/model' in the dump"]),
        ({"versions": {"torch": "3"}}, [], ["versions.torch: '3' now, '2.13.0' in the dump"]),
        ({"response_len": None}, ["response_len: None now, 4096 in the dump"], []),
    ],
)
def test_differences_are_named(changes: dict, must: list[str], warn: list[str]) -> None:
    assert _identity(**changes).differences(_identity()) == (must, warn)


def test_numbers_are_equal_by_value_but_flags_are_no_numbers() -> None:
    def sampling(value: Any) -> Identity:
        return _identity(sampling={"x": value})

    assert sampling(1).differences(sampling(1.0)) == ([], [])
    assert sampling(np.float64(1)).differences(sampling(1.0)) == ([], [])
    assert sampling(True).differences(sampling(1))[0] == ["sampling.x: True now, 1 in the dump"]
    assert sampling(1).differences(sampling(True))[0] == ["sampling.x: 1 now, True in the dump"]
