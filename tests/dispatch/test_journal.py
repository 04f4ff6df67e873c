"""The journal itself: append-only, for several processes, and damage costs what it hits."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.dispatch.journal import append_sessions, read_sessions
from rlskip.store import Identity

IDENTITY = Identity.of({"n": 4, "sampling.temperature": 1.0})


def write(path: Path, count: int) -> None:
    """The first session on its own, the others together."""
    sessions = {
        ("content", 0, i): [{"responses": torch.full((5,), i), "text": str(i)}]
        for i in range(count)
    }
    append_sessions(path, IDENTITY, {key: sessions.pop(key) for key in list(sessions)[:1]})
    append_sessions(path, IDENTITY, sessions)


def numbers_in(path: Path) -> list[int]:
    return [key[2] for key in read_sessions(path, IDENTITY)]


def ends_of(data: bytes) -> list[int]:
    """Where each frame ends."""
    return [i + 1 for i in range(len(data)) if data.startswith(b"\n\n", i)] + [len(data)]


@settings(max_examples=60)
@given(data=st.data())
def test_a_torn_frame_costs_itself_only(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "3.journal"
    write(path, 4)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    noise = data.draw(st.binary(max_size=40))
    torn = content[:cut] + noise
    path.write_bytes(torn)

    # The line end after a frame may be missing, and nothing else.
    ends = [end - 1 for end in ends_of(content)]
    kept = sum(torn.startswith(content[:end]) and torn[end:][:1] in (b"", b"\n") for end in ends)
    assert numbers_in(path) == list(range(kept))
    # And it can be appended to, behind what is torn.
    append_sessions(path, IDENTITY, {("content", 0, 9): [{"responses": torch.ones(2)}]})
    assert path.read_bytes().startswith(torn)
    assert numbers_in(path) == [*range(kept), 9]


def test_a_flipped_bit_costs_its_frame_only(tmp_path, caplog):
    path = tmp_path / "3.journal"
    write(path, 3)
    content = path.read_bytes()
    ends = ends_of(content)
    for at in range(0, len(content), 7):
        frame = sum(end <= at for end in ends)
        altered = bytearray(content)
        altered[at] ^= 1 << at % 8
        path.write_bytes(altered)
        assert numbers_in(path) == [i for i in range(3) if i != frame]
    assert "damaged bytes" in caplog.text
    assert list(tmp_path.glob("[!.]*")) == [path], "they stay where they are"
    assert path.read_bytes() == altered


def test_a_longer_line_than_a_frame_may_have_is_damage(tmp_path, monkeypatch):
    path = tmp_path / "3.journal"
    write(path, 3)
    path.write_bytes(b"x" * (1 << 20) + path.read_bytes())
    monkeypatch.setattr("rlskip.dispatch.journal.MAX_FRAME", 1 << 16)
    assert numbers_in(path) == [0, 1, 2]
    long = {("content", 0, 3): os.urandom(1 << 16), ("content", 0, 4): 4}
    with pytest.raises(OSError, match="too large"):
        append_sessions(path, IDENTITY, long)
    assert numbers_in(path) == [0, 1, 2, 4]


# -- several processes -----------------------------------------------------------------------


def append_many(path: Path, number: int, count: int, start, acknowledgements) -> None:
    """In a process: append, and acknowledge each append in one write to a pipe."""
    start.wait()  # all of them begin the file at once
    for i in range(count):
        rows = [{"responses": torch.arange(1000 * (i % 3))}]
        append_sessions(path, IDENTITY, {("content", number, i): rows})
        os.write(acknowledgements, f"{number} {i}\n".encode())


@pytest.mark.timeout(200)
def test_what_eight_processes_acknowledge_is_there(tmp_path):
    path, context = tmp_path / "3.journal", multiprocessing.get_context("fork")
    start, (reader, writer) = context.Event(), os.pipe()
    running = [
        context.Process(target=append_many, args=(path, number, 150, start, writer))
        for number in range(8)
    ]
    for process in running:
        process.start()
    os.close(writer)
    start.set()
    lines = b""
    while block := os.read(reader, 1 << 16):
        lines += block
        if lines.count(b"\n") > 200:  # in the midst of all others
            running[1].kill()
    os.close(reader)
    for process in running:
        process.join(60)
    acknowledged = {("content", *map(int, line.split())) for line in lines.splitlines()}
    assert 7 * 150 <= len(acknowledged) <= 8 * 150
    found = read_sessions(path, IDENTITY).keys()
    assert acknowledged <= found
    assert len(found - acknowledged) <= 1  # written by the killed process, not yet acknowledged
