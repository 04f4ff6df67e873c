"""Nodes that do not share a dump_dir: found at the start, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.hosts.verl import handshake
from rlskip.jobs.records import leave_token

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_process_that_does_not_share_the_dump_dir_is_refused(
    make_nodes: Callable[[], Any],
    can_unshare: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    dumps, private = tmp_path / "dumps", tmp_path / "private"
    dumps.mkdir()
    private.mkdir()
    nodes = make_nodes()
    nodes.add("near")
    nodes.add_elsewhere("elsewhere", dumps, private)
    monkeypatch.setenv("RLSKIP_JOB", "one")
    assert leave_token(dumps, "launcher")

    def look(directory: str) -> str:
        handshake.SHOWN_S = 3.0
        try:
            handshake.refuse_unshared("skip.rollout.dump_dir", directory, "one")
        except ValueError as error:
            return str(error)
        return ""

    def at(node: str) -> str:
        there = ray.remote(look).options(resources={node: 1})
        said: str = ray.get(there.remote(str(dumps)))
        return said

    assert at("near") == ""
    assert "skip.rollout.dump_dir: it is not shared: on " in at("elsewhere")
