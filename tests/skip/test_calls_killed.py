"""A job that is killed in the middle of a step replays its calls and generates the rest."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def job(python: Any) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        """Its arguments: folder, calls, dies_at, background."""
        done = python.run("-c", textwrap.dedent(_JOB), *arguments)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("background", ["b", "f"])
def test_a_killed_job_is_resumed_in_the_middle_of_its_step(
    job: Any, tmp_path: Path, background: str
) -> None:
    assert job(tmp_path, "aabcd", "c", background) == (-signal.SIGKILL, "aab")
    assert job(tmp_path, "aabcd", "", background) == (0, "cd")
    assert job(tmp_path, "aabcd", "", background) == (0, "")
