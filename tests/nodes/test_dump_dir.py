"""Nodes that do not share a dump_dir: found at the start, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.hosts.verl import handshake
from rlskip.hosts.verl.names import TOKEN_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("who", ["the process that trains", "a worker that journals"])
def test_a_process_that_does_not_share_the_dump_dir_is_refused(
    make_nodes: Callable[[], Any],
    can_unshare: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
) -> None:
    import ray

    dumps, private = tmp_path / "dumps", tmp_path / "private"
    dumps.mkdir()
    private.mkdir()
    nodes = make_nodes()
    nodes.add("near")
    nodes.add_elsewhere("elsewhere", dumps, private)
    monkeypatch.setenv("RLSKIP_JOB", "one")
    assert handshake.leave_token(str(dumps))

    def look(directory: str, trains: bool) -> str:
        handshake.SHOWN_S = 3.0
        try:
            if trains:
                handshake.acknowledge("rollout", directory)
            else:
                handshake.refuse_unshared("skip.rollout.dump_dir", directory, "one")
        except ValueError as error:
            return str(error)
        return ""

    env = {"env_vars": {"RLSKIP_JOB": "one", TOKEN_VARIABLE: "1"}}

    def at(node: str) -> str:
        there = ray.remote(look).options(resources={node: 1}, runtime_env=env)
        said: str = ray.get(there.remote(str(dumps), who == "the process that trains"))
        return said

    assert at("near") == ""
    assert "skip.rollout.dump_dir: it is not shared: on " in at("elsewhere")
