"""`+replay=fail_closed` in an application that already has its own `replay` node."""

import pytest
from hydra import compose, initialize_config_dir

from rlskip.config.replay import read_replay


@pytest.fixture
def application(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "replay: {timeout_s: 600, min_viable: 3}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield compose


def test_the_option_sets_what_it_chooses_and_nothing_else(application):
    config = application("config", overrides=["+replay=fail_closed"])
    assert config.replay == {"timeout_s": 600, "min_viable": 3, "on_incomplete": "raise"}
    settings = read_replay(config)
    assert (settings.on_incomplete, settings.timeout_s, settings.n) == ("raise", 600, 8)


def test_any_key_can_be_overridden_without_plus(application):
    overrides = ["+replay=fail_closed", "replay.on_incomplete=min_viable", "replay.val_n=1"]
    settings = read_replay(application("config", overrides=overrides))
    assert (settings.on_incomplete, settings.min_viable, settings.val_n) == ("min_viable", 3, 1)
