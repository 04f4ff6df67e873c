"""Nodes that do not share a dump_dir, or do not load rlskip: found at the start, and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.errors import NotInstalledError
from rlskip.hosts.verl import handshake
from rlskip.hosts.verl.names import MODULES_VARIABLE, PLUGIN
from rlskip.jobs.nodes import nodes_without

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    (tmp_path / "private").mkdir()
    return tmp_path / "dumps"


def name_of(nodes: Any, resource: str) -> str:
    (node,) = (node for node in nodes.alive() if resource in node["Resources"])
    return f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def test_a_node_that_does_not_load_the_plugin_is_named(
    make_nodes: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, PLUGIN)
    nodes = make_nodes()
    nodes.add("other")
    handshake.reach_running_ray(handshake.running_ray())
    nodes.add("without", **{MODULES_VARIABLE: ""})
    with pytest.raises(NotInstalledError) as caught:
        handshake.reach_running_ray(handshake.running_ray())
    assert name_of(nodes, "without") in str(caught.value)
    assert name_of(nodes, "other") not in str(caught.value)


def test_a_node_that_does_not_share_a_directory_is_named(
    make_nodes: Callable[[], Any], can_unshare: None, dumps: Path, tmp_path: Path
) -> None:
    import ray

    nodes = make_nodes()
    assert nodes_without(ray, dumps, 120) == []
    nodes.add("near")
    nodes.add_elsewhere("elsewhere", dumps, tmp_path / "private")
    assert nodes_without(ray, dumps, 120) == [name_of(nodes, "elsewhere")]
    assert not list(dumps.iterdir()), "the token is gone"


def test_a_trainer_that_does_not_share_the_launchers_dump_dir_is_refused(
    make_nodes: Callable[[], Any],
    can_unshare: None,
    dumps: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    nodes = make_nodes()
    nodes.add("near")
    nodes.add_elsewhere("elsewhere", dumps, tmp_path / "private")

    def train(job: str, on: str) -> None:
        monkeypatch.setenv("RLSKIP_JOB", job)
        env = {"env_vars": {"RLSKIP_JOB": job}}
        there = ray.remote(handshake.acknowledge).options(resources={on: 1}, runtime_env=env)
        ray.get(there.remote("rollout", str(dumps)))

    train("one", "near")
    assert handshake.unshared("one", {"rollout": str(dumps)}) is None
    train("two", "elsewhere")
    monkeypatch.setattr(handshake, "SHOWN_S", 2.0)
    assert list((tmp_path / "private").glob("records/two/rollout.active"))
    error = handshake.unshared("two", {"rollout": str(dumps)})
    assert error is not None
    assert (error.where, error.what[:16]) == ("skip.rollout.dump_dir", "it is not shared")
    assert handshake.is_acknowledged("two", {"rollout": str(dumps)})


APP = """
import ray
from rlskip.hosts.verl import handshake
handshake.SHOWN_S = 10.0
ray.init(address=os.environ["RAY_ADDRESS"])
there = ray.remote(handshake.acknowledge).options(resources={os.environ["WHERE"]: 1})
ray.get(there.remote("rollout", cfg.skip.dump_dir))
time.sleep(float(os.environ["TRAINS_S"]))
print("tr" + "ained")
"""
CONFIG = """
actor_rollout_ref: {rollout: {n: 2}}
ray_kwargs: {ray_init: {num_cpus: 1}}
trainer: {experiment_name: e, use_v1: false}
"""


@pytest.mark.parametrize("where", ["near", "elsewhere"])
def test_the_launcher_ends_a_run_whose_trainer_has_another_dump_dir(
    make_nodes: Callable[[], Any],
    make_app: Callable[..., Any],
    make_verl: Callable[..., str],
    can_unshare: None,
    dumps: Path,
    tmp_path: Path,
    where: str,
) -> None:
    nodes = make_nodes()
    if where == "near":
        nodes.add(where)
    else:
        nodes.add_elsewhere(where, dumps, tmp_path / "private")
    app = make_app(config=CONFIG, task=APP, functions="import verl\n")
    run = app.run(
        *("+skip=rollout_cache", f"skip.dump_dir={dumps}"),
        PYTHONPATH=os.pathsep.join([make_verl("0.9.1"), os.environ.get("PYTHONPATH", "")]),
        RAY_ADDRESS=nodes.cluster.address,
        WHERE=where,
        TRAINS_S="40" if where == "near" else "200",
        fails=where == "elsewhere",
    )
    if where == "near":
        assert "trained" in run.said
    else:
        assert "rlskip ends this run: skip.rollout.dump_dir: it is not shared" in run.said
        assert "trained" not in run.said
