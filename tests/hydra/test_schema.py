"""The dataclasses in Hydra's ConfigStore: types and defaults for who names them, nothing else."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from rlskip import SkipManagerConfig
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError
from rlskip.jobs.records import SUMMARY
from rlskip_conf import NODES, options
from tests.hydra.conftest import compose_from
from tests.readers import READERS

LISTED = "defaults: [rlskip_schema/{node}, _self_]\n"
# Of each node a value of the user's, and one of another type.
VALUES = {
    "skip": ("rollout: {n: 4}", "rollout: {n: four}"),
    "dispatch": ("workers: 3", "workers: three"),
    "replay": ("max_refills: 5", "max_refills: five"),
    "merge": ("max_seq_len: 9", "max_seq_len: nine"),
    "record": ("keep_last: 2", "keep_last: two"),
}


@pytest.mark.parametrize("node", NODES)
def test_types_and_all_defaults(composed: Any, node: str) -> None:
    config = composed(LISTED.format(node=node))
    kind = OmegaConf.get_type(config, node)
    assert OmegaConf.to_container(config[node]) == dataclasses.asdict(kind())
    assert ("rlskip" in (config.hydra.callbacks or {})) is (node in ("skip", "record"))
    own, bad = VALUES[node]
    kept = composed(LISTED.format(node=node) + f"{node}: {{{own}}}\n")[node]
    assert OmegaConf.merge(kept, OmegaConf.create(f"{{{own}}}")) == kept
    READERS[node](composed(LISTED.format(node=node) + f"{node}: {{{own}}}\n"))
    with_option = composed(LISTED.format(node=node), f"+{node}={options(node)[0]}")
    assert with_option[node].keys() == config[node].keys()
    with pytest.raises(ConfigCompositionException, match="could not be converted to Integer"):
        composed(LISTED.format(node=node) + f"{node}: {{{bad}}}\n")


def test_nothing_is_turned_on_and_the_hosts_choice_stays(composed: Any) -> None:
    listed = "defaults: [rlskip_schema/skip, _self_]\n"
    assert not read_skip(composed(listed)).roles
    dynamic = listed + "algorithm: {filter_groups: {enable: true}}\n"
    full = read_skip(composed(dynamic, "+skip=rollout_cache"))
    assert full.roles["rollout"].match == "run"
    assert full.roles["rollout"].restore_rng is None
    # A typo is found by rlskip, not by Hydra.
    config = composed(listed + "skip: {rollout: {stepz: 1}}\n", "skip.on_mis=error")
    with pytest.raises(ConfigError) as caught:
        read_skip(config)
    assert "skip.rollout.stepz: unknown key; did you mean skip.rollout.steps?" in str(caught.value)
    assert "skip.on_mis: unknown key; did you mean skip.on_miss?" in str(caught.value)


def test_verl_composes_with_the_schema(composed: Any, verl_configs: Path) -> None:
    listed = "defaults: [rlskip_schema/skip, ppo_trainer, {skip: rollout_cache}, _self_]\n"
    search = f"hydra: {{searchpath: [file://{verl_configs}]}}\n"
    (role,) = read_skip(composed(listed + search + "skip: {steps: 1-3}\n")).roles.values()
    plain = compose_from(verl_configs, "ppo_trainer", "+skip=rollout_cache", "++skip.steps=1-3")
    assert role == read_skip(plain).roles["rollout"]


# -- after what it would overwrite ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("defaults", "chosen", "lost"),
    [
        ("_self_, rlskip_schema/skip", [], "skip.steps (in config), skip.rollout.n (in"),
        ("_self_, {rlskip_schema: skip}", [], "skip.steps (in config)"),
        ("_self_", ["+rlskip_schema=skip"], "skip.steps (in config)"),
        ("{skip: rollout_cache}, rlskip_schema/skip, _self_", [],
         "skip.rollout.enable (in skip/rollout_cache)"),
        ("{values: mine}, rlskip_schema/skip, _self_", [],
         "skip.rollout.action (in values/mine)"),
    ],
)  # fmt: skip
def test_a_schema_that_comes_too_late_is_refused(
    job: Any, tmp_path: Path, defaults: str, chosen: list[str], lost: str
) -> None:
    (tmp_path / "values").mkdir()
    text = "# @package skip.rollout\naction: repeat\n"
    (tmp_path / "values" / "mine.yaml").write_text(text, encoding="utf-8")
    own = f"defaults: [{defaults}]\nskip: {{steps: 1-3, rollout: {{n: 4}}}}\n"
    with pytest.raises(ConfigError) as caught:
        read_skip(job(own, *chosen))
    assert lost in caught.value.what
    assert "put rlskip_schema/skip first in the defaults list" in caught.value.remedy


@pytest.mark.parametrize("node", [node for node in NODES if node != "skip"])
def test_that_of_any_other_node_too(job: Any, node: str) -> None:
    late = f"defaults: [_self_, rlskip_schema/{node}]\n"
    with pytest.raises(ConfigError, match=f"rlskip_schema/{node} comes too late"):
        READERS[node](job(f"{late}{node}: {{{VALUES[node][0]}}}\n"))
    READERS[node](job(f"{late}a: 1\n"))


# -- what a job is told ----------------------------------------------------------------------------
@pytest.mark.slow
def test_with_the_schema_keys_alone_turn_a_role_on(make_app: Callable[..., Any]) -> None:
    app = make_app(config="defaults: [rlskip_schema/skip, _self_]\nskip: {dump_dir: dumps}\n")
    assert "rlskip" not in app.run().said, "nothing was chosen"
    assert "role rollout: 0 hits, 2 misses" in app.run("skip.rollout.enable=true").out
    assert app.generated == [1, 1, 2, 2]
    # The callback is not the swept option's.
    swept = app.run("-m", "+skip=rollout_cache,rollout_repeat")
    assert swept.out.count("role rollout: 2 hits, 0 misses") == 2


@pytest.mark.slow
def test_with_the_schema_keys_alone_record(make_app: Callable[..., Any]) -> None:
    own = "record: {dump_dir: dumps}\nskip: 5\n"
    app = make_app(config=f"defaults: [rlskip_schema/record, _self_]\n{own}")
    assert "NOTHING" not in app.run().said
    app.run("record.enable=true", "hydra.run.dir=recorded")
    assert (app.folder / "recorded" / SUMMARY).exists()


@pytest.mark.slow
def test_help_of_another_application_gains_one_group(make_app: Callable[..., Any]) -> None:
    app = make_app()
    said = app.run("--help").out
    groups = said.partition("== Configuration groups ==")[2].partition("== Config ==")[0]
    assert [line.partition(":")[0] for line in groups.splitlines() if ":" in line] == [
        "rlskip_schema"
    ]
    assert "\nskip: async_rollout_cache, " in app.run("+skip=rollout_cache", "--help").out


@pytest.mark.slow
def test_completion(make_app: Callable[..., Any]) -> None:
    app = make_app(config="defaults: [rlskip_schema/skip, _self_]\n")
    shell = {"COMP_POINT": "99"}

    def offered(words: str) -> list[str]:
        line = f"{os.path.basename(sys.executable)} app.py {words}"
        return list(app.run("-sc", "query=bash", **shell, COMP_LINE=line).out.split())

    keys = {f"skip.{field.name}" for field in dataclasses.fields(SkipManagerConfig)}
    assert keys == {word.rstrip("=.") for word in offered("skip.")}
    assert "skip.rollout.dump_dir=" in offered("skip.rollout.d")
    assert "+skip=rollout_replay" in offered("+skip=rollout_r")
