"""Modules of third parties, and the genuine trainers of TRL and SkyRL."""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlskip.hosts import skyrl as host


def python_path(folder: object) -> str:
    """The PYTHONPATH of this process with `folder` in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def verl_process(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one of a job of verl 0.9.1, by that name only."""
    monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(__version__="0.9.1"))


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """``third_party(source)``: the name of a fresh module of that source, not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(source: str) -> str:
        name = f"third_party_{tmp_path.name.replace('-', '_')}_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


# -- TRL -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trl_jobs(python_of: Callable[[str], str]) -> Callable[..., list[dict[str, Any]]]:
    """``trl_jobs(app, folder, jobs, *launcher)``: each rank's results of an app of this directory.

    It runs in a process of the python with TRL.
    """

    def run(
        app: str, folder: Path, jobs: Any, *launcher: str, ranks: int = 1, **more: str
    ) -> list[dict[str, Any]]:
        (folder / "jobs.json").write_text(json.dumps(jobs))
        own = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
        done = subprocess.run(
            [python_of("trl"), *launcher, Path(__file__).with_name(app), "jobs.json", "results"],
            cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        names = ["results"] if ranks == 1 else [f"results{rank}" for rank in range(ranks)]
        return [json.loads((folder / name).read_text()) for name in names]

    return run


# -- SkyRL ---------------------------------------------------------------------------------

# SkyRL wants Python 3.12, GPUs and vLLM. Its classes are loaded from the source in its wheel, with
# what is not installed stubbed.
STUBBED = ("ray", "loguru", "datasets", "transformers", "torchdata", "jaxtyping", "skyrl_gym",
           "skyrl.backends", "skyrl.utils")  # fmt: skip


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (Stub,), {})


class Stub(metaclass=_Anything):
    """Stub for any class, function or decorator of a missing module."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __class_getitem__(cls, _: Any) -> type[Stub]:
        return cls

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self


class StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Stub, name)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == stub or name.startswith(f"{stub}.") for stub in STUBBED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


@pytest.fixture(scope="module")
def skyrl(wheel_of: Callable[[str], Path]) -> Iterator[Any]:
    """``skyrl("train.trainer")``: that module of the genuine package."""
    if sys.version_info < (3, 11):
        pytest.skip("SkyRL imports enum.StrEnum, which Python 3.10 lacks")
    wheel = str(wheel_of("skyrl-0.3.0"))
    before, finder, method = dict(sys.modules), StubFinder(), multiprocessing.get_start_method()
    for name in [n for n in sys.modules if n.split(".")[0] in STUBBED]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, wheel)
    try:
        yield lambda name: importlib.import_module(f"skyrl.{name}")
    finally:
        sys.path.remove(wheel)
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] in (*STUBBED, "skyrl")]:
            del sys.modules[name]
        sys.modules.update(before)
        multiprocessing.set_start_method(method, force=True)  # SkyRL forces spawn


@pytest.fixture
def make(skyrl: Any) -> Any:
    """``make(config, **overrides)``: an experiment's genuine trainer with the test's generator."""
    base = skyrl("train.generators.base")
    trainer_class = skyrl("train.trainer").RayPPOTrainer
    config_class = skyrl("train.config").SkyRLTrainConfig

    class Turns(base.GeneratorInterface):  # type: ignore[misc,name-defined]
        """Answers with random tokens: two turns a trajectory where the training is step-wise.

        All answers to a prompt whose uid is in `ties` get the same reward.
        """

        calls: list[tuple[str, int]]

        def __init__(self, turns: int) -> None:
            self.turns, self.calls = turns, []
            self.ties: set[str] = set()

        async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
            meta = input_batch["batch_metadata"]
            self.calls.append((meta.training_phase, meta.global_step))
            await asyncio.sleep(random.random() / 100)
            out: dict[str, Any] = {
                name: []
                for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks",
                             "stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step")
            }  # fmt: skip
            for id_ in input_batch["trajectory_ids"]:
                context = [random.randrange(99) for _ in range(4)]
                for turn in range(self.turns):
                    answer = [random.randrange(99) for _ in range(3)]
                    out["prompt_token_ids"].append(list(context))
                    out["response_ids"].append(answer)
                    tied = id_.instance_id in self.ties
                    out["rewards"].append(0.5 if tied else random.random())
                    out["loss_masks"].append([1, 1, 1])
                    out["stop_reasons"].append("stop")
                    out["rollout_logprobs"].append([random.random() for _ in answer])
                    out["trajectory_ids"].append(copy.copy(id_))
                    out["is_last_step"].append(turn == self.turns - 1)
                    context += [*answer, 7]
            if input_batch["sampling_params"].get("logprobs", 1) is None:
                out["rollout_logprobs"] = None
            metrics = {
                name: random.random()
                for name in ("generate/mean", "generate/trajectory_completion_time_mean")
            }
            times = [random.random() for _ in out["response_ids"]]
            return {**out, "rollout_metrics": metrics, "trajectory_generation_times": times}

    class Experiment(skyrl("train.entrypoints.main_base").BasePPOExp):  # type: ignore[misc]
        """A user's experiment without everything that needs a GPU."""

        def __init__(self, cfg: Any) -> None:
            self.cfg = cfg

        def get_generator(self, cfg: Any, tokenizer: Any, client: Any) -> Any:
            return Turns(turns=2 if cfg.generator.step_wise_trajectories else 1)

        def get_trainer(self, trainer_class: Any = trainer_class, **given: Any) -> Any:
            trainer = object.__new__(trainer_class)
            tracker = types.SimpleNamespace(logged=[])
            tracker.log = lambda data, step: tracker.logged.append(data)
            vars(trainer).update(given, all_metrics={}, tracker=tracker)
            return trainer

    def make(config: Any, trainer_class: Any = trainer_class, **overrides: Any) -> Any:
        overrides = {"generator.n_samples_per_prompt": 2, **overrides}
        cfg = config_class.from_cli_overrides(overrides)
        experiment = host.with_rlskip(Experiment, config)(cfg)
        generator = experiment.get_generator(cfg, None, None)
        assert isinstance(generator, base.GeneratorInterface)
        return experiment.get_trainer(
            trainer_class=trainer_class, cfg=cfg, generator=generator, tokenizer=None
        )

    return make


@pytest.fixture
def batch(skyrl: Any) -> Any:
    """``batch(step, phase)``: a genuine GeneratorInput of two prompts, two samples each."""

    def batch(
        step: int, phase: str = "train", *, first: int = 0, **sampling: Any
    ) -> tuple[Any, list[str]]:
        prompts = [prompt(step, i) for i in range(first, first + 2)]
        return skyrl("train.generators.utils").prepare_generator_input(  # type: ignore[no-any-return]
            prompts, 2, {"temperature": 1.0, **sampling}, "llm_as_a_judge", phase, step
        )

    return batch


def prompt(step: int, i: int) -> dict[str, Any]:
    """A row of SkyRL's loader."""
    content, extras = f"{step} + {i}", {"answer": step + i}
    return {"prompt": [{"role": "user", "content": content}], "env_class": None,
            "env_extras": extras, "uid": str(i)}  # fmt: skip
