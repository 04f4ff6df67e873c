"""`rlskip doctor --ray`: the checks of the environment on every live node of a Ray cluster."""

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
    """No Ray cluster can be reached."""


def ask_nodes(dump_dirs: Sequence[Path]) -> list[tuple[str, list[Finding]]]:
    """The findings of each node, among them whether it sees this node's dump dirs.

    Raises
    ------
    RayUnreachableError
        Ray is not installed or not running.
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
            _check_listening(address)
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "start it (ray start --head), or name it: RAY_ADDRESS=HOST:PORT"
        raise RayUnreachableError(f"no Ray answers: {reason}", "--ray", remedy) from error
    probes = [probe for path in dump_dirs if (probe := _write_probe(path)) is not None]
    try:
        answers = {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task: Any = ray.remote(num_cpus=0, max_retries=0)(_findings_there)
            title = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            answers[title] = task.options(scheduling_strategy=strategy).remote(
                [str(path) for path in dump_dirs], [str(probe) for probe in probes]
            )
        return [(title, _wait_for(ray, answer)) for title, answer in answers.items()]
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
        if began:
            ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise OSError if nothing listens there: Ray itself would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _wait_for(ray: Any, answer: Any) -> list[Finding]:
    try:
        return [Finding(**fields) for fields in ray.get(answer, timeout=TIMEOUT_S)]
    except ray.exceptions.GetTimeoutError:
        return [Finding("node", ERROR, f"it did not answer within {TIMEOUT_S:.0f} s")]
    except Exception as error:
        # Usually ModuleNotFoundError: rlskip is not installed on that node.
        reason = str(error).strip().splitlines()[-1]
        return [
            Finding(
                "node",
                ERROR,
                f"rlskip does not run there: {reason}",
                "install the same rlskip into every node's environment",
            )
        ]


def _findings_there(dump_dirs: list[str], probes: list[str]) -> list[dict[str, Any]]:
    """The findings of the node that this runs on, in a Ray worker, as plain mappings."""
    wanted = ("python", "rlskip", "hydra", "plug-in", "callback", "verl")
    findings = [finding for finding in environment() if finding.topic in wanted]
    for dump_dir in dump_dirs:
        findings += dump_dir_findings(Path(dump_dir))
    for probe in probes:
        folder = os.path.dirname(probe)
        if os.path.exists(probe):
            what = f"{folder} is the same directory as where rlskip doctor runs"
            findings.append(Finding("dump dir", OK, what))
        else:
            findings.append(
                Finding(
                    "dump dir",
                    WARNING,
                    f"{folder} on {socket.gethostname()} is not the same directory as where "
                    "rlskip doctor runs",
                    "dumps written here are not found by a run on another node: name a directory "
                    "that all nodes share",
                )
            )
    return [attrs.asdict(finding) for finding in findings]


def _write_probe(dump_dir: Path) -> Path | None:
    """Create a file by which another node sees whether it has the same directory.

    Returns None if no file can be created there.
    """
    probe = dump_dir / f".rlskip-doctor-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
    except OSError:
        return None
    return probe
