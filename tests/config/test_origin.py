"""What a run is named after that was given no names, and how alike two such runs must be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlskip
from rlskip.store import Identity

SAY = """
import json
from attrs import astuple
from rlskip.config.facts import Origin
def say(*_):
    return json.dumps(json.dumps(astuple(Origin.of(None))))
"""
SCRIPT = "from say import say\nprint(say())\n"
JOBLIB = """
from say import say
from joblib import Parallel, delayed
if __name__ == "__main__":
    print(Parallel(2)(delayed(say)(i) for i in range(2))[0])
"""
RAY = """
import os, ray
def there():
    from say import say
    return say()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         runtime_env={"working_dir": ".", "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
print(ray.get(ray.remote(there).remote()))
"""
KERNEL = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
def show(message):
    print(message["content"].get("text", ""), end="")
client.execute_interactive("from say import say; print(say())", timeout=120, output_hook=show)
manager.shutdown_kernel(now=True)
"""
NOTEBOOK = "import __main__; del __main__.__file__\n" + SCRIPT
PYTEST = "from say import say\ndef test_it(): print(say())\n"
FILES = {
    "proj/.git/HEAD": "",
    **{f"proj/{name}.py": SCRIPT for name in ("train", "pkg/sub/run", "pkg/__main__", "own/setup")},
    "proj/workers.py": JOBLIB,
    "proj/cluster.py": RAY,
    "proj/jupyter.py": KERNEL,
    "proj/tests/test_it.py": PYTEST,
    "proj/lib/site-packages/ipykernel_launcher.py": NOTEBOOK,
    "proj/bin/installed": SCRIPT,
    "alone/notes.txt": "",
    "session_1/_ray_pkg_0a1b/jobs/train.py": SCRIPT,
    "session_1/_ray_pkg_0a1b/setup.py": "",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
PYTEST_RUN = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/test_it.py"]


@pytest.mark.parametrize(
    ("cwd", "arguments", "expected"),
    [
        ("proj", ["train.py"], ("train", "proj", "proj/train.py")),
        ("proj/pkg", ["../train.py"], ("train", "proj", "proj/train.py")),
        ("proj", ["-m", "pkg.sub.run"], ("run", "proj", "proj/pkg/sub/run.py")),
        ("proj", ["-m", "pkg"], ("pkg", "proj", "proj/pkg/__main__.py")),
        ("proj", ["own/setup.py"], ("setup", "own", "proj/own/setup.py")),
        ("alone", ["-c", SCRIPT], ("alone", "alone", "alone")),
        ("proj", ["lib/site-packages/ipykernel_launcher.py"], ("proj", "proj", "proj")),
        pytest.param("proj", ["jupyter.py"], ("proj", "proj", "proj"), marks=pytest.mark.data),
        ("proj/pkg", ["../bin/installed"], ("pkg", "proj", "proj/pkg")),
        pytest.param(
            "proj", [*TORCHRUN, "train.py"], ("train", "proj", "proj/train.py"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "proj", [*TORCHRUN, "-m", "pkg.sub.run"], ("run", "proj", "proj/pkg/sub/run.py"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "proj", ["workers.py"], ("workers", "proj", "proj/workers.py"), marks=pytest.mark.slow
        ),
        ("proj", PYTEST_RUN, ("proj", "proj", "proj")),
        (
            "session_1/_ray_pkg_0a1b", ["jobs/train.py"],
            ("train", "ray", "ray/jobs/train.py"),
        ),
        pytest.param("proj", ["cluster.py"], ("ray", "ray", "ray"), marks=pytest.mark.ray),
    ],
    ids=[
        "script", "from elsewhere", "-m", "__main__", "nearest root", "-c, no project", "notebook",
        "kernel", "installed", "torchrun", "torchrun -m", "joblib", "pytest", "ray job", "worker",
    ],
)  # fmt: skip
def test_what_names_a_run(
    tmp_path: Path, cwd: str, arguments: list[str], expected: tuple[str, ...]
) -> None:
    for name, text in {**FILES, "say/say.py": SAY}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = os.pathsep.join([str(Path(rlskip.__file__).parents[1]), str(tmp_path / "say")])
    env = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path / cwd, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line, *_) = re.findall(r'^"\[.*"$', done.stdout, re.MULTILINE)
    name, project, place = json.loads(json.loads(line))
    assert (name, project) == expected[:2]
    assert re.sub(r"_ray_pkg_\w+", "ray", place) in (expected[2], str(tmp_path / expected[2]))


MINE = {"place": "/a/train.py", "code": "1"}


@pytest.mark.parametrize(
    ("then", "differs"),
    [
        (MINE, False),
        ({"place": "/a/train.py", "code": "2"}, False),
        ({"place": "/b/train.py", "code": "1"}, False),
        ({"place": "/b/train.py", "code": "2"}, True),
        ({"place": "/b/train.py"}, True),
        ({"code": "2"}, False),
        ({}, False),
    ],
    ids=["same", "edited", "moved", "another", "of unknown source", "given a name", "nothing"],
)
def test_a_dump_of_another_place_is_replayed_for_the_same_source(
    then: dict[str, str], differs: bool
) -> None:
    one, other = Identity.of({"n": 1}, MINE), Identity.of({"n": 1}, then)
    for now, dump in ((one, other), (other, one)):
        must, warn = now.differences(dump)
        assert bool(must) is differs
        assert not any("place" in line for line in warn)
        if must:
            assert "skip.experiment_name=" in must[0]
            assert {now.noted["place"], dump.noted["place"]} == {"/a/train.py", "/b/train.py"}


# -- two places ----------------------------------------------------------------------------------
LOOP = """
import logging, sys
from rlskip import SkipManager

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")


@SkipManager.annotate(role="rollout")
def generate(prompts):
    return ["WORD"] * len(prompts)


names = dict(word.split("=") for word in sys.argv[2:])
SkipManager.init({"skip": {"dump_dir": sys.argv[1], "rollout": {"enable": True}, **names}})
SkipManager.set_step(1)
print(*generate([1]))
"""


@pytest.mark.slow
def test_two_projects_with_equal_scripts(tmp_path: Path, python: Any) -> None:
    """One of them is the other's copy, or has the same names by chance."""

    def run(project: str, word: str, *names: str) -> Any:
        folder = tmp_path / project
        (folder / ".git").mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(LOOP.replace("WORD", word))
        return python.run(str(folder / "train.py"), str(tmp_path / "dumps"), *names, cwd=folder)

    assert run("a/proj", "mine").stdout == "mine\n"
    assert (tmp_path / "dumps" / "train_proj").is_dir()
    refused = run("b/proj", "theirs")
    assert refused.returncode != 0
    for said in ("/a/proj/train.py' in the dump", "/b/proj/train.py' now", "skip.experiment_name="):
        assert said in refused.stderr
    moved = run("c/proj", "mine")  # the same source
    assert moved.stdout == "mine\n"
    assert re.search(r"INFO .*/a/proj/train.py", moved.stderr)
    assert run("b/proj", "theirs", "experiment_name=b").stdout == "theirs\n"
    # Who gives the name shares the dumps.
    shared = run("b/proj", "theirs", "experiment_name=train")
    assert shared.stdout == "mine\n", shared.stderr
