"""verl 0.9's genuine fully async rollouter without its trainer: `python -m async_rollouter`.

The trainer sends weights over NCCL, so on a CPU the rollouter runs alone, with the weights that
the token server started with: verl's main, FullyAsyncRollouter, agent loops and MessageQueue.
Prints a line ``sample <uid> <hash of its tensors>`` for each sample in the message queue.
"""

import hashlib
from pathlib import Path

import hydra
import ray
import verl
from omegaconf import open_dict

CONFIG = Path(verl.__file__).parent / "experimental" / "fully_async_policy" / "config"


@ray.remote
class RollouterOnly:
    """The part of FullyAsyncTaskRunner that concerns the rollouter, in its order."""

    def run(self, config):
        from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
        from verl.experimental.fully_async_policy.message_queue import (
            MessageQueue,
            MessageQueueClient,
        )
        from verl.utils import hf_tokenizer

        tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
        rollouter = FullyAsyncRollouter.remote(
            config=config, tokenizer=tokenizer, device_name="cpu"
        )
        ray.get(rollouter.init_workers.remote())
        ray.get(rollouter.set_max_required_samples.remote())
        size = ray.get(rollouter.get_max_queue_size.remote())
        queue = MessageQueueClient(MessageQueue.remote(config, size))
        ray.get(rollouter.set_message_queue_client.remote(queue))
        ray.get(rollouter.fit.remote())
        while (item := queue.get_sample_sync()) is not None and item[0] is not None:
            sample = ray.cloudpickle.loads(item[0]).full_batch
            print("sample", sample.non_tensor_batch["uid"][0], digest(sample), flush=True)


def digest(batch):
    """A hash of all that was generated."""
    found = hashlib.sha256()
    for name in sorted(batch.batch.keys()):
        found.update(name.encode() + batch.batch[name].contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


@hydra.main(
    config_path=str(CONFIG),
    config_name="fully_async_ppo_trainer",
    version_base=None,
)
def main(config):
    from verl.trainer.main_ppo import run_ppo

    with open_dict(config):
        config.actor_rollout_ref.rollout.nnodes = config.rollout.nnodes
        config.actor_rollout_ref.rollout.n_gpus_per_node = config.rollout.n_gpus_per_node
    run_ppo(config, task_runner_class=RollouterOnly)


if __name__ == "__main__":
    main()
