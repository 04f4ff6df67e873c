"""The tables that pages take from the code: keys, names, rooms, errors. `python docs/tables.py`.

Each is between two comments, ``<!-- errors -->`` and ``<!-- /errors -->``; what is between them is
written here, and nowhere else.
"""

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import tomllib

import rlskip
from rlskip.config.check import comments
from rlskip.config.facts import COMPARED, DISTILLATION, OF_TEACHERS
from rlskip.config.skip import AttachConfig
from rlskip.hosts.verl.seams import TABLE
from rlskip.skip.names import (
    IGNORED,
    NEUTRAL_META,
    NEUTRAL_WORDS,
    OTHER_NODES,
    SHAPING_NAMES,
    SHAPING_PATTERNS,
)  # fmt: skip

ROOT = Path(__file__).parents[1]
CONFIGS = (
    rlskip.SkipManagerConfig, AttachConfig, rlskip.DispatchConfig, rlskip.ReplayConfig,
    rlskip.MergeConfig, rlskip.RecordConfig,
)  # fmt: skip
NAMES = {
    "compared": {**COMPARED, DISTILLATION: OF_TEACHERS},
    "shaping": SHAPING_NAMES,
    "patterns": SHAPING_PATTERNS,
    "words": sorted(NEUTRAL_WORDS),
    "others": sorted(OTHER_NODES),
    "ignored": IGNORED,
    "neutral": [name for name in NEUTRAL_META if name not in IGNORED],
}


def _table(config: Any) -> str:
    """The keys of a dataclass, with their types, defaults and comments."""
    told = comments(config)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in dataclasses.fields(config):
        value = getattr(config(), key.name)
        kind, default = key.type.replace(" | ", " or ").replace("None", "null"), json.dumps
        if dataclasses.is_dataclass(value):  # a role
            kind, default = "role", lambda _: "off"
            told[key.name] = type(value).__doc__
        shown = default(value).strip('"') or '""'
        rows.append(f"| `{key.name}` | {kind} | `{shown}` | {told[key.name]} |")
    return "\n".join(rows)


def _list(names: Any) -> str:
    if isinstance(names, dict):
        return "\n".join(f"- `{node}`: {_list(below)}" for node, below in names.items())
    return ", ".join(f"`{name}`" for name in names)


def _rooms() -> str:
    """The floors of pyproject.toml, and the first sentence of each room."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    floors = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = ["| floor | room | holds |", "|---|---|---|"]
    for floor, layer in enumerate(reversed(floors)):
        for room in re.findall(r"rlskip\.(\w+)", layer):
            file = ROOT / "rlskip" / room
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            rows.append(f"| {floor} | `{room}` | {text.partition(chr(10))[0]} |")
    return "\n".join(rows)


def _errors() -> str:
    """Every error and the first paragraph of its docstring, from the source."""
    files = sorted((ROOT / "rlskip").rglob("*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"RlskipError"}
    while (
        more := {
            node.name for node in classes if any(ast.unparse(base) in found for base in node.bases)
        }
        - found
    ):
        found |= more
    texts = {node.name: ast.get_docstring(node) or "" for node in classes if node.name in found}
    rows = [
        f"| `{name}` | {' '.join(texts[name].partition(chr(10) * 2)[0].split())} |"
        for name in sorted(found, key=str.lower)
        if not name.startswith("_")
    ]
    return "\n".join(["| error | when it is raised |", "|---|---|", *rows])


def _seams() -> str:
    """What rlskip depends on in verl, and what happens where it is gone."""
    rows = ["| in verl | rlskip | where it is gone |", "|---|---|---|"]
    for seam in TABLE:
        gone = f"off is {seam.feature}" if seam.feature else "importing verl ends the run"
        called = " (named after the first step if it is not called)" if seam.role else ""
        rows.append(f"| `{seam.target}` | {seam.purpose} | {gone}{called} |")
    return "\n".join(rows)


def made() -> dict[str, str]:
    """All tables by the names of their comments."""
    tables = {f"keys: {config.__name__}": _table(config) for config in CONFIGS}
    tables |= {f"names: {name}": _list(names) for name, names in NAMES.items()}
    return {**tables, "rooms": _rooms(), "errors": _errors(), "seams": _seams()}


def current(page: str, tables: dict[str, str]) -> str:
    """A page with the tables as the code has them."""
    for name, text in tables.items():
        between = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = between.sub(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
    return page


if __name__ == "__main__":
    tables = made()
    for file in sorted((ROOT / "docs").glob("*.md")):
        file.write_text(current(file.read_text(encoding="utf-8"), tables), encoding="utf-8")
