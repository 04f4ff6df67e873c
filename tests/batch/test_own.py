"""A copy of a value shares no memory with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rlskip.batch.columns import own


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
