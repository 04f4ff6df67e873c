"""doctor: how a command is taken apart."""

from __future__ import annotations

import sys

import pytest

from rlskip.doctor.command import CannotComposeError, Command


@pytest.mark.parametrize(
    ("words", "start", "arguments"),
    [
        ("uv run python -m pkg.main n=1", ["-m", "pkg.main"], ["n=1"]),
        ("torchrun --nproc-per-node 2 -m pkg.main f=x.py", ["-m", "pkg.main"], ["f=x.py"]),
        ("accelerate launch --module pkg.main", ["-m", "pkg.main"], []),
        ("srun train.py f=x.py", ["train.py"], ["f=x.py"]),
    ],
)
def test_what_a_launcher_starts(words: str, start: list[str], arguments: list[str]) -> None:
    command = Command.parse(words.split())
    assert command.start == [sys.executable, *start]
    assert command.arguments == arguments
    assert not command.multirun


@pytest.mark.parametrize("command", [["bash", "run.sh"], ["./run.sh", "skip.n=1"]])
def test_a_shell_script_is_refused(command: list[str]) -> None:
    with pytest.raises(CannotComposeError, match="shell script"):
        Command.parse(command)


def test_a_console_script_starts_itself() -> None:
    command = Command.parse(["train", "-m", "f=x.py", "n=1,2"])
    assert (command.start, command.arguments) == (["train"], ["f=x.py", "n=1"])
    assert command.multirun
