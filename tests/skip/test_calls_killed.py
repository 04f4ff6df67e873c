"""A job that is killed in the middle of a step replays its calls and generates the rest."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path
from typing import Any

_JOB = """
    import os, signal, sys
    from rlskip import SkipManager

    folder, dies_at = sys.argv[1:]
    skip = {"dump_dir": folder, "background_write": True, "wait_s": 0, "rollout": {"enable": True}}
    SkipManager.init({"skip": skip})

    @SkipManager.annotate(role="rollout", stage="generate")
    def generate(prompts):
        if prompts == dies_at:
            SkipManager.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        print(prompts, end="", flush=True)
        return prompts

    SkipManager.set_step(1)
    for call in "aabcd":
        assert generate(call) == call
    SkipManager.flush()
"""


def test_a_killed_job_is_resumed_in_the_middle_of_its_step(python: Any, tmp_path: Path) -> None:
    def job(dies_at: str) -> tuple[int, str]:
        done = python.run("-c", textwrap.dedent(_JOB), tmp_path, dies_at)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout

    assert job("c") == (-signal.SIGKILL, "aab")
    assert job("") == (0, "cd")
    assert job("") == (0, "")
