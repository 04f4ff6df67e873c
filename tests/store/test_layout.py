"""Where dumps are: names that are safe and never become one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.errors import ConfigError
from rlskip.store import (
    run_directory,
)
from rlskip.store.layout import as_step, safe_name

_NAMES = st.text() | st.text(st.sampled_from("a./é"), min_size=100, max_size=300)


def test_the_layout_of_the_design() -> None:
    directory = run_directory("/dumps", "exp", "proj", 256, 8, 1024, 4096)
    assert directory == Path("/dumps/exp_proj/GBS256_N8_in1024_out4096")
    assert run_directory("~/d", "e", "p", 1, 1, 1, 1).is_relative_to(Path.home())
    assert run_directory("d", "e", "p", 1, 1, 1, 1).parts[0] == "d"


@pytest.mark.parametrize("url", ["s3://bucket/x", "hdfs://h/x", "gs://b", "file:///x", "s3:/b"])
def test_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"skip\.dump_dir: .*URL") as caught:
        run_directory(url, "e", "p", 1, 1, 1, 1)
    assert url in str(caught.value)


@given(_NAMES, _NAMES, _NAMES | st.integers())
def test_no_name_leaves_dump_dir(experiment: str, project: str, n: str | int) -> None:
    directory = run_directory("/dumps", experiment, project, n, n, n, n)
    assert directory.parent.parent == Path("/dumps")
    assert ".." not in directory.parts
    for part in directory.parts[2:]:
        assert part.isascii()
        assert len(part) < 255
        assert "\0" not in part


@given(_NAMES, _NAMES)
def test_no_two_names_collide(a: str, b: str) -> None:
    assert (safe_name(a) == safe_name(b)) == (a == b)
    assert safe_name(safe_name(a)) == safe_name(a) or safe_name(a) != a


@pytest.mark.parametrize(("a", "b"), [("a/b", "a-b"), ("a b", "a\tb"), ("..", "."), ("", "-")])
def test_names_that_clean_to_the_same(a: str, b: str) -> None:
    assert safe_name(a) != safe_name(b)


@given(st.integers(0) | st.text())
def test_steps_are_canonical_integers(name: int | str) -> None:
    step = as_step(str(name))
    assert step is None or str(step) == str(name)
    if isinstance(name, int):
        assert step == name


# -- links -------------------------------------------------------------------------------
