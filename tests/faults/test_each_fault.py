"""A file system that fails, one operation at a time: nothing wrong is read, nothing is lost."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.operations import OPERATIONS, Outcome
from tests.faulty_files import ERRNOS, each_fault

FEW = (errno.EIO, errno.EROFS, errno.ENOTDIR)


# A step of a trainer takes seconds: in these each role, each action and each duration occurs. By
# default the second is left to the slow stage.
TRAINED = {("rollout cache", True), ("async_rollout repeat", False), ("rollout_tq cache", False)}


def _cases() -> Iterator[object]:
    """By default one errno each, in turn; a fault lasts in every other one."""
    for number, (name, lasting) in enumerate(itertools.product(OPERATIONS, (False, True))):
        title = f"{name}, {'lasting' if lasting else 'once'}"
        few = (FEW[number // 2 % 3],)
        if name.endswith(("cache", "repeat")):
            if (name, lasting) in TRAINED:
                marks = [pytest.mark.slow] * name.endswith("repeat")
                yield pytest.param(name, few, lasting, id=title, marks=marks)
        else:
            marks = [pytest.mark.slow] * (lasting != bool(number // 2 % 2))
            yield pytest.param(name, few, lasting, id=title, marks=marks)
        long = pytest.mark.long
        yield pytest.param(name, ERRNOS, lasting, id=f"{title}, every errno", marks=long)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("name", "errnos", "lasting"), [*_cases()])
def test_each_fault_leaves_what_is_promised(
    name: str, errnos: tuple[int, ...], lasting: bool,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    directory = tmp_path / "run"
    operation = OPERATIONS[name](directory)
    act = next(operation)
    for fault in each_fault(directory, errnos, lasting=lasting):
        caplog.clear()
        value, error = None, None
        with fault:
            try:
                value = act()
            except Exception as raised:
                error = raised
        try:
            act = operation.send(Outcome(value, error, caplog.text, fault))
        except AssertionError as failed:
            raise AssertionError(f"{fault}: {error or value!r:.200}") from failed
    operation.close()
