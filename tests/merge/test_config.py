import pytest
from omegaconf import OmegaConf

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import MergeConfig


def test_off_by_default():
    assert read_node(MergeConfig, {}) == MergeConfig(stepwise_output=False)
    assert read_node(MergeConfig, OmegaConf.create({"merge": None})) == read_node(MergeConfig, {})


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({"merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": True}, "merge": {"strategy": "chain"}}, True),
        ({"generator": {"merge_stepwise_output": False}, "merge": {"stepwise_output": True}}, True),
        ({"generator": {"merge_stepwise_output": False}}, False),
        (
            {"generator": {"merge_stepwise_output": True}, "merge": {"stepwise_output": False}},
            False,
        ),
        ({"generator": {}}, False),
    ],
)
@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_the_hosts_flag_means_the_same(config, on, make):
    assert read_node(MergeConfig, make(config)).stepwise_output is on
