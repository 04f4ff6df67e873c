"""Applications with a key of their own that is called like a node of rlskip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlskip_conf
from rlskip._hydra import sets_own_key
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError
from rlskip_conf import NODES, options
from tests.readers import READERS


def test_every_node_has_a_group_of_options_and_a_reader() -> None:
    folders = {file.parent.name for file in Path(*rlskip_conf.__path__).glob("*/*.yaml")}
    assert folders - {"rlskip_schema"} == {*NODES} == {*READERS}


# -- refused where the node is read --------------------------------------------------------------
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("own", [3, [1], {"eval_batches": 5}, {"lr": {"warm": 1}}], ids=str)
def test_another_meaning_is_refused_where_the_node_is_read(node: str, own: Any) -> None:
    for config in ({node: own}, OmegaConf.create({node: own})):
        with pytest.raises(ConfigError, match=f"if `{node}` is the application's own key, rename"):
            READERS[node](config)
    with pytest.raises(ConfigError) as caught:
        READERS[node]({node: {"eval_batches": 5}})
    assert caught.value.where == f"{node}.eval_batches"
    assert node != "skip" or len(str(caught.value)) < 250
    for other in NODES:
        if other != node:
            READERS[other]({node: own})


# -- refused where the option was chosen ---------------------------------------------------------
@pytest.mark.parametrize(
    ("node", "own"), list(zip(NODES, [5, "fast", 3.5, True, "b ${a}"], strict=True)), ids=str
)
def test_a_value_that_the_option_replaced_is_named(job: Any, node: str, own: Any) -> None:
    config = job(f"a: 1\n{node}: {own}\n", f"+{node}={options(node)[0]}")
    with pytest.raises(ConfigError) as caught:
        READERS[node](config)
    said = f"own key `{node}` ({own!r}) is in the place of rlskip's node `{node}`, which the option"
    assert said in caught.value.what
    for other in {*NODES} - {node}:
        READERS[other](config)


@pytest.mark.parametrize("own", ["null", "???", "{}", "${other}", "{steps: 1-3}"])
def test_a_value_that_holds_nothing_else_is_not_refused(job: Any, own: str) -> None:
    config = job(f"skip: {own}\nother: {{n: 2}}\n", "+skip=rollout_cache")
    assert "rollout" in read_skip(config).roles


@pytest.mark.parametrize("node", NODES)
def test_another_place_is_refused(job: Any, node: str) -> None:
    option = options(node)[0]
    for package, chosen in (("rlskip", option), ("elsewhere", f"[{option}]")):
        config = job("a: 1\n", f"+{node}@{package}={chosen}")
        with pytest.raises(ConfigError) as caught:
            READERS[node](config)
        assert caught.value.where == f"{node}@{package}"
        assert caught.value.remedy == f"choose it with +{node}={option}"


def test_a_job_is_refused_before_it_starts(make_app: Callable[..., Any]) -> None:
    app = make_app(config="a: 1\nskip: 5\n")
    run = app.run("-m", "a=1,2", "+skip=rollout_cache", fails=True)
    assert run.said.count("the application's own key `skip` (5) is in the place of") == 1
    run = app.run("+skip@rlskip=rollout_cache", fails=True)
    assert "choose it with +skip=rollout_cache" in run.said
    assert app.generated == []


# -- whoever chose nothing is left alone ---------------------------------------------------------
SCALARS = "record: false\nskip: 4\nmerge: none\nreplay: null\ndispatch: [1]\n"


def test_a_job_of_another_application(make_app: Callable[..., Any]) -> None:
    app = make_app(config=SCALARS, task="print(cfg.skip, cfg.record, cfg.merge)\ntrain(cfg)")
    run = app.run("-m", "skip=5,6", "record=true", "merge=all")
    assert all(f"{n} True all" in run.out for n in (5, 6))
    assert app.generated == [1, 1, 2, 2]


def test_a_job_that_skips_beside_own_keys_and_an_own_option(make_app: Callable[..., Any]) -> None:
    config = "merge: none\nreplay: 3\ndispatch: spot\n"
    app = make_app(config=config, task="assert cfg.record.fps == 30\ntrain(cfg)")
    (app.folder / "conf" / "record").mkdir(parents=True)
    (app.folder / "conf" / "record" / "video.yaml").write_text("fps: 30\n", encoding="utf-8")
    run = app.run("+record=video", "+skip=rollout_cache", "skip.dump_dir=dumps")
    assert "role rollout: 0 hits, 2 misses" in run.out
    assert "own key" not in run.said


def test_an_own_option_may_build_on_one_of_ours(make_app: Callable[..., Any]) -> None:
    app = make_app()
    own = app.folder / "conf" / "skip" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [rollout_cache]\ndump_dir: dumps\n", encoding="utf-8")
    assert "role rollout: 0 hits, 2 misses" in app.run("+skip=mine").out


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["+record=true", "hydra.job.chdir=true"], True),
        (["++skip=8", "-m", "replay=3,4"], True),
        (["merge=all", "dispatch=[a,b]", "skip={a: 1}"], True),
        (["a=1", "skip.frames=8", "--cfg", "job"], False),
        (["-m", "+skip=rollout_cache,rollout_repeat"], False),
        (["+skip=[rollout_cache,async_rollout_cache]"], False),
        (["skip=rollout_cache", "record=true"], False),
        (["+skip=rolout_cache"], False),  # misspelt, which Hydra says
        (["+skip=cache"], False),
        (["+replay=false"], True),
    ],
)
def test_what_sets_an_own_key(arguments: list[str], own: bool) -> None:
    assert sets_own_key(arguments) is own
