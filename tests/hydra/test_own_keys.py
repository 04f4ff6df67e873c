"""Applications with keys of rlskip's names, and applications whose config is a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf

import rlskip_conf
from rlskip import MergeConfig, SkipManager, SkipManagerConfig
from rlskip._nodes import NODES
from rlskip.config.dispatch import read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.option_checks import refuse_replaced_keys
from rlskip.config.record import read_record
from rlskip.config.replay import read_replay
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError, MissError

SKIP_OPTIONS = sorted(file.stem for file in (Path(*rlskip_conf.__path__) / "skip").glob("*.yaml"))
READERS: dict[str, Callable[[Any], Any]] = {
    "skip": read_skip,
    "dispatch": read_dispatch,
    "replay": read_replay,
    "merge": read_merge,
    "record": read_record,
}


# -- what an option would replace ---------------------------------------------------------------
def refused(folder: Path, config: str, overrides: list[str]) -> ConfigError:
    """What the callback refuses of an application that is composed so, before its task."""
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "base.yaml").write_text("a: 1\n", encoding="utf-8")
    with initialize_config_dir(str(folder), version_base=None):
        whole = compose("config", overrides, return_hydra_config=True)
        with pytest.raises(ConfigError) as caught:
            refuse_replaced_keys(whole, NODES)
    return caught.value


@pytest.mark.parametrize(
    ("config", "overrides", "own"),
    [
        ("skip: 5\n", ["+skip=rollout_cache"], "`skip` (5)"),
        ("skip: fast\n", ["+skip=rollout_cache", "skip.steps=[1]"], "`skip` ('fast')"),
        ("merge: 5\n", ["+merge=prefix"], "`merge` (5)"),
        ("dispatch: spot\n", ["+skip=rollout_cache", "+dispatch=rollout_level"], "`dispatch`"),
        ("replay: 3.5\n", ["+replay=fail_closed"], "`replay` (3.5)"),
        ("rlskip: 5\n", ["+skip@rlskip=rollout_cache"], "`rlskip` (5)"),
        ("defaults: [skip: rollout_cache, base, _self_]\nskip: true\n", [], "`skip` (True)"),
    ],
)
def test_an_own_value_is_not_replaced(
    tmp_path: Path, config: str, overrides: list[str], own: str
) -> None:
    error = refused(tmp_path, config, overrides)
    assert f"the application has its own key {own}" in error.what
    name = own.split("`")[1]
    remedy = f"choose it with +{name}@rlskip={NODES[name]}" if name in NODES else "rename the"
    assert error.remedy.startswith(remedy)


def test_another_package_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "a: 1\n", ["+skip@elsewhere=rollout_cache"])
    assert (error.where, "below `elsewhere`" in error.what) == ("skip@elsewhere", True)
    assert "with +skip@rlskip=rollout_cache" in error.remedy


@pytest.mark.parametrize("sweep", [[], ["-m", "a=1,2"]], ids=["single run", "multirun"])
def test_an_own_value_ends_the_job_before_it_starts(
    make_app: Callable[..., Any], sweep: list[str]
) -> None:
    app = make_app(config="a: 1\nskip: 5\n")
    run = app.run(*sweep, "+skip=rollout_cache", fails=True)
    assert app.generated == []
    assert run.said.count("the application has its own key `skip` (5)") == 1


@pytest.mark.parametrize("node", NODES)
def test_the_error_for_an_own_node_gives_the_option(node: str, composed: Any) -> None:
    config = composed(f"{node}: {{eval_batches: 5}}\n", f"+{node}={NODES[node]}")
    with pytest.raises(ConfigError) as caught:
        READERS[node](config)
    assert caught.value.where == f"{node}.eval_batches"
    assert f"choose rlskip's option with +{node}@rlskip={NODES[node]}" in caught.value.remedy
    assert node != "skip" or len(str(caught.value)) < 250


# -- what the command line sets ------------------------------------------------------------------
SCALARS = "record: false\nskip: 4\nmerge: none\nreplay: null\ndispatch: [1]\n"


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["record=true"], "record", True),
        (["++record=true"], "record", True),
        (["skip=1", "skip=8"], "skip", 8),
        (["skip={a: 1}", "skip=null"], "skip", None),
        (["merge=some", "merge=all"], "merge", "all"),
        (["replay='3'"], "replay", "3"),
        (["dispatch=[2,b]", "+skip@rlskip=rollout_cache"], "dispatch", [2, "b"]),
        (["dispatch=[a,b]", "+replay@rlskip=fail_closed"], "dispatch", ["a", "b"]),
    ],
)
def test_an_own_key_can_be_overridden(
    composed: Any, overrides: list[str], key: str, value: Any
) -> None:
    config = composed(SCALARS, *overrides)
    expected = {**OmegaConf.create(SCALARS), key: value}
    assert {name: config[name] for name in NODES} == {name: expected[name] for name in NODES}
    refuse_replaced_keys(config, NODES)


def test_an_own_key_can_be_removed_or_added(composed: Any) -> None:
    assert "record" not in composed(SCALARS, "~record")
    assert composed("a: 1\n", "+record=true").record is True


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+skip=rolout_cache", "Could not find 'skip/rolout_cache'"),
        ("skip@rlskip=rolout_cache", "Could not override 'skip@rlskip'"),
        ("skip=rollout_cache", r"use \+skip=rollout_cache"),
        ("skip=8", r"use \+skip=8"),
        ("~skip", "Could not delete"),
    ],
)
def test_an_option_that_is_not_there_is_an_error(composed: Any, override: str, told: str) -> None:
    with pytest.raises(HydraException, match=told):
        composed("a: 1\n", override)
    with pytest.raises(HydraException, match="Could not find 'skip/rolout_cache'"):
        composed("defaults: [{skip: rollout_cache}, _self_]\n", "skip=rolout_cache")
    assert "skip" not in composed("defaults: [{skip: rollout_cache}, _self_]\n", "~skip")


@pytest.mark.parametrize("sweep", [[], ["-m", "skip=5,6"]], ids=["single run", "multirun"])
def test_a_job_overrides_an_own_key(make_app: Callable[..., Any], sweep: list[str]) -> None:
    app = make_app(config=SCALARS, task="print(cfg.skip, cfg.record, cfg.merge)\ntrain(cfg)")
    run = app.run(*(sweep or ["skip=5"]), "record=true", "merge=all")
    assert [f"{n} True all" in run.out for n in (5, 6)] == [True, bool(sweep)]
    assert app.generated == ([1, 1, 2, 2] if sweep else [1, 2])


# -- below `rlskip` -----------------------------------------------------------------------------
OWN = "skip: {eval_batches: 5}\ndispatch: spot\nreplay: 3\nmerge: null\nrecord: best\n"


def test_every_node_may_be_below_rlskip(composed: Any) -> None:
    options = [f"+{node}@rlskip={option}" for node, option in NODES.items()]
    config = composed(OWN, *options, "rlskip.skip.steps=[3]", "rlskip.merge.strategy=chain")
    own = OmegaConf.to_container(config)
    assert {key: own[key] for key in NODES} == OmegaConf.to_container(OmegaConf.create(OWN))
    assert str(read_skip(config).roles["rollout"].steps) == "3"
    assert read_dispatch(config).rollout_level
    assert read_replay(config).on_incomplete == "raise"
    assert read_merge(config).strategy == "chain"
    assert read_record(config).enable
    assert "rlskip" in config.hydra.callbacks


@pytest.mark.parametrize("option", SKIP_OPTIONS)
def test_every_option_of_skip_may_be_below_rlskip(option: str, composed: Any) -> None:
    config = composed(OWN, f"+skip@rlskip={option}")
    role, _, action = option.rpartition("_")
    settings = read_skip(config)
    assert list(settings.roles) == [role]
    assert settings.roles[role].action == ("cache" if action == "replay" else action)
    assert settings.start_engine == (action != "replay")
    assert OmegaConf.to_container(config.skip) == {"eval_batches": 5}


def test_one_line_keeps_an_option_off() -> None:
    own = {"merge": {"eval_batches": 5}}
    with pytest.raises(ConfigError, match=r"\+merge@rlskip=prefix"):
        read_merge(own)
    assert read_merge({**own, "rlskip": {"merge": {}}}) == MergeConfig()


def test_errors_name_the_keys_as_they_are_typed(tmp_path: Path) -> None:
    skip = {"dump_dir": str(tmp_path), "stepz": 1, "rollout": {"steps": [-1]}}
    with pytest.raises(ConfigError) as caught:
        SkipManager.init({"skip": 5, "rlskip": {"skip": skip}})
    assert "\n  - rlskip.skip.stepz: unknown key; did you mean rlskip.skip.steps?" in str(
        caught.value
    )
    assert "\n  - rlskip.skip.rollout.steps: step -1" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        SkipManager.init({"skip": 5, "rlskip": {"skip": 7}})
    assert caught.value.where == "rlskip.skip"

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> list[int]:
        return prompts

    skip = {"dump_dir": str(tmp_path), "on_miss": "error", "rollout": {"enable": True}}
    SkipManager.init({"skip": 5, "rlskip": {"skip": skip}})
    SkipManager.set_step(1)
    with pytest.raises(MissError) as missed:
        generate([1])
    assert missed.value.where == "rlskip.skip.rollout.on_miss=error"
    assert "generate it once with rlskip.skip.on_miss=generate" in missed.value.remedy

    # And where the node is at the top level again.
    SkipManager.init({"skip": skip})
    SkipManager.set_step(1)
    with pytest.raises(MissError, match=r"^skip\.rollout\.on_miss=error"):
        generate([1])


def test_a_job_skips_beside_an_own_node(make_app: Callable[..., Any]) -> None:
    app = make_app(config=OWN, task="assert cfg.skip.eval_batches == 5\ntrain(cfg)")
    on = ("+skip@rlskip=rollout_cache", "rlskip.skip.dump_dir=dumps")
    for _ in range(2):
        run = app.run(*on)
    assert "role rollout: 2 hits, 0 misses" in run.out
    assert app.generated == [1, 2]


# -- typed configs ------------------------------------------------------------------------------
@dataclass
class NoField:
    a: int = 1


@dataclass
class AnyField:
    skip: Any = None


@dataclass
class DictField:
    skip: dict[str, Any] = field(default_factory=dict)


@dataclass
class TypedField:
    skip: SkipManagerConfig = field(default_factory=SkipManagerConfig)


@pytest.mark.parametrize("schema", [NoField, AnyField, DictField, TypedField])
def test_a_dataclass(schema: type) -> None:
    ConfigStore.instance().store("rlskip_test_typed", schema)
    given = ["+skip=rollout_repeat", "skip.steps=[3]", "skip.rollout.n=2"]
    with initialize(version_base=None):
        config = compose("rlskip_test_typed", given, return_hydra_config=True)
    role = read_skip(config).roles["rollout"]
    assert (role.action, str(role.steps), role.n) == ("repeat", "3", 2)


@pytest.mark.parametrize("node", NODES)
def test_a_dataclass_needs_no_field_for_any_option(node: str) -> None:
    ConfigStore.instance().store("rlskip_test_typed", NoField)
    with initialize(version_base=None):
        config = compose("rlskip_test_typed", [f"+{node}={NODES[node]}"])
        assert config.a == 1
        assert config[node]
        assert isinstance(OmegaConf.to_object(config), NoField)
        # Its own keys are checked as before.
        with pytest.raises(Exception, match="Could not override 'b'"):
            compose("rlskip_test_typed", [f"+{node}={NODES[node]}", "b=2"])
