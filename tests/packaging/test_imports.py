"""What Hydra imports at the start of every application stays light, and who knows verl's keys."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlskip

HEAVY = ("torch", "tensordict", "ray", "numpy", "blosc2", "xxhash")

APP = """
import json, sys
import hydra, hydra._internal.hydra

metadata_of_hydra = "importlib.metadata" in sys.modules

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    loaded = lambda: sorted({name.partition(".")[0] for name in sys.modules})
    ours = lambda: sorted(name for name in sys.modules if name.startswith("rlskip"))
    seen = {"bare": loaded(), "ours": ours()}
    seen["metadata"] = "importlib.metadata" in sys.modules
    seen["metadata_of_hydra"] = metadata_of_hydra
    from rlskip import RoleConfig, SkipManager

    SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    seen["decorated"] = loaded()
    skip = {"dump_dir": "dumps", "validation": "replay", "rollout": {"enable": True}}
    SkipManager.init({"skip": skip, "trainer": {"total_training_steps": 2}})
    assert not SkipManager.will_replay("rollout", [1, 2])
    seen["started"] = loaded()
    print(json.dumps(seen))

main()
"""


def test_the_scan_of_the_plug_in_is_light(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])  # after what Hydra logs
    # It did happen, and took in no more than what Hydra must know.
    assert set(seen["ours"]) == {
        "rlskip",
        "rlskip._hydra",
        "rlskip._lazy",
        "rlskip._version",
        "rlskip.config",
        "rlskip.config.schema",
        "rlskip_conf",
    }
    assert not set(HEAVY) & set(seen["bare"])
    assert seen["metadata"] == seen["metadata_of_hydra"]
    # A decorated function of a job that skips nothing needs none of them either.
    assert not set(HEAVY) & set(seen["decorated"])
    # Nor does one that has not called a stage yet need torch, as under `rlskip doctor`.
    assert not {"torch", "tensordict", "ray"} & set(seen["started"])


@pytest.mark.parametrize("package", ["rlskip", "rlskip.hosts", "rlskip.skip", "rlskip.store"])
def test_every_name_that_a_package_offers_loads(package: str) -> None:
    module = importlib.import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    assert {*module.__all__} <= {*dir(module)}
    with pytest.raises(AttributeError, match=package):
        _ = module.another


def test_no_package_imports_a_name_that_a_module_of_its_own_has() -> None:
    """Python binds a submodule in its package when it is first imported, over any such name."""
    found = []
    for file in Path(rlskip.__file__).parent.rglob("__init__.py"):
        own = {path.stem for path in file.parent.iterdir()} - {"__init__"}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found += [(str(file), name.name) for name in node.names if name.name in own]
    assert found == []


ROOM = Path(rlskip.__file__).parent

#: Keys that the config of verl has, whatever is below them.
VERLS = re.compile(
    r"actor_rollout_ref|async_training|ray_kwargs|(gen|train)_batch_size|max_(prompt|response)_len"
    r"|trainer\.(experiment_name|project_name|total_training_steps|v1|use_v1|val_)|data\.seed"
)


def test_no_other_module_knows_a_key_of_verls() -> None:
    allowed = ("hosts/verl/", "config/facts.py")
    # SkyRL's config and TRL's arguments have some of the same names.
    others = ("hosts/skyrl/", "hosts/trl/")
    found = {
        f"{name}: {match[0]}"
        for path in ROOM.rglob("*.py")
        if not (name := path.relative_to(ROOM).as_posix()).startswith((*allowed, *others))
        for match in VERLS.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
