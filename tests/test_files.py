"""What is below a dump_dir is opened without following or waiting for anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip._files import RefusedFileError, open_folder


def _socket(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


_OTHER_KINDS: dict[str, Callable[[Path], Any]] = {
    "a symbolic link": lambda path: path.symlink_to(path.with_name("victim")),
    "a link to nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a directory": Path.mkdir,
    "a device": lambda path: os.mknod(path, 0o020666, os.makedev(1, 5)),  # /dev/zero
}


@pytest.mark.parametrize("kind", _OTHER_KINDS)
def test_what_is_no_regular_file_is_neither_opened_nor_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").write_text("mine")
    try:
        _OTHER_KINDS[kind](tmp_path / "name")
    except PermissionError:
        pytest.skip("only root may make devices")
    before = len(os.listdir("/proc/self/fd"))
    for mode in ("r", "a"):
        with open_folder(tmp_path) as folder, pytest.raises(RefusedFileError) as caught:
            folder.open("name", mode)
        assert "it is not a regular file; links are not followed" in str(caught.value)
        assert str(tmp_path / "name") in str(caught.value)
        assert isinstance(caught.value, OSError)
    with open_folder(tmp_path) as folder, pytest.raises(FileExistsError):
        folder.open("name", "x")
    parts = [("name", "below"), ("name",)] if kind != "a directory" else []
    for create in (False, True):
        for path in parts:
            opened = open_folder(tmp_path, *path, create=create)
            with pytest.raises(RefusedFileError, match="it is not a directory"), opened:
                pass
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists(), "nothing is created where a link leads"
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left open"


def test_a_file_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"12345")
    with open_folder(tmp_path) as folder:
        assert folder.read("name", 5) == b"12345"
        with pytest.raises(RefusedFileError, match="it has 5 bytes, at most 4 are expected"):
            folder.read("name", 4)
        os.truncate(tmp_path / "name", 1 << 40)
        with pytest.raises(RefusedFileError, match="bytes"):
            folder.read("name", 1 << 20)


def test_no_name_leads_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    with open_folder(tmp_path, "run", create=True) as folder:
        for name in ("../victim", str(tmp_path / "victim")):  # as a forged dump may name a config
            with pytest.raises(RefusedFileError, match="not in this directory"):
                folder.read(name, 10)


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to("disk")
    with open_folder(tmp_path / "root", "a", "b", create=True) as folder:
        folder.open("name", "x").close()
    assert (tmp_path / "disk" / "a" / "b" / "name").exists()
    with pytest.raises(FileNotFoundError), open_folder(tmp_path / "root", "c"):
        pass


def test_what_is_opened_stays_open_whatever_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "name").write_text("first")
    with open_folder(tmp_path, "a") as folder:
        os.rename(tmp_path / "a", tmp_path / "b")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "name").write_text("second")
        assert folder.read("name", 10) == b"first"
