"""A job that is killed in the middle of a step replays its calls and generates the rest."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_JOB = """
    import os, signal, sys
    from rlskip import SkipManager

    folder, calls, dies_at, background = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "b"
    SkipManager.init(
        {"skip": {"dump_dir": folder, "background_write": background,
                  "wait_s": 0, "rollout": {"enable": True}}}
    )

    @SkipManager.annotate(role="rollout", stage="generate")
    def generate(prompts):
        if prompts == dies_at:
            SkipManager.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        print(prompts, end="", flush=True)
        return prompts

    SkipManager.set_step(1)
    for call in calls:
        assert generate(call) == call
    SkipManager.flush()
"""


def _job(folder: Path, calls: str, dies_at: str, background: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_JOB), str(folder), calls, dies_at, background],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("background", ["b", "f"])
def test_a_killed_job_is_resumed_in_the_middle_of_its_step(tmp_path: Path, background: str) -> None:
    assert _job(tmp_path, "aabcd", "c", background) == (-signal.SIGKILL, "aab")
    assert _job(tmp_path, "aabcd", "", background) == (0, "cd")
    assert _job(tmp_path, "aabcd", "", background) == (0, "")
