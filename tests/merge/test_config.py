import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlskip.config.merge import MergeConfig, read_merge
from rlskip.config.register import register
from rlskip.errors import ConfigError, NotInstalledError

ROOT = Path(__file__).parents[2]


def test_off_where_nothing_is_said():
    assert read_merge({}) == MergeConfig(stepwise_output=False)
    assert read_merge(OmegaConf.create({"merge": None})) == MergeConfig()


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({"merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}, "merge": {"strategy": "chain"}}, True),
        # False is the host's default: it says nothing.
        ({"generator": {"merge_stepwise_output": False}, "merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": False}}, False),
        ({"generator": {}}, False),
    ],
)
@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_the_hosts_flag_means_the_same(config, on, make):
    assert read_merge(make(config)).stepwise_output is on


def test_flags_that_contradict_each_other_are_refused():
    config = {"generator": {"merge_stepwise_output": True}, "merge": {"stepwise_output": False}}
    with pytest.raises(ConfigError, match=r"merge\.stepwise_output: .*generator\.merge_stepwise"):
        read_merge(config)


def test_every_problem_is_named_at_once():
    config = {
        "merge": {"strategy": "chian", "max_seq_len": 0, "on_overlong": None, "strateg": "chain"},
        "generator": {"merge_stepwise_output": "yes"},
    }
    with pytest.raises(ConfigError) as error:
        read_merge(config)
    text = str(error.value)
    for part in (
        "5 problems",
        "merge.strategy: 'chian' is none of adjacent, chain, did you mean 'chain'?",
        "merge.max_seq_len: must be at least 1, got 0",
        "merge.on_overlong: expected str, got None",
        "merge.strateg: unknown key; did you mean merge.strategy?",
        "generator.merge_stepwise_output: expected bool, got 'yes' (str)",
    ):
        assert part in text


def test_an_option_that_arrived_as_a_string_is_no_config():
    with pytest.raises(NotInstalledError, match="merge: 'prefix' arrived as a plain string"):
        read_merge({"merge": "prefix"})


@pytest.fixture
def composed(tmp_path):
    register()
    (tmp_path / "config.yaml").write_text("merge: {on_overlong: warn}\n")
    (tmp_path / "bare.yaml").write_text("trainer: {}\n")

    def make(*overrides, name="config"):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose(name, ["hydra.searchpath=[pkg://rlskip_conf]", *overrides])

    return make


@pytest.mark.parametrize("name", ["config", "bare"])
def test_the_option_turns_merging_on(composed, name):
    assert read_merge(composed("+merge=prefix", name=name)).stepwise_output


def test_the_option_leaves_the_users_keys_and_takes_overrides_without_plus_plus(composed):
    config = composed("+merge=prefix", "merge.strategy=chain", "merge.max_seq_len=4096")
    assert read_merge(config) == MergeConfig(True, "chain", 4096, "warn")
    assert not read_merge(composed("+merge=prefix", "merge.stepwise_output=false")).stepwise_output


@pytest.mark.parametrize("field", dataclasses.fields(MergeConfig), ids=lambda field: field.name)
def test_every_key_is_documented_with_its_default(field):
    default = {None: "null", False: "false"}.get(field.default, field.default)
    page = (ROOT / "docs" / "merge.md").read_text()
    assert re.search(rf"^\| `{field.name}` \| [^|]+ \| `{default}` \|", page, re.MULTILINE)
    option = (ROOT / "rlskip_conf" / "merge" / "prefix.yaml").read_text()
    assert f"#   {field.name}: {default} " in option or f"  {field.name}: true" in option
