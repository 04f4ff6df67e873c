"""Dumps of verl's own queue role are imported, and rlskip replays them in verl's V1 trainer.

The same for V0 is in test_v0.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlskip.cli.main import main

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1800)]


def test_verls_own_queue_dump_is_imported_and_trained_on(verl091: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    at = "skip.rollout_tq"
    own = (f"{at}.enable=True", f"{at}.steps=[1,2]", f"{at}.dump_dir={theirs}")
    first = verl091.train("own", "v1", *own, VERL_USE_EXTERNAL_PLUGINS="none")
    assert first.returncode == 0, first.output[-3000:]
    assert first.generated == 16
    assert main(["import", str(theirs), "-d", str(ours), "--trust-pickle"]) == 0
    option = ("+skip=rollout_tq_cache", f"++skip.dump_dir={ours}")
    # Another seed would sample other tokens.
    second = verl091.train("imported", "v1", *option, seed=2)
    assert second.returncode == 0, second.output[-3000:]
    assert second.generated == 0
    assert second.grad_norms == first.grad_norms
    assert len(first.grad_norms) == 2
    assert second.summary["rollout_tq"]["hits"] == 2
    assert second.summary["rollout_tq"]["seconds_saved"] == 0
