"""Shared fixtures: small real Hydra applications, the command `rlskip`, and an example store."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import runpy
import select
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import ORIGIN_VARIABLE
from rlskip.jobs.records import JOB_VARIABLE

with contextlib.suppress(ImportError):  # some environments of hosts have no hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine, any example may take long. What a fixture gives may serve all examples.
    in_ci = os.environ.get("HYPOTHESIS_PROFILE") == "ci"
    settings.register_profile(
        "rlskip",
        max_examples=100 if in_ci else 40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=in_ci,  # the same examples each time
    )
    settings.load_profile("rlskip")

HERE = Path(__file__).parent
RUN = "grpo_tiny/GBS4_N2_in6_out8"

# A killed process loses nothing that it wrote, and no test ends with a power cut.
os.fsync = lambda fd: None

# The workers of pytest share the cores; and torch sums in another order on each thread.
os.environ["OMP_NUM_THREADS"] = "1"

# Container images forbid it: each process would compile rlskip and the tests again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Whatever the launcher, every real generation leaves a line in the file $GENERATED.
APP = """
import os
import time
import hydra
from rlskip import SkipManager

@SkipManager.annotate(role="rollout")
def generate(prompts):
    with open(os.environ["GENERATED"], "a") as file:
        file.write(f"{prompts[0]}\\n")
    time.sleep(float(os.environ.get("SECONDS_A_STEP", 0)))
    return [10 * prompt for prompt in prompts]

def train(cfg):
    for step in (1, 2):
        SkipManager.set_step(step)
        assert generate([step]) == [10 * step], "the trainer got something else"

FUNCTIONS

@hydra.main(version_base=None, config_path="conf", config_name="config"MORE)
def main(cfg):
    TASK

if __name__ == "__main__":
    main()
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with train.py's: they share a run, and at the end one process would do them alone."""
    items.sort(key=lambda item: item.path.name != "test_train.py")
    gc.freeze()  # or each collection of garbage goes through torch, too


@pytest.fixture(autouse=True)
def state_of_the_process() -> Iterator[None]:
    """Forget what a job leaves in its process: a manager, variables, a log level."""
    logger = logging.getLogger("rlskip")
    level = logger.level
    yield
    if (manager := sys.modules.get("rlskip.skip.manager")) is not None:
        manager.SkipManager.reset()
    if (hydra_config := sys.modules.get("hydra.core.hydra_config")) is not None:
        hydra_config.HydraConfig.instance().cfg = None
    for variable in (JOB_VARIABLE, DIRECTORY_VARIABLE, ORIGIN_VARIABLE):
        os.environ.pop(variable, None)
    logger.setLevel(level)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of the job `job`."""
    monkeypatch.setenv("RLSKIP_JOB", "job")


# -- processes -------------------------------------------------------------------------------


class _Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A program that a fork of warm_python.py runs, as `subprocess.Popen` shows a child."""

    def __init__(self, requests: socket.socket, arguments: Sequence[object], **more: Any) -> None:
        self._requests = requests
        super().__init__(list(map(str, arguments)), **more)

    # What Popen does with fork and waitpid, for a process that is the child of another one.

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, env, pipes = more[4], more[5], more[9:15]
        stdin, _, _, stdout, _, stderr = pipes
        streams = [own if s == -1 else s for own, s in enumerate((stdin, stdout, stderr))]
        request = {"arguments": args, "cwd": str(cwd or Path.cwd()), "env": {**(env or os.environ)}}
        self._status, theirs = os.pipe()
        socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, theirs])
        os.close(theirs)
        self._close_pipe_fds(*pipes)
        self._child_created = True
        self.pid = struct.unpack("i", os.read(self._status, 4))[0]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, 4)
        os.close(self._status)
        return self.pid, struct.unpack("i", status)[0]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(timeout=0)
        return self.returncode


@attrs.frozen
class Python:
    """Runs programs in a Python that has imported torch: see warm_python.py."""

    _requests: socket.socket

    def start(self, *arguments: object, **more: Any) -> subprocess.Popen[str]:
        """``start("-c", code, ...)`` or ``start(script, ...)``; `more` is Popen's."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return _Fork(self._requests, arguments, **{**pipes, **more})

    def run(
        self, *arguments: object, timeout: float = 240, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """As :meth:`start`, until it ends; it is killed after `timeout` seconds."""
        with self.start(*arguments, **more) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, code: str, *arguments: object, **more: Any) -> tuple[Any, str]:
        """Run `code`, which must succeed; the last line that it prints, as JSON, and its stderr."""
        done = self.run("-c", textwrap.dedent(code), *arguments, **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="session")
def python() -> Iterator[Python]:
    """For programs that import torch, which takes seconds of a processor's time each time."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Each program brings a PYTHONPATH of its own, or none.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(HERE / "warm_python.py"), str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    with ours:
        yield Python(ours)
    server.wait(60)


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], str]:
    """``python_of("trl")``: the python of that environment (`.ci/env`); without it a skip."""

    def find(environment: str) -> str:
        variable = f"RLSKIP_{environment.replace('-', '_').upper()}"
        python = os.environ.get(variable, "")
        if not Path(python).is_file():
            pytest.skip(f"{variable}={python!r} is no file; `.ci/env {environment}` makes a python")
        return python

    return find


@pytest.fixture(scope="session")
def wheel_of() -> Callable[[str], Path]:
    """``wheel_of("verl-0.9.1")``: a wheel from PyPI; RLSKIP_TEST_WHEELS names where it is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("RLSKIP_TEST_WHEELS") or f"{cache}/rlskip-tests").expanduser()

    def find(name: str) -> Path:
        wheel = folder / f"{name}-py3-none-any.whl"
        if not wheel.exists():
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
            which = ["--only-binary=:all:", "--python-version=3.12", name.replace("-", "==")]
            done = subprocess.run([*pip, *which], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{wheel.name} could not be fetched: {done.stderr.strip()[-200:]}")
        return wheel

    return find


# -- applications ----------------------------------------------------------------------------

# So that no test depends on the second at which it started.
PLACES = """
hydra:
  run: {dir: out}
  sweep: {dir: sweep}
"""


@attrs.frozen
class Answer:
    """What a process or a command said and returned."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class App:
    """A Hydra application in `folder`: its primary config, and what its main(cfg) does.

    `hydra_main` is added to the arguments of `@hydra.main`; `python` runs it, a :class:`Python` or
    the path of one.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "a: 1\n",
        task: str = "train(cfg)",
        functions: str = "",
        hydra_main: str = "",
        *,
        python: Python | str,
    ) -> None:
        self.folder = folder
        self.python = python
        (folder / "conf").mkdir(parents=True)
        source = APP.replace("FUNCTIONS", functions).replace("MORE", hydra_main)
        source = source.replace("TASK", task.strip().replace("\n", "\n    "))
        (folder / "app.py").write_text(source, encoding="utf-8")
        (folder / "conf" / "config.yaml").write_text(config + PLACES, encoding="utf-8")

    def run(
        self, *arguments: str, flags: Sequence[str] = (), fails: bool = False, **env: str
    ) -> Answer:
        """Run `python [flags] app.py [arguments]`, with `env` beside the environment.

        It must succeed, or fail if it `fails`.
        """
        env = {
            **os.environ,
            # A separate home: a test that forgets dump_dir must not touch the user's dumps.
            "HOME": str(self.folder),
            "GENERATED": str(self.folder / "generated"),
            **env,
        }
        if isinstance(self.python, Python) and not flags:
            done = self.python.run("app.py", *arguments, cwd=self.folder, env=env)
        else:
            path = sys.executable if isinstance(self.python, Python) else self.python
            done = subprocess.run(
                [path, *flags, "app.py", *arguments], cwd=self.folder, env=env,
                capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
        run = Answer(done.returncode, done.stdout, done.stderr)
        assert (run.code != 0) is fails, run.said
        return run

    @property
    def generated(self) -> list[int]:
        """The steps that were really generated, over all runs so far, sorted."""
        file = self.folder / "generated"
        return sorted(map(int, file.read_text().split())) if file.exists() else []

    def summary(self, job: str = "out") -> dict[str, Any]:
        """The roles of a job's rlskip_summary.json."""
        file = self.folder / job / "rlskip_summary.json"
        roles: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["roles"]
        return roles


@pytest.fixture
def make_app(tmp_path: Path, python: Python) -> Callable[..., App]:
    """``make_app(config="...", task="...")``, any number of times."""
    numbers = iter(range(100))
    return lambda **given: App(tmp_path / f"app{next(numbers)}", **{"python": python, **given})


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    """An application without a `skip` node."""
    return make_app()


@pytest.fixture
def make_verl(tmp_path: Path) -> Callable[..., str]:
    """``make_verl("0.9.1")``: a folder for PYTHONPATH with an empty verl of that version.

    If it `loads` plug-ins, a module in the place of rlskip's is imported with it.
    """

    def make(version: str, loads: bool = True) -> str:
        (tmp_path / "site" / "verl").mkdir(parents=True)
        plugin = "rlskip.hosts.verl.plugin"
        source = f"import sys\nsys.modules[{plugin!r}] = sys\n" if loads else ""
        (tmp_path / "site" / "verl" / "__init__.py").write_text(source)
        info = tmp_path / "site" / f"verl-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
        return str(tmp_path / "site")

    return make


@pytest.fixture(scope="session")
def scalars() -> Callable[..., dict[str, list[float]]]:
    """``scalars(python, folder)``: what TensorBoard's logs below a folder hold, by their tags."""

    def read(python: object, folder: Path) -> dict[str, list[float]]:
        script = Path(__file__).with_name("scalars.py")
        done = subprocess.run(
            [str(python), script, folder], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
        return found

    return read


# -- the command `rlskip` ----------------------------------------------------------------------


@pytest.fixture
def rlskip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """``rlskip("ls", path)``: the command with these arguments."""
    monkeypatch.setenv("COLUMNS", "100")

    from rlskip.cli.main import main

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """An empty StepStore."""
    from rlskip.store import StepStore

    return StepStore(tmp_path / "run")


@pytest.fixture(scope="session")
def _example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("example") / "dumps"
    runpy.run_path(str(HERE / "cli" / "example_store.py"))["make"](root)
    return root


@pytest.fixture
def dumps(_example: Path, tmp_path: Path) -> Path:
    """A fresh copy of the example store: two runs of three steps, and two jobs' records."""
    return Path(shutil.copytree(_example, tmp_path / "dumps"))


@pytest.fixture
def run_dir(dumps: Path) -> Path:
    return dumps / RUN


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """A real TransferQueue (SimpleStorage) on a local Ray."""
    ray = pytest.importorskip("ray")
    transfer_queue = pytest.importorskip("transfer_queue")

    from rlskip.queue import TransferQueueAdapter

    # One CPU for the controller, one for each of the two storage units, one for a task.
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield TransferQueueAdapter()
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``job_of(name, body)``: the records of a job that does ``body(step)`` at two steps."""
    from rlskip import stages
    from rlskip.compare.sides import Side
    from rlskip.config.nodes import read_record

    def make(
        name: str, body: Callable[[int], object], steps: Any = (1, 2), root: Path = tmp_path,
        **keys: Any,
    ) -> Any:  # fmt: skip
        monkeypatch.setenv(JOB_VARIABLE, name)
        now = [0]
        node = {"enable": True, "dump_dir": str(root), **keys}
        stages.start(read_record({"record": node}), lambda: now[0])
        for now[0] in steps:
            body(now[0])
        stages.stop()
        return Side(name, root / "stages" / name)

    yield make
    stages.stop()
