"""The nodes of a Ray cluster: ask each of them the same question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlskip.jobs.shared import sees_token, token_in


@attrs.frozen
class Unanswered:
    """Why a node gave no answer.

    Parameters
    ----------
    lacks_rlskip
        Whether rlskip cannot be imported there.
    is_late
        Whether it may answer yet.
    """

    lacks_rlskip: bool = False
    is_late: bool = False


def ask_nodes(ray: Any, question: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call ``question(*args)`` on each live node, in a separate process.

    Returns
    -------
    dict
        By the node's name, a reference to its answer, for :func:`answers`.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(question)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            asked[name] = task.options(scheduling_strategy=there).remote(*args)
    return asked


def nodes_without(ray: Any, directory: str | Path, timeout_s: float) -> list[str]:
    """The nodes on which `directory` is another one than in this process.

    A node that gives no answer within `timeout_s` seconds may be about to leave, and is not named.
    """
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return []
    with token_in(directory) as number:
        found = answers(ray, ask_nodes(ray, sees_token, str(directory), number), timeout_s)
    return [node for node, sees in found.items() if sees is False]


def answers(ray: Any, asked: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """What each node answered within `timeout_s` seconds, or :class:`Unanswered`."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    return {
        name: _answer(ray, reference) if reference in ready else Unanswered(is_late=True)
        for name, reference in asked.items()
    }


def _answer(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:
        # Ray unpickles the question there, and reports what that raised as text.
        return Unanswered(lacks_rlskip="No module named 'rlskip" in str(error))
