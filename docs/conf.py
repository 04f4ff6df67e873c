"""Sphinx: pages in Markdown, the reference from docstrings. `sphinx-build -W docs build/docs`."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import tomllib

import rlskip
from rlskip.config.application import COMPARED, DISTILLATION, NOT_COMPARED, OF_TEACHERS
from rlskip.config.attachments import AttachConfig
from rlskip.config.facts import NEUTRAL_WORDS, OTHER_NODES, SHAPING_NAMES, SHAPING_PATTERNS
from rlskip.skip.arguments import IGNORED
from rlskip.skip.dumps import NEUTRAL_META

project = "rlskip"
author = "The rlskip developers"
copyright = author
version = release = rlskip.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # `name` in a docstring
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
# Hosts are not installed where the pages are built.
autodoc_mock_imports = ["transfer_queue", "verl", "trl", "skyrl"]
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "rlskip"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_copy_source = False


# What pages leave to the code: docs/keys.md, docs/design.md, docs/troubleshooting.md.
ROOT = Path(__file__).parents[1]
CONFIGS = (
    rlskip.SkipManagerConfig, AttachConfig, rlskip.DispatchConfig, rlskip.ReplayConfig,
    rlskip.MergeConfig, rlskip.RecordConfig,
)  # fmt: skip
NAMES = {
    "compared": {**COMPARED, DISTILLATION: OF_TEACHERS},
    "not_compared": NOT_COMPARED,
    "shaping": (*SHAPING_NAMES, *SHAPING_PATTERNS),
    "words": sorted(NEUTRAL_WORDS),
    "others": sorted(OTHER_NODES),
    "ignored": IGNORED,
    "neutral": [name for name in NEUTRAL_META if name not in IGNORED],
}


def _table(config: Any) -> str:
    """The keys of a dataclass, with their defaults and the comments above them."""
    bases = [base for base in reversed(config.__mro__) if dataclasses.is_dataclass(base)]
    source = "".join(map(inspect.getsource, bases))
    found = re.findall(r"^((?:    # .*\n)+)    (\w+): ", source, re.MULTILINE)
    comments = {name: " ".join(re.findall(r"# (.*)", lines)) for lines, name in found}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in dataclasses.fields(config):
        value = getattr(config(), key.name)
        if dataclasses.is_dataclass(value):  # a role
            rows.append(f"| `{key.name}` | role | off | {comments[key.name]} |")
            continue
        default = json.dumps(value).strip('"') or '""'
        kind = key.type.replace(" | ", " or ").replace("None", "null")
        rows.append(f"| `{key.name}` | {kind} | `{default}` | {comments[key.name]} |")
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


def _fill_in(app: Any, page: str, source: list[str]) -> None:
    made = {f"keys: {config.__name__}": _table(config) for config in CONFIGS}
    made |= {f"names: {name}": _list(names) for name, names in NAMES.items()}
    made |= {"rooms": _rooms(), "errors": _errors()}
    for name, text in made.items():
        source[0] = source[0].replace(f"<!-- {name} -->", text)


def setup(app: Any) -> None:
    app.connect("source-read", _fill_in)
