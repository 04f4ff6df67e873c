"""verl's table of seams: what is said of each one that a release does not have."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlskip_conf
from rlskip import SkipManager
from rlskip._wrap import AttachError, Seam
from rlskip.doctor.environment import environment
from rlskip.errors import ConfigError
from rlskip.hosts.verl import later_stages, no_engine, stages, trainer, v1  # noqa: F401
from rlskip.hosts.verl.seams import (
    LATER_STAGES,
    MANAGER,
    NO_ENGINE,
    RECORD,
    TABLE,
    V0_TRAINER,
    lacking,
    seams,
)
from tests.hosts import verl_stub

BY_TARGET = {seam.target: seam for seam in TABLE}


@pytest.fixture
def site(tmp_path: Path, job: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a verl that has every seam; nothing of it is imported yet."""
    verl_stub.write(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(seams, "missing", {})
    monkeypatch.setattr(seams, "called", set())
    monkeypatch.setattr(trainer, "_installed", None)
    verl_stub.forget()
    seams.attach()
    yield tmp_path / "site"
    verl_stub.forget()


def rename(site: Path, seam: Seam) -> None:
    """As if another release called it something else."""
    file = site.joinpath(*seam.module.split(".")).with_suffix(".py")
    owner, _, name = seam.path.rpartition(".")
    before, mark, after = file.read_text().partition(f"class {owner}:" if owner else "\n")
    kept = re.sub(
        rf"(def |^){name}\b", rf"\1{name}_as_it_is_now", after, count=1, flags=re.MULTILINE
    )
    assert kept != after
    file.write_text(before + mark + kept)
    if name == "annotate":  # what verl's modules call is what it has
        for other in site.rglob("*.py"):
            text = other.read_text().replace("@SkipManager.annotate(", "@SkipManager.other(")
            other.write_text(text)
        with file.open("a") as end:
            end.write("    other = annotate_as_it_is_now\n")


def config(tmp_path: Path, **skip: Any) -> dict[str, Any]:
    return {"skip": {"dump_dir": str(tmp_path / "d"), **skip}}


def test_a_release_with_every_seam_is_attached(site: Path) -> None:
    verl_stub.import_all()
    assert seams.missing == {}
    assert lacking(site / "verl") == []


@pytest.mark.parametrize("target", BY_TARGET)
def test_a_seam_that_is_gone_is_named(
    site: Path, target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A required one ends the import of verl; without an optional one a feature is off."""
    seam = BY_TARGET[target]
    rename(site, seam)
    assert target in {gone.target for gone in lacking(site / "verl")}
    if not seam.feature:
        with pytest.raises(AttachError) as error:
            verl_stub.import_all()
        assert target in str(error.value)
        assert "verl 0.9.1 is another than rlskip knows" in str(error.value)
        assert f"rlskip {seam.purpose} there" in str(error.value)
        return
    verl_stub.import_all()
    assert target in seams.missing
    trainer.begin(config(tmp_path, rollout={"enable": True}))
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert said == f"rlskip: this verl has no {', '.join(seams.missing)}: off is {seam.feature}"


@pytest.mark.parametrize("target", [t for t, seam in BY_TARGET.items() if seam.decorated])
def test_a_stage_that_verl_no_longer_decorates_ends_its_import(site: Path, target: str) -> None:
    seam = BY_TARGET[target]
    file = site.joinpath(*seam.module.split(".")).with_suffix(".py")
    kept = [line for line in file.read_text().splitlines() if "@SkipManager" not in line]
    file.write_text("\n".join(kept))
    assert target in {gone.target for gone in lacking(site / "verl")}
    with pytest.raises(AttachError, match="rlskip's decorator did not reach it"):
        verl_stub.import_all()


def test_a_feature_that_is_asked_for_and_off_ends_the_run(site: Path, tmp_path: Path) -> None:
    for feature in (LATER_STAGES, NO_ENGINE):
        rename(site, next(seam for seam in TABLE if seam.feature == feature))
    verl_stub.import_all()
    on = {"rollout": {"enable": True}, "ref": {"enable": True}}
    with pytest.raises(AttachError, match="rlskip scores validation there"):
        trainer.begin(config(tmp_path, **on))
    with pytest.raises(AttachError, match="rlskip registers a rollout that does nothing there"):
        no_engine.choose(OmegaConf.create())


def test_one_that_is_never_called_is_named_at_the_first_step(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The manager generates, and the trainer makes its workers in a way of its own."""
    found = verl_stub.import_all()
    manager = found[MANAGER.partition(":")[0]].SkipManager
    manager.init(config(tmp_path, rollout={"enable": True}))
    generate = SkipManager.annotate("rollout")(lambda prompts: prompts)
    for step in (1, 2, 3):
        manager.set_step(step)
        generate([step])
    assert caplog.text.count("not called up to step 1") == 1
    assert f"{V0_TRAINER}.init_workers (rlskip refuses steps without a dump" in caplog.text


@pytest.mark.parametrize("node", ["merge.stepwise_output", "dispatch.rollout_level"])
def test_a_node_that_the_fully_async_application_ignores_is_refused(site: Path, node: str) -> None:
    """Without an option of `skip` the launcher process looks at nothing."""
    manager = verl_stub.import_all()[MANAGER.partition(":")[0]].SkipManager
    ignored = OmegaConf.from_dotlist([f"{node}=true", "async_training.staleness_threshold=1"])
    with pytest.raises(ConfigError, match=node.partition(".")[0]):
        manager.init(ignored)


def test_doctor_shows_the_table_by_what_is_off(site: Path) -> None:
    verl = {seam.feature: seam for seam in TABLE}
    info = site / "verl-0.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.1\n")

    def found() -> dict[str, str]:
        return {f.what: f.level for f in environment() if f.topic == "seams"}

    assert set(found().values()) == {"ok"}
    assert len(found()) == len(verl)
    for feature in (RECORD, ""):
        rename(site, verl[feature])
    lost = {what: level for what, level in found().items() if level != "ok"}
    assert sorted(lost.values()) == ["error", "warning"]
    for feature in (RECORD, ""):
        assert any(verl[feature].target in what for what in lost)


def test_every_option_has_the_key_that_verls_own_manager_does_not_know() -> None:
    options = Path(rlskip_conf.__file__).parent / "skip"
    assert all(
        OmegaConf.load(file).skip.provider == "rlskip" for file in options.glob("*_cache.yaml")
    )
    for file in set(options.glob("*.yaml")) - set(options.glob("*_cache.yaml")):
        assert f"{file.stem.rpartition('_')[0]}_cache@_here_" in file.read_text()


@pytest.mark.verl
def test_verls_own_manager_does_not_know_that_key(python_of: Callable[[str], str]) -> None:
    code = """if True:
        from omegaconf import OmegaConf
        from verl.utils.skip import SkipManager
        SkipManager.init(OmegaConf.create({'skip': {'provider': 'rlskip'}}))
    """
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    run = [python_of("verl091"), "-c", code]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert "Key 'provider' not in 'SkipManagerConfig'" in done.stderr


@pytest.mark.verl
def test_releases_of_verl_have_every_seam() -> None:
    """Those in ``RLSKIP_VERL_SOURCES`` (folders of packages, with colons), and 0.9.1."""
    folders = list(filter(None, os.environ.get("RLSKIP_VERL_SOURCES", "").split(":")))
    if python := os.environ.get("RLSKIP_VERL091"):
        code = (
            "import importlib.util as u; print(u.find_spec('verl').submodule_search_locations[0])"
        )
        folders.append(subprocess.check_output([python, "-c", code], text=True).strip())
    if not folders:
        pytest.skip("neither RLSKIP_VERL_SOURCES nor RLSKIP_VERL091 is set")
    assert {folder: lacking(Path(folder)) for folder in folders} == {
        folder: [] for folder in folders
    }
