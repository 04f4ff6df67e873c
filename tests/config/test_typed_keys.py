"""Messages name each key where the application has it: at the top level, or below `rlskip`."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlskip
from rlskip import SkipManager
from rlskip._nodes import NODES, place
from rlskip.config.legacy import LegacyFlagWarning
from rlskip.doctor.finding import ERROR, Finding

PACKAGE = Path(rlskip.__file__).parent
TELLS = {"debug", "info", "warning", "error", "exception", "log", "warn", "_warn_once"}
NAMED = re.compile(rf"({'|'.join(NODES)})[.=]")
KEY = re.compile(rf"(?<![\w.@/])({'|'.join(NODES)})\.[a-z_%]|(?<=\+)({'|'.join(NODES)})=")


def untyped(file: Path) -> Iterator[str]:
    """The keys in log lines and warnings of a file that do not go through `as_typed`."""
    text = file.read_text(encoding="utf-8")
    for function in ast.walk(ast.parse(text)) if NAMED.search(text) else ():
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values.setdefault(node.targets[0].id, []).append(node.value)
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and name_of(call) in TELLS:
                for part in texts(call.args, values):
                    if KEY.search(part):
                        yield f"{file.relative_to(PACKAGE)}:{call.lineno}: {part}"


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def texts(nodes: list[Any], values: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The text in these expressions, and in what local names stand for, outside `as_typed`."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):  # as one text: a key may span its parts
            yield "".join(getattr(part, "value", "%") if isinstance(part, ast.Constant) else "%"
                          for part in node.values)  # fmt: skip
        elif isinstance(node, ast.Name):
            yield from texts(values.get(node.id, []), {})
        elif not (isinstance(node, ast.Call) and name_of(node) == "as_typed"):
            yield from texts(list(ast.iter_child_nodes(node)), values)


def test_every_log_line_and_warning_names_keys_as_they_are_typed() -> None:
    assert [line for file in sorted(PACKAGE.rglob("*.py")) for line in untyped(file)] == []


def test_what_the_doctor_finds_names_keys_as_they_are_typed() -> None:
    place("skip", below=True)
    found = Finding("config", ERROR, "skip.steps: empty", "set skip.steps=all")
    place("skip", below=False)
    assert (found.what, found.remedy) == ("rlskip.skip.steps: empty", "set rlskip.skip.steps=all")


def test_warnings_name_keys_as_they_are_typed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    skip = {"dump_dir": str(tmp_path), "rollout": {"enable": True}}
    verls = {"actor_rollout_ref": {"rollout": {"skip_rollout": True}}}
    caplog.set_level(logging.WARNING)
    with pytest.warns(LegacyFlagWarning, match=r" rlskip\.skip\.rollout\.enable are both true"):
        SkipManager.init({"skip": 5, "rlskip": {"skip": skip}, **verls})
    for step in (1, 2):
        SkipManager.set_step(step)
    assert "or name it: rlskip.skip.attach.ROLE=package.module:function" in caplog.text
