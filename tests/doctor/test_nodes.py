"""doctor --ray: how the answers of nodes are judged, without a Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from rlskip.doctor import nodes
from rlskip.doctor.environment import environment
from rlskip.doctor.finding import ERROR, OK


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asked(answer)``: what a node answers; without one it is asked in this process."""

    def asked(answer: Any = None) -> None:
        def ask(ray: Any, call: Any, *arguments: Any) -> Any:
            return call(*arguments) if answer is None else answer

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
        monkeypatch.setattr(nodes, "ask_nodes", ask)
        monkeypatch.setattr(nodes, "answers", lambda ray, answer, seconds: {"node": answer})

    return asked


def test_versions_are_compared_and_paths_are_not(asked: Any) -> None:
    there = [attrs.asdict(finding) for finding in environment()]
    for finding in there:
        finding["what"] += "/elsewhere"
    asked(there)
    ((_, found),) = nodes.findings_of_nodes([])
    assert (found[-1].topic, found[-1].level) == ("versions", OK)
    for finding in there:
        if finding["topic"] == "hydra":
            finding["what"] = "0.9 in /elsewhere"
    ((_, found),) = nodes.findings_of_nodes([])
    assert (found[-1].topic, found[-1].level) == ("versions", ERROR)
    assert found[-1].what.startswith("hydra 0.9 there, 1.")


def test_a_directory_that_takes_no_mark_is_not_another(asked: Any, tmp_path: Path) -> None:
    asked()
    ((_, found),) = nodes.findings_of_nodes([Path("/proc"), tmp_path])
    said = [finding.what for finding in found if finding.topic == "dump dir"]
    assert [what.split()[0] for what in said if "same directory" in what] == [str(tmp_path)]
