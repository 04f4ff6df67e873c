"""The index of a run: it costs little, and whatever happens to it costs nothing but time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.runs.on_disk import dumps_of
from rlskip.store import Identity, StepStore
from rlskip.store.index import Index
from rlskip.store.layout import INDEX, Place
from tests.faulty_files import FaultyFiles


def save(store: StepStore, step: int, batch: str, value: int = 0) -> None:
    digests = {"digests": [f"{letter * 16}" for letter in batch]}
    info = {"prompts": digests, "rows_per_prompt": 1, "seconds": float(step)}
    identity = Identity.of({"role": "r"}).for_prompts(batch)
    store.save(step, [value] * len(batch), identity=identity, info=info)


def mended(store: StepStore) -> Index:
    """The index as a reader has it that compares it with what is there."""
    index = Index(store.directory)
    index.refresh()
    places = [Place(store.directory, step) for step in store.listed()]
    index.mend(places, lambda place: store.read_meta(place.step, place.call))
    return index


def there(index: Index) -> dict[str, tuple[str, list[str]]]:
    """Of each dump that is there what the index says of its prompts."""
    names = [name for name in index.dumps if (index.directory / name).exists()]
    return {name: (index.dumps[name].batch, index.dumps[name].prompts) for name in names}


def expected(**steps: str) -> dict[str, tuple[str, list[str]]]:
    return {step[1:]: (batch, [f"{p * 16}" for p in batch]) for step, batch in steps.items()}


def test_a_dump_costs_one_write_to_the_index(store: StepStore) -> None:
    save(store, 1, "ab")
    with FaultyFiles(store.directory) as seen:
        save(store, 2, "cd")
    of_index = [o.name for o in seen.operations if o.path == INDEX]
    assert of_index.count("write") == 1
    assert {*of_index} == {"open", "fstat", "write"}
    index = Index(store.directory)
    assert [line.name for line in index.refresh()] == ["1", "2"]
    assert index.refresh() == [], "it is read once"
    save(store, 3, "ef")
    assert [line.name for line in index.refresh()] == ["3"]
    assert there(index) == expected(_1="ab", _2="cd", _3="ef")


def torn_then_appended(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    save(StepStore(path.parent), 9, "xy")


def overwritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\0" * 50 + data[150:])


def of_another_run(path: Path) -> None:
    other = StepStore(path.parent.parent / "other")
    for step, batch in ((1, "zz"), (2, "zy"), (7, "z")):
        save(other, step, batch)
    shutil.copy(other.directory / INDEX, path)


def copied_without_times(path: Path) -> None:
    for meta in path.parent.glob("*/meta.json"):
        os.utime(meta)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


ACCIDENTS: list[Callable[[Path], Any]] = [
    Path.unlink, torn_then_appended, overwritten, of_another_run, copied_without_times, link,
    lambda path: path.write_bytes(b"\n\xff{}\n" * 9),
    lambda path: path.write_bytes(path.read_bytes().replace(b"a" * 16, b"e" * 16)),
]  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_index_that_is_wrong_or_gone_is_mended(
    store: StepStore, accident: Callable[[Path], Any]
) -> None:
    for step, batch in ((1, "ab"), (2, "cd"), (3, "cd")):
        save(store, step, batch)
    accident(store.directory / INDEX)
    index = mended(StepStore(store.directory))
    found = there(index)
    found.pop("9", None)
    assert found == expected(_1="ab", _2="cd", _3="cd")
    assert not [*store.directory.rglob("*.bad-*")]
    if accident is not link:
        again = Index(store.directory)
        again.refresh()
        assert {**there(again), "9": 0} == {**found, "9": 0}, "for the next reader, too"


@pytest.mark.parametrize("has_line", [True, False])  # without: its process was killed before
def test_what_became_of_a_dump_since(store: StepStore, has_line: bool) -> None:
    for step, batch in ((1, "ab"), (2, "cd"), (3, "ef")):
        save(store, step, batch)
    shutil.rmtree(store.directory / "1")
    store.quarantine(2, "for a test")
    store.quarantine(3, "for a test")
    lines = (store.directory / INDEX).read_bytes()
    save(store, 3, "xyz")
    if not has_line:
        (store.directory / INDEX).write_bytes(lines)
    assert there(mended(StepStore(store.directory))) == expected(_3="xyz")


def test_an_older_state_of_the_file_costs_nothing(store: StepStore) -> None:
    """As an NFS client may see it: shorter, then as it was."""
    index = Index(store.directory)
    for step in range(4):
        save(store, step, "ab")
    index.refresh()
    data = (store.directory / INDEX).read_bytes()
    (store.directory / INDEX).write_bytes(data[: len(data) // 2])
    save(store, 5, "ab")
    index.refresh()
    assert sorted(index.dumps) == [*"01235"]
    (store.directory / INDEX).write_bytes(data)
    save(store, 4, "ab")
    index.refresh()
    assert sorted(index.dumps) == [*"012345"]


def _append(folder: Path, job: int, count: int, done: Any) -> None:
    store = StepStore(folder)
    for number in range(count):
        save(store, job * 1000 + number, "ab" * 200)
        done.send(job * 1000 + number)


def test_jobs_that_append_at_once_and_are_killed_lose_no_line(store: StepStore) -> None:
    fork, count = multiprocessing.get_context("fork"), 1000
    pipes = [fork.Pipe(False) for _ in range(3)]
    jobs = [
        fork.Process(target=_append, args=(store.directory, job, count, pipes[job][1]))
        for job in range(3)
    ]
    for job in jobs:
        job.start()
    assert pipes[0][0].poll(60), "on a busy machine it takes its time"
    for job in jobs:
        time.sleep(0.1)
        os.kill(job.pid or 0, signal.SIGKILL)
    published = set()
    for job, (here, theirs) in zip(jobs, pipes, strict=True):
        theirs.close()
        while True:
            try:
                published.add(str(here.recv()))
            except EOFError:
                break
        job.join(60)
    index = Index(store.directory)
    index.refresh()
    assert published <= index.dumps.keys()
    assert index.dumps.keys() <= {str(step) for step in StepStore(store.directory).listed()}
    assert {(line.batch, len(line.prompts)) for line in index.dumps.values()} == {("ab" * 200, 400)}


def test_a_listing_reads_the_index_and_no_meta(store: StepStore) -> None:
    for step in range(5):
        save(store, step, "ab")
    with FaultyFiles(store.directory) as seen:
        dumps = [dump for step in range(5) for dump in dumps_of(store.directory, step)]
    assert [dump.seconds for dump in dumps] == [0.0 or None, 1.0, 2.0, 3.0, 4.0]
    assert [dump.full_meta().info["prompts"]["digests"][1] for dump in dumps] == ["b" * 16] * 5
    opened = [o.path for o in seen.operations if o.name == "open"]
    assert opened.count(INDEX) == 1
    assert not [path for path in opened if path.endswith("meta.json")]


@pytest.mark.parametrize("file", ["meta.json", "gen_batch.dp"])
def test_a_listing_believes_no_line_of_another_file(store: StepStore, file: str) -> None:
    for step in (1, 2):
        save(store, step, "ab")
    path = store.directory / "1" / file
    path.write_bytes(path.read_bytes()[:-9])
    before = (store.directory / INDEX).read_bytes()
    assert [dump.meta is None for step in (1, 2) for dump in dumps_of(store.directory, step)] == [
        True, False
    ]  # fmt: skip
    assert (store.directory / INDEX).read_bytes() == before, "a listing changes nothing"
