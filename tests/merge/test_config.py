import pytest
from omegaconf import OmegaConf

from rlskip.config.merge import MergeConfig, read_merge
from rlskip.errors import ConfigError


def test_off_by_default():
    assert read_merge({}) == MergeConfig(stepwise_output=False)
    assert read_merge(OmegaConf.create({"merge": None})) == MergeConfig()


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({"merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}, "merge": {"strategy": "chain"}}, True),
        # False is the host's default, not a choice.
        ({"generator": {"merge_stepwise_output": False}, "merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": False}}, False),
        ({"generator": {}}, False),
    ],
)
@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_the_hosts_flag_means_the_same(config, on, make):
    assert read_merge(make(config)).stepwise_output is on


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (
            {"generator": {"merge_stepwise_output": True}, "merge": {"stepwise_output": False}},
            "merge.stepwise_output",
        ),
        ({"generator": {"merge_stepwise_output": "yes"}}, "generator.merge_stepwise_output"),
    ],
)
def test_invalid_settings_are_refused(config, key):
    with pytest.raises(ConfigError) as error:
        read_merge(config)
    assert error.value.where == key
