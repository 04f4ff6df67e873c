"""doctor: on which file system a dump_dir is, and how much space it has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlskip.doctor.environment import dump_dir_findings
from rlskip.doctor.finding import OK, WARNING


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``mounts(text)``: what /proc/mounts holds."""
    read = Path.read_text

    def mounts(text: str) -> None:
        def read_text(path: Path, *args: Any, **more: Any) -> str:
            return text if str(path) == "/proc/mounts" else read(path, *args, **more)

        monkeypatch.setattr(Path, "read_text", read_text)

    return mounts


def test_the_innermost_mount_counts(tmp_path: Path, mounts: Any) -> None:
    dumps = tmp_path / "my dumps"
    dumps.mkdir()
    here = str(dumps).replace(" ", "\\040")
    mounts(f"a {here} nfs4 rw 0 0\nb {here[:-1]} tmpfs rw 0 0\nc / ext4 rw 0 0\n")
    first, *_ = dump_dir_findings(dumps)
    assert (first.level, "is writable; nfs4, " in first.what) == (OK, True)
    mounts(f"a / ext4 rw 0 0\nb {here[:-1]} tmpfs rw 0 0\n")
    first, *_ = dump_dir_findings(dumps)
    assert "is writable; ext4, " in first.what
    mounts(f"a {here} tmpfs rw 0 0\n")
    assert any("tmpfs is memory" in one.what for one in dump_dir_findings(dumps))


@pytest.mark.parametrize(("free", "warned"), [(1 << 30, False), ((1 << 30) - 1, True)])
def test_little_space_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: Any, free: int, warned: bool
) -> None:
    mounts("c / ext4 rw 0 0\n")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    found = [one for one in dump_dir_findings(tmp_path) if one.level == WARNING]
    assert [one.remedy for one in found] == ["rlskip prune"] * warned
