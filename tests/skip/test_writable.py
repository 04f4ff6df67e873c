"""A job that could not keep its dumps ends at its start; one that only replays does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import ConfigError


def unwritable(kind: str, folder: Path) -> Path:
    if kind == "/proc":
        return Path("/proc/nope")
    if kind == "below a file":
        (folder / "file").write_text("")
        return folder / "file" / "dumps"
    if kind == "a file":
        (folder / "file").write_text("")
        return folder / "file"
    loop = folder / "loop"
    loop.symlink_to(loop if kind == "a looping link" else folder / "nowhere")
    return loop


KINDS = ("/proc", "below a file", "a file", "a looping link", "a dangling link")


def start(dump_dir: Path, role: str = "rollout", **keys: Any) -> None:
    SkipManager.init({"skip": {"dump_dir": str(dump_dir), role: {"enable": True}, **keys}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["rollout", "async_rollout", "rollout_tq"])
def test_an_unwritable_dump_dir_ends_the_start(kind: str, role: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"role {role} has steps without a dump") as caught:
        start(unwritable(kind, tmp_path), role)
    assert caught.value.where == "skip.dump_dir"
    # Nothing runs unskipped afterwards either.
    generate = SkipManager.annotate(role=role)(lambda prompts: prompts)
    with pytest.raises(Exception, match=r"SkipManager\.init failed"):
        generate([1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_that_never_generates_writes_nothing(kind: str, tmp_path: Path) -> None:
    start(unwritable(kind, tmp_path), on_miss="error")
    assert "rollout" in SkipManager.skip_instances


def test_a_directory_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    start(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dump_dir with dumps of steps 1 and 2 in which nothing can be created any more."""
    start(tmp_path)

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> list[int]:
        return prompts

    for step in (1, 2):
        SkipManager.set_step(step)
        generate([step])
    SkipManager.reset()
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **kwargs)

    # The tests may run as root, whom no mode of a directory stops.
    monkeypatch.setattr(os, "open", refusing)
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({"steps": [1, 2]}, True),
        ({"steps": "1-2"}, True),
        ({"steps": [2]}, True),
        ({"steps": [1, 2, 3]}, False),
        ({"steps": "all"}, False),
        ({"steps": "1-20000"}, False),
        ({"steps": [3], "action": "repeat"}, True),
        ({"steps": "all", "action": "repeat"}, True),
        ({"steps": [1], "n": 9}, False),  # another directory, without dumps
    ],
)
def test_a_read_only_directory_serves_the_steps_that_it_has(
    read_only: Path, keys: dict[str, Any], accepted: bool
) -> None:
    if accepted:
        start(read_only, **keys)
        assert "rollout" in SkipManager.skip_instances
    else:
        with pytest.raises(ConfigError, match="Permission denied"):
            start(read_only, **keys)


def test_a_process_that_does_not_train_does_not_check(tmp_path: Path) -> None:
    config = {"skip": {"dump_dir": "/proc/nope", "rollout": {"enable": True}}}
    SkipManager.init(config, preflight=False)
    assert "rollout" in SkipManager.skip_instances
