"""As much of verl's config as rlskip reads, for tests without verl."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

VERL = """
skip:
  _target_: verl.utils.skip.SkipManagerConfig
  rollout: {enable: false, dump_dir: ~/.verl/rollout_dump, steps: [], action: cache}
  rollout_tq: {enable: false, dump_dir: ~/.verl/rollout_dump, steps: [], action: cache}
  async_rollout: {enable: false, dump_dir: ~/.verl/rollout_dump, steps: [], action: cache}
trainer:
  {use_v1: false, total_training_steps: 4, val_before_train: false, test_freq: -1, val_only: false,
   v1: {trainer_mode: sync, sampler: {max_off_policy_threshold: 8, max_off_policy_strategy: drop,
        sync_refill_failed_groups: false, custom_sampler: {path: null, name: null},
        sampler_kwargs: {}}},
   resume_mode: disable, resume_from_path: null, default_local_dir: ckpt,
   experiment_name: e, project_name: p}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: base, override_config: {attn: eager}, lora_rank: 0, lora_adapter_path: null}
  actor: {use_kl_loss: true, fsdp_config: {dtype: bfloat16}}
  ref: {fsdp_config: {dtype: bfloat16, param_offload: false}, log_prob_micro_batch_size: 4}
  rollout:
    {n: 4, val_kwargs: {n: 2}, name: vllm, temperature: 1.0, tensor_model_parallel_size: 8,
     disaggregation: {enabled: true}, agent: {num_workers: 8, agent_loop_manager_class: null}}
data: {train_batch_size: 4, gen_batch_size: null, max_prompt_length: 64, max_response_length: 16}
algorithm: {use_kl_in_reward: false, filter_groups: {enable: false}}
reward:
  num_workers: 8
  custom_reward_function: {path: null, name: score}
  reward_manager: {source: register, name: naive}
  reward_model: {enable: false, enable_resource_pool: false, model_path: judge}
"""


def verl(*more: str) -> DictConfig:
    """The config with these overrides."""
    config = OmegaConf.merge(OmegaConf.create(VERL), OmegaConf.from_dotlist(list(more)))
    OmegaConf.set_struct(config, True)
    assert isinstance(config, DictConfig)
    return config
