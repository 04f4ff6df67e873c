"""What the important messages say. Elsewhere, tests assert an error's type and fields only.

Each other module of this directory is for one room, and has a list ``CASES``. A case is a tuple of

- an id,
- a function that takes an empty directory and causes the message,
- the type of the error, or a level of `logging` where the message is a line of the log,
- the error's `where`, or the logger's name,
- the whole text, with ``DIR`` for the directory and ``WHEN`` for a time in a name.
"""

from __future__ import annotations

import pickle
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.errors import RlskipError

ROOMS = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem[:5] != "test_"]
CASES = [
    pytest.param(*case, id=f"{path.stem}: {name}")
    for path in ROOMS
    for name, *case in runpy.run_path(str(path))["CASES"]
]


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("cause", "kind", "where", "text"), CASES)
def test_message(
    cause: Callable[[Path], Any],
    kind: type[RlskipError] | int,
    where: str,
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def neutral(said: str) -> str:
        return re.sub(r"\d{8}T\d{6}Z-\w+", "WHEN", said.replace(str(tmp_path), "DIR"))

    if isinstance(kind, int):
        caplog.set_level(kind, "rlskip")
        cause(tmp_path)
        records = [one for one in caplog.records if (one.levelno, one.name) == (kind, where)]
        assert text in [neutral(record.getMessage()) for record in records]
    else:
        with pytest.raises(kind) as caught:
            cause(tmp_path)
        assert type(caught.value) is kind
        assert neutral(caught.value.where) == where
        assert neutral(str(caught.value)) == text
        sent = pickle.loads(pickle.dumps(caught.value))  # as between processes
        assert (type(sent), str(sent)) == (kind, str(caught.value))
