"""A user's trainer on verl that samples dynamically: `python -m dynamic_sampling`.

A step generates batch after batch, and drops groups whose rewards are all equal, until it has
``data.train_batch_size`` prompts. The trainer counts its steps, and states them to nobody.
"""

import inspect
import uuid
from itertools import chain, repeat

import hydra
import numpy as np
import ray
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage, compute_response_mask


class DynamicTrainer(RayPPOTrainer):
    def fit(self):
        self.global_steps = 0
        self.checkpoint_manager.update_weights(self.global_steps)
        prompts = chain.from_iterable(repeat(self.train_dataloader))
        for step in range(1, self.total_training_steps + 1):
            self.global_steps = step
            batch = self.sample(prompts)
            self.checkpoint_manager.sleep_replicas()
            metrics = self.update(batch)
            self.checkpoint_manager.update_weights(step)
            print(f"step:{step} - actor/grad_norm:{metrics['actor/grad_norm'][0]}")

    def sample(self, prompts):
        """As many prompts as a batch has, each with rewards that differ."""
        size, n = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        batches = []
        while sum(map(len, batches)) < size * n:
            batch = DataProto.from_single_dict(next(prompts))
            rollouts = self.async_rollout_manager.generate_sequences(
                self._get_gen_batch(batch).repeat(n, interleave=True)
            )
            rollouts.meta_info.pop("timing")
            uids = [str(uuid.uuid4()) for _ in range(len(batch))]
            batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
            batch = batch.repeat(n, interleave=True).union(rollouts)
            rewards = batch.batch["rm_scores"].sum(-1).view(-1, n)
            differ = (rewards != rewards[:, :1]).any(-1).repeat_interleave(n)
            batches.append(batch[differ.numpy()])
        print(f"step {self.global_steps} made {len(batches)} calls")
        batch = DataProto.concat(batches)[: size * n]
        batch.meta_info = {"temperature": self.config.actor_rollout_ref.rollout.temperature}
        return batch

    def update(self, batch):
        batch.batch["response_mask"] = compute_response_mask(batch)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        log_probs, _ = self._compute_old_log_prob(batch)
        log_probs.batch.pop("entropys")
        batch = batch.union(log_probs)
        batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
        algorithm = self.config.algorithm
        batch = compute_advantage(
            batch, algorithm.adv_estimator, gamma=algorithm.gamma, lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n, config=algorithm,
        )  # fmt: skip
        return self._update_actor(batch).meta_info["metrics"]


def task_runner():
    """verl's own task runner, with this trainer in the place of its own."""
    from verl.trainer.main_ppo_v0 import TaskRunner

    theirs = getattr(TaskRunner, "__ray_metadata__", None)
    theirs = theirs.modified_class if theirs else TaskRunner

    class Runner(theirs):
        def run(self, config):
            inspect.unwrap(theirs.run).__globals__["RayPPOTrainer"] = DynamicTrainer
            super().run(config)

    return ray.remote(num_cpus=1)(Runner)


@hydra.main("pkg://verl.trainer.config", "ppo_trainer", version_base=None)
def main(config):
    from verl.trainer.main_ppo import run_ppo

    run_ppo(config, task_runner_class=task_runner())


if __name__ == "__main__":
    main()
