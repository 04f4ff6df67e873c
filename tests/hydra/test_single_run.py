"""One job: the callback and its summary, and a job that is refused."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

import rlskip
from rlskip import SkipManager
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import ORIGIN_VARIABLE, HostFacts
from rlskip.config.settings import read_skip
from rlskip.hooks import SkipCallback
from rlskip.jobs.records import JOB_VARIABLE
from rlskip.skip.dumps import Dumps

ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


def test_the_second_run_generates_nothing(app: Any) -> None:
    first = app.run(*ON)
    assert "rlskip: role rollout: 0 hits, 2 misses" in first.out
    assert (app.folder / "dumps" / f"app_{app.folder.name}").exists()
    assert f"run it again to replay: {Path(sys.executable).name} app.py {' '.join(ON)}" in first.out
    assert "numexpr" not in first.said
    assert app.generated == [1, 2]
    counts = app.summary()["rollout"]
    assert (counts["hits"], counts["misses"], counts["bytes_read"]) == (0, 2, 0)
    assert counts["bytes_written"] > 0

    # The working directory changes, the dumps stay where they are.
    second = app.run(*ON, "hydra.job.chdir=true")
    assert "rlskip: role rollout: 2 hits, 0 misses" in second.out
    assert "run it again" not in second.out
    assert app.generated == [1, 2]
    counts = app.summary()["rollout"]
    assert (counts["hits"], counts["misses"], counts["bytes_written"]) == (2, 0, 0)


_FULL_DISK = """
from rlskip.store.dump import NewDump

def full(*_):
    raise OSError(28, "No space left on device")

NewDump._write_files = full
"""


def test_a_job_that_could_dump_nothing_does_not_advise_to_run_it_again(make_app: Any) -> None:
    app = make_app(functions=_FULL_DISK)
    run = app.run(*ON)
    assert "rlskip: role rollout: 0 hits, 2 misses (2 NOT dumped)" in run.out
    assert "run it again" not in run.said
    assert app.summary()["rollout"]["lost"] == 2
    assert run.said.count("No space left on device: '") == 1
    assert "skip.keep_last" in run.said


def test_a_bad_config_ends_the_job_and_names_every_problem(make_app: Callable[..., Any]) -> None:
    app = make_app(task="open(os.environ['GENERATED'], 'w').write('0')")
    typos = ("skip.stepz=[1]", "skip.on_miss=never", "skip.rollout.steps=[[1],2]")
    run = app.run(*ON, *typos, fails=True)
    assert run.code == 1
    log = (app.folder / "out" / "app.log").read_text(encoding="utf-8")
    # Once on the console, on stderr, because an application may turn logging off.
    assert run.said.count("skip.stepz: unknown key") == 1
    for said in (run.err, log):
        assert "3 problems" in said
        assert "skip.stepz: unknown key; did you mean skip.steps?" in said
        assert "skip.on_miss: 'never' is not one of generate, error" in said
        assert "skip.rollout.steps: [1] (list) is not a step" in said
        assert "Traceback" not in said
    assert app.generated == [], "the task was started"


def test_a_job_that_skips_nothing_logs_a_warning(make_app: Callable[..., Any]) -> None:
    wrong_role, off, beyond = make_app(), make_app(), make_app()
    never = wrong_role.run("+skip=async_rollout_cache", "skip.dump_dir=dumps")
    nothing = off.run(*ON, "skip.rollout.enable=false")
    unlisted = beyond.run(*ON, "skip.steps=0")
    assert wrong_role.generated == off.generated == [1, 2]
    assert "[WARNING] - rlskip: role async_rollout is enabled and was NEVER CONSULTED" in never.out
    assert (
        "up to step 1: functions of role rollout were called instead: +skip=rollout_" in never.out
    )
    assert wrong_role.summary()["async_rollout"]["consulted"] is False
    assert "[WARNING] - rlskip: NOTHING is skipped" in nothing.out
    assert "skip.rollout.enable: it is false, although the option rollout_cache" in nothing.out
    said = "its function was called, but at no step that is listed: skip.steps lists 0"
    assert f"[WARNING] - rlskip: role rollout: {said}" in unlisted.out
    assert "0 hits" not in unlisted.out


IN_ANOTHER_PROCESS = """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=work, args=(cfg,))
worker.start()
worker.join()
assert worker.exitcode == 0
"""
WORK = """
def work(cfg):
    SkipManager.init(cfg)
    train(cfg)
"""


def test_counts_come_from_the_process_that_ran_the_stage(make_app: Callable[..., Any]) -> None:
    """As in verl, where the task only starts the process that trains."""
    app = make_app(task=IN_ANOTHER_PROCESS, functions=WORK)
    # A child that starts in the job's directory must find the same dumps.
    run = app.run(*ON, "hydra.job.chdir=true")
    assert app.generated == [1, 2]
    assert "role rollout: 0 hits, 2 misses" in run.out
    assert "NEVER" not in run.out
    assert len(list((app.folder / "dumps").rglob("gen_batch.dp"))) == 2


def test_a_job_without_the_plug_in_refuses(app: Any) -> None:
    """Hydra then treats the unknown group as a value: ``skip`` becomes a plain string."""
    # Where a folder holds the plug-in, its other packages stay importable through links. rlskip may
    # be there twice: as the checkout, and as a wheel beside Hydra.
    package = Path(rlskip.__file__).parent
    path = []
    for i, folder in enumerate(filter(None, sys.path)):
        if Path(folder, "hydra_plugins/rlskip_plugin").exists():
            links = app.folder / f"lib{i}"
            links.mkdir()
            for entry in Path(folder).iterdir():
                if entry.name != "hydra_plugins" and not entry.name.startswith("rlskip"):
                    (links / entry.name).symlink_to(entry)
            for name in ("rlskip", "rlskip_conf"):
                (links / name).symlink_to(package.parent / name)
            folder = str(links)
        path.append(folder)
    # -S: an editable install is a .pth file.
    run = app.run(*ON[:1], flags=["-S"], PYTHONPATH=os.pathsep.join(path), fails=True)
    assert "+skip=rollout_cache was chosen for this job" in run.err
    assert "if Hydra does not list RlskipSearchPathPlugin under `--info plugins`" in run.err
    assert app.generated == []


def test_a_job_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rlskip_summary.json").mkdir()
    variables = (JOB_VARIABLE, DIRECTORY_VARIABLE, ORIGIN_VARIABLE)
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    places = {"cwd": str(tmp_path), "output_dir": str(tmp_path)}
    skip = {"dump_dir": "dumps", "rollout": {"enable": True}}
    hydra = {"runtime": places, "job": {"name": "my_app"}}
    config = OmegaConf.create({"skip": skip, "hydra": hydra})
    callback = SkipCallback()
    callback.on_job_start(config)
    assert "rollout" in SkipManager.skip_instances
    assert os.environ[DIRECTORY_VARIABLE] == str(tmp_path)
    # A process that the job starts finds the same directory, though its config has no `hydra`.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    job = SkipManager.skip_instances["rollout"].dumps.directory
    alone = Dumps("rollout", read_skip({"skip": skip}).roles["rollout"], HostFacts())
    assert alone.directory == job
    assert job.relative_to(tmp_path / "dumps").parts[0].startswith("my_app_")
    callback.on_job_end(config, JobReturn())
    assert "rlskip_summary.json could not be written" in caplog.text
    assert "rollout" not in SkipManager.skip_instances
    assert not {*variables} & os.environ.keys()


@pytest.mark.slow
def test_a_name_with_the_time_in_it_is_a_warning(make_app: Callable[..., Any]) -> None:
    app = make_app(config="stamp: ${now:%Y-%m-%d_%H-%M-%S}\nother: run_${stamp}\n")
    for key, value in (
        ("skip.rollout.experiment_name", "${other}"),
        ("skip.dump_dir", "${hydra:runtime.output_dir}/dumps"),
        ("hydra.job.name", "${other}"),
    ):
        run = app.run(*ON, f"{key}={value}", "hydra.run.dir=out_${stamp}")
        assert re.search(
            rf"{re.escape(key)}, \S+, has the time in it \(\${{now:}}\), so no", run.out
        )
        assert "run it again" not in run.out
    run = app.run(*ON, "skip.experiment_name=mine")
    assert "${now:}" not in run.out
    assert "run it again to replay" in run.out


def test_after_ctrl_c_a_line_says_what_is_kept(make_app: Callable[..., Any]) -> None:
    # A shell starts what it runs in the background with SIGINT ignored.
    task = "train(cfg)\nimport signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    task += "\nsignal.raise_signal(signal.SIGINT)"
    app = make_app(task=task)
    run = app.run(*ON, fails=True)
    kept = f"{app.folder}/dumps/app_{app.folder.name}/GBSany_Nany_inany_outany"
    said = f"rlskip: interrupted; role rollout: the rollouts of 2 steps are kept in {kept}"
    assert run.said.count(said) == 1
    assert "KeyboardInterrupt" in run.err
