from __future__ import annotations

from omegaconf import OmegaConf

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig


def test_without_a_node_it_is_the_legacy_path():
    config = read_node(DispatchConfig, {})
    assert config.rollout_level is False
    assert (config.workers, config.n, config.val_n, config.seed) == (4, 1, 1, 0)
    assert read_node(DispatchConfig, {"seed": 3}).seed == 3


def test_the_host_s_keys_mean_the_same():
    host = """
        trainer.v1.rollout_level_dispatch=true trainer.v1.max_concurrent_rollouts_per_worker=7
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.agent.num_workers=3
        actor_rollout_ref.rollout.temperature=0.7 actor_rollout_ref.rollout.top_p=0.9
        actor_rollout_ref.rollout.val_kwargs.n=2 actor_rollout_ref.rollout.val_kwargs.temperature=0
        data.seed=5
    """
    config = read_node(DispatchConfig, OmegaConf.from_dotlist(host.split()))
    assert config.rollout_level is True
    assert config.max_concurrent_rollouts_per_worker == 7
    assert (config.workers, config.n, config.val_n, config.seed) == (3, 8, 2, 5)
    assert config.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert config.val_sampling == {"temperature": 0}
