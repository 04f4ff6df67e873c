"""Verdicts on disk: kept, found by everybody, asked for by one at a time."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlskip.rescore.kept import ABSENT, Verdicts
from tests.faulty_files import each_fault

KEY, OTHER = "ab" * 16, "ab" * 15 + "cd"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0.1, 0.1),
        (None, None),
        (True, True),
        ({"score": 0.5, "why": "é\n ab" + KEY}, {"score": 0.5, "why": "é\n ab" + KEY}),
        (np.float32(0.1), float(np.float32(0.1))),
        (torch.tensor(0.1), torch.tensor(0.1).item()),
        ({"score": np.int64(3), "acc": np.bool_(True)}, {"score": 3, "acc": True}),
        ((1, 2), ABSENT),
        (math.nan, ABSENT),
        (object(), ABSENT),
    ],
)
def test_a_verdict_is_found_as_it_was_returned(tmp_path: Path, value: Any, kept: Any) -> None:
    returned = Verdicts(tmp_path).keep(KEY, value)
    found = Verdicts(tmp_path).find(KEY)
    assert Verdicts(tmp_path).find(OTHER) is ABSENT
    if kept is ABSENT:
        assert returned is value
        assert found is ABSENT
    else:
        assert (found, type(found)) == (kept, type(kept))
        assert (returned, type(returned)) == (kept, type(kept))


def test_a_damaged_verdict_is_asked_for_again_and_costs_no_other(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    for key in (KEY, OTHER):
        verdicts.keep(key, 0.25)
    file = tmp_path / "ab.jsonl"
    whole = file.read_bytes()
    second = whole.rindex(b"\n\n") + 1
    for at in range(len(whole)):
        file.write_bytes(whole[:at])  # torn by a full disk
        expected = [0.25 if at >= end else ABSENT for end in (second, len(whole))]
        found = [verdicts.find(key) for key in (KEY, OTHER)]
        assert found == expected or at == second - 1
    for at in range(1, second - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert (verdicts.find(KEY), verdicts.find(OTHER)) == (ABSENT, 0.25)
    verdicts.keep(KEY, 0.5)
    assert verdicts.find(KEY) == 0.5


def test_one_at_a_time_claims_a_key(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    with verdicts.claims() as claim, verdicts.claims() as claim_too:
        assert claim(KEY)
        assert not claim_too(KEY)
        assert claim_too("cd" * 16)
        child = os.fork()
        if not child:
            with verdicts.claims() as claim_there:
                os._exit(claim_there(KEY))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with verdicts.claims() as claim_later:
        assert claim_later(KEY)


def test_no_fault_of_the_disk_reaches_the_trainer(tmp_path: Path) -> None:
    met = 0
    for fault in each_fault(tmp_path, lasting=True):
        verdicts = Verdicts(tmp_path / "verdicts")
        with fault:
            with verdicts.claims() as claim:
                assert claim(KEY)
            assert verdicts.find(KEY) in (0.5, ABSENT)
            assert verdicts.keep(KEY, 0.5) == 0.5
        met += fault.happened
    assert met > 15
