"""separate_async, one-step-off and the fully async rollouter, as verl's decorators define steps.

Their weights travel over NCCL, so their loops cannot run here; see decorated.py. With rlskip
installed, a user's own stages under verl's decorator are rlskip's, too.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]


def test_what_verl_decorates_is_replayed_to_the_last_bit(verl091: Any, tmp_path: Path) -> None:
    run = [verl091.python, "-W", "ignore", Path(__file__).with_name("decorated.py"), tmp_path]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "one_step_off": {"generated": [8, 0], "equal": True},
        "fully_async": {"generated": [6, 0], "equal": True},
        "separate_async": {"generated": [12, 0], "equal": True},
        "own_stages": {"generated": [3, 0], "equal": True},
    }
