"""What the important messages say: `messages.md` has their texts, and reads as one page.

    WRITE_MESSAGES=1 pytest tests/messages      writes the page again, to be read in the diff

Elsewhere, tests assert an error's type and fields only. Each other module of this directory is for
one room, and has a list ``CASES``. A case is an id and a function that takes an empty directory and
raises the error; or also a level of `logging` and a logger's name, where the message is a line of
the log. On the page, ``DIR`` stands for the directory, ``WHEN`` for a time in a name, and
``SECONDS`` for how long it took.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlskip.errors import RlskipError

HERE = Path(__file__).parent
PAGE = HERE / "messages.md"
CASES = [
    (f"{path.stem}: {name}", *case, *[None] * (3 - len(case)))
    for path in sorted(HERE.glob("*.py"))
    if not path.stem.startswith("test_")
    for name, *case in runpy.run_path(str(path))["CASES"]
]
NAMES = [case[0] for case in CASES]
_SECTION = re.compile(r"^## ([^\n]*)\n\n```\n(.*?)\n```\n", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, str]]:
    """The texts by case; those that a test puts in are written at the end, if that is asked."""
    texts = dict(_SECTION.findall(PAGE.read_text(encoding="utf-8")))
    yield texts
    if os.environ.get("WRITE_MESSAGES"):
        parts = [f"## {case}\n\n```\n{texts[case]}\n```\n" for case in sorted(NAMES)]
        PAGE.write_text("# Messages\n\n" + "\n".join(parts), encoding="utf-8")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("case", "cause", "level", "logger"), CASES, ids=[case for case, *_ in CASES]
)
def test_message(
    case: str,
    cause: Callable[[Path], Any],
    level: int | None,
    logger: str | None,
    page: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if level is not None:
        caplog.set_level(level, "rlskip")
        cause(tmp_path)
        records = [one for one in caplog.records if (one.levelno, one.name) == (level, logger)]
        head = f"{logging.getLevelName(level)} of {logger}"
        said = "\n".join([head, *(record.getMessage() for record in records)])
        # A log whose format has no name of a logger shows whose line it is.
        assert all(record.getMessage().startswith("rlskip") for record in records)
    else:
        with pytest.raises(RlskipError) as caught:
            cause(tmp_path)
        said = f"{type(caught.value).__name__}\n{caught.value}"
        assert str(caught.value).startswith(caught.value.where)
        sent = pickle.loads(pickle.dumps(caught.value))  # as between processes
        assert (type(sent), str(sent)) == (type(caught.value), str(caught.value))
    said = re.sub(r"\d{8}T\d{6}Z-\w+", "WHEN", said.replace(str(tmp_path), "DIR"))
    said = re.sub(r"after \d+\.\d s\b", "after SECONDS", said)
    if os.environ.get("WRITE_MESSAGES"):
        page[case] = said
    assert page[case] == said


def test_the_page_has_no_message_of_old(page: dict[str, str]) -> None:
    assert page.keys() == {*NAMES}
