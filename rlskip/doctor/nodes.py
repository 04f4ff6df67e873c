"""`rlskip doctor --ray`: the same questions put to every live node of a Ray cluster."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.doctor.environment import dump_dir_findings, environment
from rlskip.doctor.finding import ERROR, OK, WARNING, Finding
from rlskip.errors import RlskipError

TIMEOUT_S = 120.0


class RayUnreachableError(RlskipError, ConnectionError):
    """There is no Ray to ask."""


def ask_nodes(dump_dirs: Sequence[Path]) -> list[tuple[str, list[Finding]]]:
    """For each node its findings, among them whether it sees this node's dump dirs.

    Raises
    ------
    RayUnreachableError
        Ray is not installed, or none runs.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise RayUnreachableError("Ray is not installed", "--ray", "pip install ray") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    began = not ray.is_initialized()
    try:
        if began:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "start it (ray start --head), or name it: RAY_ADDRESS=HOST:PORT"
        raise RayUnreachableError(f"no Ray answers: {reason}", "--ray", remedy) from error
    probes = [probe for path in dump_dirs if (probe := _leave_probe(path)) is not None]
    try:
        asked = {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            question: Any = ray.remote(num_cpus=0, max_retries=0)(_answer)
            title = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            asked[title] = question.options(scheduling_strategy=strategy).remote(
                [str(path) for path in dump_dirs], [str(probe) for probe in probes]
            )
        return [(title, _wait_for(ray, answer)) for title, answer in asked.items()]
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
        if began:
            ray.shutdown()


def _knock(address: str) -> None:
    """Where nobody listens Ray itself would wait for minutes; raises OSError."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _wait_for(ray: Any, answer: Any) -> list[Finding]:
    try:
        return [Finding(**said) for said in ray.get(answer, timeout=TIMEOUT_S)]
    except ray.exceptions.GetTimeoutError:
        return [Finding("node", ERROR, f"it did not answer within {TIMEOUT_S:.0f} s")]
    except Exception as error:
        # Above all ModuleNotFoundError: rlskip is not there.
        reason = str(error).strip().splitlines()[-1]
        return [
            Finding(
                "node",
                ERROR,
                f"rlskip does not run there: {reason}",
                "install the same rlskip into every node's environment",
            )
        ]


def _answer(dump_dirs: list[str], probes: list[str]) -> list[dict[str, Any]]:
    """In a worker on the node."""
    wanted = ("python", "rlskip", "hydra", "plug-in", "callback", "verl")
    findings = [finding for finding in environment() if finding.topic in wanted]
    for dump_dir in dump_dirs:
        findings += dump_dir_findings(Path(dump_dir))
    for probe in probes:
        folder = os.path.dirname(probe)
        if os.path.exists(probe):
            what = f"{folder} is the one that the asking node has"
            findings.append(Finding("dump dir", OK, what))
        else:
            findings.append(
                Finding(
                    "dump dir",
                    WARNING,
                    f"{folder} on {socket.gethostname()} is not the asking node's",
                    "dumps written here are not found by a run on another node: name a directory "
                    "that all nodes share",
                )
            )
    return [attrs.asdict(finding) for finding in findings]


def _leave_probe(dump_dir: Path) -> Path | None:
    """A file that says to another node whether it sees this directory; None where none can be."""
    probe = dump_dir / f".rlskip-doctor-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
    except OSError:
        return None
    return probe
