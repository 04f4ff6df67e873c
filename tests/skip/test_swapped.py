"""A run's directory that somebody replaces by a link after the start is not followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlskip import SkipManager
from tests.skip.trainers import Stage


@pytest.mark.parametrize("above", [0, 1], ids=["run", "experiment"])
@pytest.mark.parametrize("there", [True, False], ids=["dumps there", "nothing there"])
def test_a_directory_that_became_a_link_is_not_followed(
    init: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    above: int,
    there: bool,
) -> None:
    init(own={"keep_last": 1})
    stage = Stage()
    assert stage.at(1) == 1
    directory = SkipManager.store("rollout").directory
    path = (directory, directory.parent)[above]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    if not there:
        elsewhere = tmp_path / "empty"
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert [stage.at(1), stage.at(2), stage.at(2)] == [2, 3, 4], "nothing is replayed or dumped"
    assert sorted(elsewhere.rglob("*")) == before
    assert "it is a symbolic link, not a directory" in caplog.text
    path.unlink()
    assert [stage.at(3), stage.at(3)] == [5, 5], "and goes on once the link is gone"
