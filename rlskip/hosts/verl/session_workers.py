"""Dispatch behind ``agent_loop_manager_class`` of verl's V1 trainer, session by session.

verl's own manager dispatches prompts, and a worker runs all sessions of a prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import RayPool, RolloutDispatcher, Session
from rlskip.dispatch.journal import JournalWriter
from rlskip.dispatch.sessions import DataFailure
from rlskip.hosts.verl.queue import AttemptKeys, run_queue, running, sharing, start_journals

# The class behind the ``ray.remote`` that verl puts on it.
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class SessionWorker(_VerlWorker):
    """verl's agent-loop worker, called once a session; it writes rows to TransferQueue itself."""

    def __init__(
        self, *args: Any, journal: JournalWriter | None, shares: Callable[[], None] | None
    ) -> None:
        if shares is not None:
            shares()
        super().__init__(*args)
        agent_loop_tq.tq = AttemptKeys(transfer_queue, journal)

    async def __call__(
        self, prompt: dict[str, Any], sampling: dict[str, Any], session: Session
    ) -> None:
        """Run one session, as ``AgentLoopWorkerTQ._run_prompt`` runs each of a prompt's."""
        rollout = self.config.actor_rollout_ref.rollout
        prompt.setdefault("agent_name", rollout.agent.default_agent_loop)
        running.set(session)
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
        if isinstance(output, list) and not output:  # verl would warn, and write nothing
            raise DataFailure("the agent loop returned no output")
        await super()._agent_loop_postprocess(output, validate, **kwargs)


class SessionManager(AgentLoopManagerTQ):
    """verl's agent-loop manager with rlskip's dispatcher between it and the workers."""

    async def _init_agent_loop_workers(self) -> None:
        dispatch = read_node(DispatchConfig, self.config)
        journals = start_journals(self.config, dispatch, run_queue())
        theirs = self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        journal = None if journals is None else journals.writer
        shares = None if journals is None else sharing()
        worker = functools.partial(SessionWorker, *theirs, journal=journal, shares=shares)
        pool = RayPool(worker, dispatch.workers or 1)
        self.dispatcher = RolloutDispatcher(pool, run_queue(), dispatch, journals=journals)

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.dispatcher.submit(prompts)
