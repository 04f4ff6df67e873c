"""As much of verl as the table of seams names, made from the table: what a release may lack."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import ModuleType

from rlskip.hosts.verl.seams import TABLE

_MANAGER = """
class SkipManager:
    step = -1
    skip_instances = {}

    @classmethod
    def init(cls, config): ...

    @classmethod
    def set_step(cls, step): ...

    @classmethod
    def annotate(cls, role, **options):
        return lambda function: function

    @classmethod
    def annotate_tq(cls, role, phase):
        return lambda function: function
"""
_DECORATED = {
    "generate_sequences": '@SkipManager.annotate(role="rollout")',
    "generate_sequences_single": '@SkipManager.annotate(role="async_rollout")',
    "sample": '@SkipManager.annotate_tq(role="rollout_tq", phase="sample")',
}


def write(site: Path, **replaced: str) -> None:
    """Write a package `verl`; `replaced` gives modules, by the last part of their names."""
    classes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for seam in TABLE:
        owner, _, name = seam.path.rpartition(".")
        head = f"{_DECORATED[name]}\n" if seam.decorated else ""
        is_async = "async " * (seam.decorated and name != "sample")
        body = f"{head}{is_async}def {name}(self, *args, **kwargs): ..."
        if not owner and name.startswith("_"):
            body = f"{name} = {{}}"
        elif name == "register":
            body = "registered = {}\n@classmethod\ndef register(cls, name, load):\n"
            body += "    cls.registered[name] = load"
        classes[seam.module][owner].append(body)
    for module, owners in classes.items():
        text = "from verl.utils.skip.skip_manager import SkipManager\n"
        for owner, bodies in owners.items():
            joined = "\n".join(bodies)
            text += f"class {owner}:\n{textwrap.indent(joined, '    ')}\n" if owner else joined
            text += "\n"
        if module.endswith("skip_manager"):
            text = _MANAGER
        last = module.rpartition(".")[2]
        file = site.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(replaced.get(last, text)))
    for folder in [site / "verl", *(f for f in (site / "verl").rglob("*") if f.is_dir())]:
        (folder / "__init__.py").touch()
    (site / "verl" / "__init__.py").write_text("__version__ = '0.9.1'\n")


def forget() -> None:
    """Let verl be imported again."""
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def import_all() -> dict[str, ModuleType]:
    """Every module of the table."""
    names = dict.fromkeys(seam.module for seam in TABLE)
    return {name: importlib.import_module(name) for name in names}
