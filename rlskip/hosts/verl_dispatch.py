"""rlskip's dispatch behind the seam ``agent_loop_manager_class`` of verl 0.9's V1 trainer.

verl hands whole prompts to its agent-loop workers, and a worker runs all sessions of a prompt.
Here the dispatcher hands out single sessions, to workers that are verl's own in all but that.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rlskip.config.dispatch import read_dispatch
from rlskip.dispatch import RayPool, RolloutDispatcher, Session
from rlskip.dispatch.failures import DataFailure
from rlskip.hosts.verl_v1 import queue
from rlskip.keys import ATTEMPT, TRAIN, VAL, TrajectoryKey

# The class behind the ``ray.remote`` that verl puts on it.
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class

_attempt: ContextVar[int] = ContextVar("rlskip_attempt", default=0)


class SessionWorker(_VerlWorker):
    """verl's agent-loop worker, called once a session; its rows go to TransferQueue as ever."""

    async def __call__(
        self, prompt: dict[str, Any], sampling: dict[str, Any], session: Session
    ) -> None:
        """What ``AgentLoopWorkerTQ._run_prompt`` does for each of a prompt's sessions."""
        rollout = self.config.actor_rollout_ref.rollout
        prompt.setdefault("agent_name", rollout.agent.default_agent_loop)
        _attempt.set(session.attempt)
        await self._run_agent_loop(
            {"repetition_penalty": 1.0, "logprobs": rollout.calculate_log_probs, **sampling},
            trajectory={
                "step": session.step,
                "sample_index": session.sample_index,
                "rollout_n": session.rollout_n,
                "validate": session.validate,
            },
            trace=False,
            session_id=session.session_id,
            **prompt,
        )

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        rows = len(output) if isinstance(output, list) else 1
        if not rows:  # verl would warn, and write nothing
            raise DataFailure("the agent loop returned no output")
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        attempt = _attempt.get()
        if attempt:  # which rows count is told by the marker, and that comes after these
            uid, session_id = kwargs["uid"], kwargs["session_id"]
            await transfer_queue.async_kv_batch_put(
                keys=[str(TrajectoryKey(uid, session_id, i)) for i in range(rows)],
                partition_id=VAL if validate else TRAIN,
                tags=[{ATTEMPT: attempt}] * rows,
            )


class SessionManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, with the dispatcher between it and the workers."""

    async def _init_agent_loop_workers(self) -> None:
        dispatch = read_dispatch(self.config)
        worker = functools.partial(
            SessionWorker,
            self.config,
            self.llm_client,
            self.teacher_client,
            self.reward_loop_worker_handles,
        )
        pool = RayPool(worker, dispatch.workers or 1)
        self.dispatcher = RolloutDispatcher(pool, queue(), dispatch)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start the sessions of these prompts, and return at once."""
        self.dispatcher.submit(prompts)
