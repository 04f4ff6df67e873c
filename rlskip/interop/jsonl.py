"""Rollouts as lines of JSON, one object for each row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rlskip._human import finite
from rlskip.runs.rollouts import Rollouts

_SURROGATE = re.compile("[\ud800-\udfff]")


def lines(rollouts: Rollouts) -> Iterator[str]:
    """The rows, as :meth:`~rlskip.runs.opened.Scope.iter_rows` gives them."""
    return map(line, rollouts)


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", encoded)
