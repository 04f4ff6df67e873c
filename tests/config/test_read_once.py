"""Every reader takes any form of config, and what it returned before."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import (
    DispatchConfig,
    MergeConfig,
    ReplayConfig,
    RolloutSkipConfig,
    SkipManager,
    SkipManagerConfig,
)
from rlskip.config.check import find_node
from rlskip.config.dispatch import read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.replay import read_replay
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts import trl
from rlskip.hosts.standalone_config import is_on
from rlskip.hosts.trl.seams import TRAINERS
from rlskip.hosts.verl import v1
from rlskip.hosts.verl.names import V1
from rlskip.hosts.verl.seams import seams


@dataclass
class Rollout:
    n: int = 7


@dataclass
class Actor:
    rollout: Rollout = field(default_factory=Rollout)


@dataclass
class Host:
    """A trainer that keeps its config in dataclasses."""

    dispatch: DispatchConfig = field(default_factory=lambda: DispatchConfig(workers=3))
    merge: MergeConfig = field(default_factory=lambda: MergeConfig(stepwise_output=True))
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(timeout_s=5.0))
    skip: SkipManagerConfig = field(
        default_factory=lambda: SkipManagerConfig(
            dump_dir="/d", rollout=RolloutSkipConfig(enable=True)
        )
    )
    actor_rollout_ref: Actor = field(default_factory=Actor)


def read_rollout(config: Any) -> Any:
    return read_skip(config).roles["rollout"]


READERS: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "dispatch": (read_dispatch, "workers", 3),
    "merge": (read_merge, "stepwise_output", True),
    "replay": (read_replay, "timeout_s", 5.0),
    "skip": (read_rollout, "dump_dir", "/d"),
}
FORMS: dict[str, Callable[[str], Any]] = {
    "the node's dataclass": lambda name: getattr(Host(), name),
    "a dataclass of the host": lambda name: Host(),
    "a structured DictConfig": lambda name: OmegaConf.structured(Host),
    "a mapping of dataclasses": lambda name: {name: getattr(Host(), name)},
    "a mapping": lambda name: OmegaConf.to_container(OmegaConf.structured(Host)),
    "an untyped DictConfig": lambda name: OmegaConf.create(
        OmegaConf.to_container(OmegaConf.structured(Host))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READERS)
def test_any_form_of_config(name: str, form: str) -> None:
    reader, key, expected = READERS[name]
    config = FORMS[form](name)
    read = reader(config)
    assert getattr(read, key) == expected
    if name != "merge" and form != "the node's dataclass" and name in str(config):
        n_of_host = None if form == "a mapping of dataclasses" else 7
        assert read.n == (n_of_host or (1 if name == "dispatch" else None))


@dataclass
class WithPath:
    out: Path = Path("/d")
    skip: dict[str, Any] = field(
        default_factory=lambda: {"dump_dir": "${out}", "rollout": {"enable": True}}
    )


@pytest.mark.parametrize(
    "config",
    [
        {"skip": {"dump_dir": Path("/d"), "rollout": {"enable": True}}},
        {"skip": {"rollout": {"enable": True, "dump_dir": Path("/d")}}},
        OmegaConf.structured(WithPath),
        SkipManagerConfig(dump_dir=Path("/d"), rollout=RolloutSkipConfig(enable=True)),  # type: ignore[arg-type]
    ],
    ids=["shared", "of a role", "interpolated", "dataclass"],
)
def test_a_path_is_a_directory(config: Any) -> None:
    assert read_rollout(config).dump_dir == "/d"


def test_a_default_that_a_dataclass_lists_leaves_the_choice_to_the_host() -> None:
    host = {
        "algorithm": {"filter_groups": {"enable": True}},
        "trainer": {"v1": {"rollout_level_dispatch": True}},
    }
    settings = read_skip({**host, "skip": Host().skip})
    role = settings.roles["rollout"]
    assert (role.match, role.restore_rng) == ("run", False)
    assert not settings.gives("restore_rng", "rollout")  # under TRL the default is true
    assert read_dispatch({**host, "dispatch": Host().dispatch}).rollout_level
    assert not read_dispatch({"dispatch": Host().dispatch}).rollout_level


@pytest.mark.parametrize("name", ["dispatch", "merge", "replay"])
def test_a_config_that_was_read_reads_as_itself(name: str) -> None:
    reader = READERS[name][0]
    read = reader(Host())
    assert reader(read) == read


def test_skip_settings_are_returned_as_they_are() -> None:
    settings = read_skip(Host())
    assert isinstance(settings, SkipSettings)
    assert read_skip(settings) is settings


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("config", ["rollout_cache", 5, ["a"], Host])
def test_what_is_not_a_config_is_refused(name: str, config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a config with an entry"):
        READERS[name][0](config)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dispatch", DispatchConfig(workers=0)),
        ("merge", MergeConfig(strategy="tree")),
        ("replay", ReplayConfig(max_refills=0)),
        ("skip", SkipManagerConfig(wait_s=-1.0)),
    ],
)
def test_a_dataclass_that_the_caller_built_is_checked(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}\."):
        READERS[name][0](bad)


# -- how often a process reads a config ------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each node was taken out of a config."""
    counts: Counter[str] = Counter()

    def counting(config: Any, name: str, schema: type | None = None) -> Any:
        counts[name] += 1
        return find_node(config, name, schema)

    for module in ("settings", "check"):
        monkeypatch.setattr(f"rlskip.config.{module}.find_node", counting)
    return counts


def test_a_host_without_hydra_reads_skip_once(reads: Counter[str]) -> None:
    config = {"skip": {"rollout": {"enable": False}}}
    SkipManager.init(config)
    assert not is_on(True, "the trainer")
    assert reads == {"skip": 1}


def test_trl_reads_skip_once_for_all_trainers(
    reads: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the trainers are made, when nothing is known of them, and no more after that."""

    class Trainer:
        def __init__(self, output_dir: str) -> None:
            self.args = SimpleNamespace(
                output_dir=output_dir, generation_batch_size=8, num_generations=4,
                max_completion_length=16, steps_per_generation=1,
            )  # fmt: skip
            self.model, self.state, self._metrics = None, None, None

        def _generate(self) -> None: ...

        def log(self) -> None: ...

    for name, trainer in TRAINERS.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, **{trainer: Trainer}))
    config = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}}
    with trl.attached(config):
        for run in ("a", "b"):
            Trainer(run)
            role = SkipManager.skip_instances["rollout"].local_config
            assert (role.experiment_name, role.project_name, role.n) == (run, "trl", 4)
    assert reads["skip"] == 1


def test_verls_v1_trainer_reads_each_node_once(
    reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PPOTrainer:
        def __init__(self, config: Any) -> None: ...

        def _init_dataloader(self) -> None: ...

        def fit(self) -> None: ...
        def _submit_batch_to_rollout(self) -> None: ...

        def _next_train_batch(self) -> None: ...

        def _balance_batch(self) -> None: ...

        def _save_checkpoint(self) -> None: ...

    with pytest.raises(NotInstalledError, match="no V1 trainer"):
        v1.trainer_settings()
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.9.1"))
    monkeypatch.setattr(seams, "missing", {})
    name = f"{V1}.trainer_base"
    stub = SimpleNamespace(PPOTrainer=PPOTrainer, __name__=name)
    monkeypatch.setitem(sys.modules, name, stub)
    seams.attach()
    trainer: dict[str, Any] = {"v1": {"rollout_level_dispatch": True, "sampler": {}}}
    PPOTrainer(OmegaConf.create({"skip": {}, "dispatch": {"workers": 3}, "trainer": trainer}))
    assert v1.trainer_settings().dispatch.workers == 3
    assert reads == {"skip": 1, "dispatch": 1, "replay": 1}
