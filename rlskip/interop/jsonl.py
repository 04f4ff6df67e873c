"""Rollouts as lines of JSON, one object for each row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rlskip._human import finite
from rlskip.batch.columns import column_length
from rlskip.runs.decoding import Decoder
from rlskip.runs.on_disk import Dump
from rlskip.runs.trajectories import plain, rollout_columns, sessions_of, trajectories_of, values

_SURROGATE = re.compile("[\ud800-\udfff]")


def lines(dump: Dump, decoder: Decoder | None) -> Iterator[str]:
    """The rows of a dump. JSON has no NaN and no infinity: null is written.

    Each column of the run keeps its name and its values; a single value for the whole batch is in
    every line. Added are the step, the row, group (``uid``), session and turn, and the prompt and
    the response without padding; a name that the run already uses for something else gets the
    prefix ``rlskip_``.
    """
    columns = rollout_columns(dump.load(into="numpy"))
    rows = trajectories_of(columns)
    given = {name: values(column) for name, column in columns.columns.items()}
    single = {
        name: plain(value)
        for name, value in columns.whole.items()
        if name not in ("meta_info", "groups") and column_length(value) is None
    }
    places = {i: (one, turn) for one in sessions_of(columns) for turn, i in enumerate(one.rows)}
    for i in range(columns.n):
        line = {**single, **{name: plain(cells[i]) for name, cells in given.items()}}
        session, turn = places[i]
        added: dict[str, Any] = {"step": dump.step, "row": i}
        if dump.is_one_of_several or dump.place.part is not None:
            added["part"] = dump.call
        added |= {"uid": session.group, "session": session.number, "turn": turn}
        if rows:
            row = rows[i]
            added |= {"prompt": row.prompt, "response": row.response, "response_mask": row.mask}
            added |= {"log_probs": row.log_probs, "reward": row.reward}
            if decoder is not None:
                added["prompt_text"] = decoder(row.prompt)
                added["response_text"] = decoder(row.response)
        for name, value in added.items():
            if name not in line:
                line[name] = value
            elif line[name] != value:
                line[f"rlskip_{name}"] = value
        encoded = json.dumps(finite(line), ensure_ascii=False, allow_nan=False)
        # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
        yield _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", encoded)
