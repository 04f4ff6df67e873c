from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlskip as package

RUN = "e_p/GBS1_N2_in1_out4"


@pytest.fixture
def imported(rlskip: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``imported(source, *options)``: the rows of what is imported from there."""

    def rows(source: Path, *options: object) -> list[dict[str, Any]]:
        done = rlskip("import", source, "-d", tmp_path / "in", "--run", RUN, *options)
        assert (done.code, done.err) == (0, "")
        return list(package.open(tmp_path / "in" / RUN).iter_rows())

    return rows
