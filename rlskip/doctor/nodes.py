"""`rlskip doctor --ray`: the checks of the environment on every live node of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.doctor.environment import dump_dir_findings, environment
from rlskip.doctor.finding import ERROR, OK, WARNING, Finding
from rlskip.errors import RlskipError
from rlskip.jobs.nodes import Unanswered, answers, ask_nodes
from rlskip.jobs.shared import sees_token, token_in

TIMEOUT_S = 120.0

_WANTED = ("python", "rlskip", "hydra", "plug-in", "callback", "verl")
_COMPARED = ("python", "rlskip", "hydra", "verl")
_INSTALL = "install the same versions into every node's environment"


class RayUnreachableError(RlskipError, ConnectionError):
    """No Ray cluster can be reached."""


def findings_of_nodes(dump_dirs: Sequence[Path]) -> list[tuple[str, list[Finding]]]:
    """The findings of each node, among them whether it sees this node's dump dirs.

    Raises
    ------
    RayUnreachableError
        Ray is not installed or not running.
    """
    try:
        import ray
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
    existing = [str(path) for path in dump_dirs if path.exists()]
    try:
        with contextlib.ExitStack() as tokens:
            numbers = {path: tokens.enter_context(token_in(path)) for path in existing}
            here = {finding.topic: finding.what for finding in environment()}
            asked = ask_nodes(ray, _findings_there, [str(path) for path in dump_dirs], numbers)
            found = answers(ray, asked, TIMEOUT_S)
        return [(title, _judged(answer, here)) for title, answer in found.items()]
    finally:
        if began:
            ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise OSError if nothing listens there: Ray itself would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _judged(answer: Any, here: Mapping[str, str]) -> list[Finding]:
    """A node's findings, and whether its versions are those of this process."""
    if isinstance(answer, Unanswered):
        if not answer.lacks_rlskip:
            return [Finding("node", ERROR, answer.reason)]
        return [Finding("node", ERROR, f"rlskip does not run there: {answer.reason}", _INSTALL)]
    findings = [Finding(**fields) for fields in answer]
    there = {finding.topic: finding.what for finding in findings}
    differ = [
        f"{topic} {_version(there[topic])} there, {_version(here[topic])} here"
        for topic in _COMPARED
        if topic in here.keys() & there.keys() and _version(there[topic]) != _version(here[topic])
    ]
    if differ:
        return [*findings, Finding("versions", ERROR, "; ".join(differ), _INSTALL)]
    return [*findings, Finding("versions", OK, "equal to those where rlskip doctor runs")]


def _version(what: str) -> str:
    """The version that a finding of the environment begins with."""
    return re.split("[ ,:]", what, maxsplit=1)[0]


def _findings_there(dump_dirs: list[str], tokens: dict[str, int]) -> list[dict[str, Any]]:
    """The findings of the node that this runs on, in a Ray worker, as plain mappings."""
    findings = [finding for finding in environment() if finding.topic in _WANTED]
    for dump_dir in dump_dirs:
        findings += dump_dir_findings(Path(dump_dir))
    where = "the same directory as where rlskip doctor runs"
    for dump_dir, number in tokens.items():
        if not number:
            continue
        if sees_token(dump_dir, number):
            findings.append(Finding("dump dir", OK, f"{dump_dir} is {where}"))
        else:
            what = f"{dump_dir} on {socket.gethostname()} is not {where}"
            remedy = "dumps written here are not found by a run on another node: name a directory "
            remedy += "that all nodes share"
            findings.append(Finding("dump dir", WARNING, what, remedy))
    return [attrs.asdict(finding) for finding in findings]
