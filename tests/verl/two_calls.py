"""A user's trainer on verl that generates twice a step: `python -m two_calls`.

It counts its steps, and states them to nobody, as trainers do that sample dynamically.
"""

import inspect
from itertools import chain, repeat

import hydra
import ray
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class TwoCalls(RayPPOTrainer):
    def fit(self):
        self.checkpoint_manager.update_weights(0)
        prompts = chain.from_iterable(repeat(self.train_dataloader))
        n = self.config.actor_rollout_ref.rollout.n
        for self.global_steps in (1, 2):
            for _ in range(2):
                batch = DataProto.from_single_dict(next(prompts))
                asked = self._get_gen_batch(batch).repeat(n, interleave=True)
                rollouts = self.async_rollout_manager.generate_sequences(asked)
                print(
                    f"rollouts of step {self.global_steps}: {rollouts.batch['responses'].tolist()}"
                )


def task_runner():
    """verl's own task runner, with this trainer in the place of its own."""
    from verl.trainer.main_ppo_v0 import TaskRunner

    theirs = getattr(TaskRunner, "__ray_metadata__", None)
    theirs = theirs.modified_class if theirs else TaskRunner

    class Runner(theirs):
        def run(self, config):
            inspect.unwrap(theirs.run).__globals__["RayPPOTrainer"] = TwoCalls
            super().run(config)

    return ray.remote(num_cpus=1)(Runner)


@hydra.main("pkg://verl.trainer.config", "ppo_trainer", version_base=None)
def main(config):
    from verl.trainer.main_ppo import run_ppo

    run_ppo(config, task_runner_class=task_runner())


if __name__ == "__main__":
    main()
