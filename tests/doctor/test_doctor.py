"""doctor: what it says of this environment, and of commands that it composes and never runs."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.doctor import command as command_module
from rlskip.doctor import explain as explain_module
from rlskip.doctor.command import CannotComposeError, Command
from rlskip.doctor.environment import dump_dir_finding
from rlskip.store import Identity, StepStore
from tests.conftest import PLACES

# What tells a config of verl's; `trainer` is to follow.
VERL = "actor_rollout_ref: {rollout: {n: 2}}\nray_kwargs: {ray_init: {}}\ntrainer: "
DUMPS = "dumps/e_p/GBS4_N2_in3_out5"
HOST = """
trainer: {experiment_name: e, project_name: p, total_training_steps: 5}
data: {train_batch_size: 4, max_prompt_length: 3, max_response_length: 5}
actor_rollout_ref: {rollout: {n: 2, temperature: 1.0}}
"""


def findings(said: Any, section: int = -1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = said.json[section]["findings"]
    return found


def errors(said: Any) -> list[str]:
    return [f"{f['topic']}: {f['what']}" for f in findings(said) if f["level"] == "error"]


def said_of(said: Any, topic: str) -> str:
    return " / ".join(f["what"] for f in findings(said) if f["topic"] == topic)


def run_here(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As `run_command`, in this process, which takes a quarter of the time."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", command[1:])
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture
def app(make_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an application that must not be run; the test is there."""
    monkeypatch.delenv("RLSKIP_DIRECTORY", raising=False)
    app = make_app(config=HOST, task="raise SystemExit('it was run')")
    monkeypatch.chdir(app.folder)
    return Path(app.folder)


@pytest.fixture
def explain(rlskip: Any, app: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``explain(*overrides, config=...)``: doctor of the application with these overrides."""
    monkeypatch.setattr(command_module, "run_command", run_here)

    def run(*overrides: str, config: str = HOST) -> Any:
        (app / "conf" / "config.yaml").write_text(config + PLACES)
        said = rlskip("doctor", "--json", "--", sys.executable, "app.py", *overrides)
        assert "it was run" not in said.out + said.err
        assert not (app / "out").exists(), "Hydra made no output directory"
        return said

    return run


def save(*steps: int, temperature: float = 1.0, **compared: Any) -> None:
    made = {"prompts": "x", "n": 2, "prompt_len": 3, "response_len": 5}
    identity = Identity.of({**made, "sampling.temperature": temperature, **compared})
    for step in steps:
        StepStore(Path(DUMPS).absolute()).save(step, [step], identity=identity)


def test_a_job_without_names_has_the_directory_that_doctor_names(
    explain: Any, rlskip: Any, app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = ("+skip=rollout_cache", "skip.dump_dir=dumps")
    named = f"/dumps/app_{app.name}/GBSany_Nany_inany_outany"
    assert named in said_of(explain(*on, config="a: 1\n"), "rollout")
    for start in (["python", "app.py"], ["python", "-m", "app"], ["torchrun", "app.py"]):
        assert command_module.Command.parse([*start, *on]).script == app / "app.py"
    assert command_module.Command.parse(["python", "-m", "pytest"]).script is None
    monkeypatch.chdir(app / "conf")
    elsewhere = rlskip("doctor", "--json", "--", sys.executable, str(app / "app.py"), *on)
    assert named in said_of(elsewhere, "rollout")


def test_what_changed_since_the_dumps_were_made_is_listed(explain: Any, app: Path) -> None:
    own = {"temperature": 1.0, "lr": 0.1}
    skip = {"dump_dir": str(app / "dumps"), "experiment_name": "e", "rollout": {"enable": True}}
    SkipManager.init({**own, "skip": {**skip, "project_name": "p"}})
    SkipManager.set_step(1)
    SkipManager.annotate(role="rollout")(lambda prompts: prompts)([1])
    SkipManager.reset()
    on = ("+skip=rollout_cache", "skip.dump_dir=dumps", "skip.experiment_name=e")
    now = ("skip.project_name=p", "temperature=0.5", "lr=0.2")
    said = explain(*on, *now, config="temperature: 1.0\nlr: 0.1\n")
    found = {f["level"]: f["what"] for f in findings(said) if "changed since" in f["what"]}
    assert (
        "temperature (1.0 then, 0.5 now); skip.identity=[temperature] compares it"
        in found["warning"]
    )
    assert "lr (0.1 then, 0.2 now)" in found["note"]
    assert "if prompts and arguments are the same" in said_of(said, "rollout")


# -- this environment --------------------------------------------------------------------------


def test_a_sound_environment(rlskip: Any, tmp_path: Path) -> None:
    said = rlskip("doctor", "-d", tmp_path / "new" / "dumps", "--json")
    assert said.code == 0
    topics = {finding["topic"]: finding for finding in findings(said)}
    assert topics["plug-in"]["level"] == "ok"
    assert topics["hydra"]["what"].startswith("1.")
    assert f"to be made in {tmp_path}" in topics["dump dir"]["what"]
    assert not (tmp_path / "new").exists(), "it only looks"


def test_a_dump_dir_that_cannot_be(
    rlskip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rlskip("doctor", "-d", "/proc/dumps", "--json")
    assert said.code == 1
    assert "not writable" in said_of(said, "dump dir")
    long = rlskip("doctor", "-d", "x" * 256, "--json")
    assert long.code != 0
    assert f"--dir: the name {'x' * 40}... in it is longer than 255 bytes" in long.out + long.err
    (tmp_path / "dangling").symlink_to("nowhere")
    for other in (tmp_path / "dangling", Path("/", *["x" * 200] * 19)):
        assert "not writable" in said_of(rlskip("doctor", "-d", other, "--json"), "dump dir")
    usage = shutil.disk_usage(tmp_path)
    for free, level in ((1 << 30, "ok"), ((1 << 30) - 1, "warning")):
        now = usage._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, now=now: now)
        assert dump_dir_finding(tmp_path).level == level


@pytest.mark.parametrize(
    ("version", "env", "level", "what"),
    [
        ("0.9.1", {}, "ok", "0.9.1: attached by verl.plugins"),
        ("0.9.1", {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "error",
         "0.9.1 does not load rlskip's entry point verl.plugins"),
        ("0.8.0", {}, "error", "verl 0.8.0 loads no plug-ins"),
    ],
)  # fmt: skip
def test_how_verl_is_attached(
    rlskip: Any, make_verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    version: str, env: dict[str, str], level: str, what: str,
) -> None:  # fmt: skip
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(make_verl(version))
    said = rlskip("doctor", "-d", tmp_path / "dumps", "--json")
    (found,) = (finding for finding in findings(said) if finding["topic"] == "verl")
    assert (found["level"], found["what"][: len(what)]) == (level, what)
    assert said.code == (1 if level == "error" else 0)


# -- a command ---------------------------------------------------------------------------------


def test_it_says_which_steps_would_be_replayed(app: Path, explain: Callable[..., Any]) -> None:
    save(1, 2, 4, 9)
    said = explain("+skip=rollout_cache", "skip.dump_dir=dumps", 'skip.steps="1-4"')
    assert said.code == 0
    assert f"{app}/{DUMPS}" in said_of(said, "rollout"), "relative to where it is typed"
    assert "steps 1,2,4 have dumps and would be replayed" in said_of(said, "rollout")
    assert "steps 3 would be generated and dumped" in said_of(said, "rollout")
    assert "is writable" in said_of(said, "dump dir")
    strict = explain("+skip=rollout_cache", "skip.dump_dir=dumps", "skip.on_miss=error")
    (hole,) = errors(strict)
    assert hole.startswith("engine: skip.rollout.on_miss=error: steps 3,5 have no usable dump in")
    replay = ("+skip=rollout_replay", "skip.dump_dir=dumps", "skip.steps=[1,2]")
    (unlisted,) = errors(explain(*replay))
    assert "engine: skip.rollout.steps: steps 3-5 are not listed and would generate" in unlisted
    said = explain(*replay, "trainer.total_training_steps=2")
    assert "no inference engine will be started" in said_of(said, "engine")
    assert errors(said) == []
    assert "are generated" not in explain("+skip=rollout_replay", "skip.dump_dir=empty").out
    again = explain("+skip=rollout_repeat", "skip.dump_dir=dumps")
    assert "steps 1-5 would be replayed from the dumps of 1,2,4" in said_of(again, "rollout")


VALIDATES = """{experiment_name: e, project_name: p, total_training_steps: 2, resume_mode: disable,
  val_before_train: true, test_freq: 2}
data: {train_batch_size: 4, max_prompt_length: 3, max_response_length: 5}
"""


def test_it_says_whether_validation_needs_an_engine(explain: Callable[..., Any]) -> None:
    explain = functools.partial(explain, config=VERL + VALIDATES)
    for step in (0, 1, 2):
        folder = Path(DUMPS, *([] if step else ["rollout_val"])).absolute()
        StepStore(folder).save(step, [step])
    arguments = ("+skip=rollout_replay", "skip.dump_dir=dumps")
    generates = explain(*arguments)
    assert len(errors(generates)) == 2
    assert "trainer.val_before_train: validation generates" in errors(generates)[0]
    assert "the job refuses to start" in said_of(generates, "engine")
    (lost,) = errors(explain(*arguments, "skip.validation=replay"))
    assert lost.startswith("engine: skip.rollout_val.on_miss=error: steps 2 have no usable dump")
    engine = explain("+skip=rollout_cache", "skip.dump_dir=dumps")
    said = "an inference engine will be started: skip.start_engine is true"
    assert said in said_of(engine, "engine")


def test_it_says_how_the_config_differs_from_the_dumps(explain: Callable[..., Any]) -> None:
    save(1, 4)
    save(2, temperature=0.5)
    save(3, temperature=0.7)
    said = explain("+skip=rollout_cache", "skip.dump_dir=dumps")
    for step, error in zip((2, 3), errors(said), strict=True):
        assert f"the dumps of steps {step} were made for other rollouts: sampling.tem" in error
        assert "the job would end there" in error
    assert "steps 1 have dumps and would be replayed" in said_of(said, "rollout"), "it ends at 2"
    repeated = explain("+skip=rollout_repeat", "skip.dump_dir=dumps")
    assert errors(repeated) == [], "repeat compares nothing"


@pytest.mark.parametrize("on_miss", ["generate", "error"])
def test_damaged_dumps_are_named_and_left_alone(explain: Callable[..., Any], on_miss: str) -> None:
    save(1, 2)
    Path(DUMPS, "2", "meta.json").write_text("{}")
    said = explain("+skip=rollout_cache", "skip.dump_dir=dumps", f"skip.on_miss={on_miss}")
    assert "unusable: 2" in said_of(said, "rollout")
    assert Path(DUMPS, "2").exists()


@pytest.mark.parametrize(
    ("overrides", "config", "error"),
    [
        ([], "a: 1\n", "skip: the config has no such node"),
        (["+skip=rolout_cache"], "a: 1\n", "rollout_tq_repeat"),
        (["+skip=on"], "a: 1\n", "skip: rlskip has no option 'on'"),
        (["+skip=rollout_cache"], "skip: 5\n", "skip: the application's own key `skip` (5) is in"),
        (["+skip=rollout_cache", "skip.rollout.enable=false"], "a: 1\n",
         "skip.rollout.enable: it is false, although"),
        (["+skip=rollout_cache", "skip.stepz=[1]"], "a: 1\n", "skip.stepz: unknown key"),
        (["+skip=rollout_cache", "+record=stages", "record.n=1"], "a: 1\n", "record.n: unknown"),
        (["+skip=rollout_cache", "skip.identity=[b]"], "a: 1\n",
         "skip: skip.identity: the config has no key b"),
        (["+skip=rollout_cache", "~hydra.callbacks.rlskip"], "a: 1\n",
         "callback: hydra.callbacks has no rlskip"),
        (["++skip.rollout.enable=true"], "a: 1\n", "callback: hydra.callbacks has no rlskip"),
        (["-m", "+skip=rollout_cache,rollout_repeat"], "a: 1\n",
         "sweep: skip is swept: Hydra drops a callback that comes with it, and each job refuses"),
        (["+skip=rollout_cache"], VERL + "{use_v1: true}\n",
         "verl: skip.rollout.enable: verl's V1 trainer never calls a stage 'rollout'"),
        (["skip=rollout_cache"], "skip: null\n", "To append to your default list use +skip"),
        (["+skip@rlskip=rollout_cache"], "a: 1\n", "skip@rlskip: it puts the node below `rlskip`"),
        (["-m", "+skip=rollout_cache"], "actor_rollout_ref: {rollout: {skip: {enable: true}}}\n",
         "actor_rollout_ref.rollout.skip.enable: is true beside skip.rollout.enable"),
        (["+rlskip_schema=skip"], "skip: {steps: 1-3, rollout: {enable: true}}\n",
         "rlskip_schema/skip comes too late in the defaults list"),
    ],
)  # fmt: skip
def test_why_nothing_would_be_skipped(
    explain: Callable[..., Any], overrides: list[str], config: str, error: str
) -> None:
    said = explain(*overrides, config=config)
    assert said.code == 1
    assert any(error in one for one in errors(said)), said.out


def test_a_sweep_over_other_keys_is_fine(explain: Callable[..., Any]) -> None:
    said = explain(
        "-m", "+skip=rollout_cache", "skip.steps=[1,2],[1,2,3]", "data.train_batch_size=4,8"
    )
    assert errors(said) == []
    assert "one job is explained, skip.steps=[1,2], data.train_batch_size=4" in said_of(
        said, "command"
    )
    assert "steps 1,2;" in said_of(said, "rollout"), "the first of the swept values"
    for unlisted in ("skip.steps=glob(*)", "+lr=interval(0,1)"):
        (error,) = errors(explain("-m", "+skip=rollout_cache", unlisted))
        assert error == f"config: only the sweeper finds the values of {unlisted}"
    swept = ("-m", "+skip=rollout_cache,rollout_repeat")
    for more in ((), ("skip.dump_dir=dumps",)):
        assert errors(explain(*swept, *more, "hydra/callbacks=rlskip")) == []
    (lost,) = (f for f in findings(explain(*swept)) if f["topic"] == "sweep")
    assert lost["remedy"] == "add hydra/callbacks=rlskip"


@pytest.mark.parametrize(
    ("option", "config", "level", "told"),
    [
        ("skip: rollout_cache", "a: 1\n", "error", "comes with it, and each job refuses"),
        ("record: stages", "a: 1\n", "error", "and nothing is recorded"),
        ("skip: rollout_cache", "defaults: [experiment: '???']\n", "warning", "comes with it"),
        ("skip: rollout_cache", "defaults: [rlskip_schema/skip, _self_]\n", None, ""),
    ],
)
@pytest.mark.slow
def test_an_experiment_that_chooses_the_option_is_swept(
    explain: Any, app: Path, option: str, config: str, level: str | None, told: str
) -> None:
    (app / "conf" / "experiment").mkdir()
    text = f"# @package _global_\ndefaults: [/{option}]\n"
    for name in "ab":
        (app / "conf" / "experiment" / f"{name}.yaml").write_text(text)
    key = "experiment" if "experiment" in config else "+experiment"
    said = explain("-m", f"{key}=a,b", config=config)
    found = [f for f in findings(said) if f["topic"] == "sweep"]
    assert [f["level"] for f in found] == ([level] if level else [])
    assert told in said_of(said, "sweep")
    for finding in found:
        assert finding["remedy"] == "add hydra/callbacks=rlskip"
        fixed = explain("-m", f"{key}=a,b", "hydra/callbacks=rlskip", config=config)
        assert said_of(fixed, "sweep") == ""


@pytest.mark.parametrize(
    "overrides",
    [
        ["-m", "experiment=plain,skips"],  # the first skips nothing
        *(
            pytest.param(others, marks=pytest.mark.slow)
            for others in (
                ["hydra.mode=MULTIRUN", "experiment=skips,plain"],
                ["-m", "+mode=search"],
                ["+mode=multirun"],
            )
        ),
    ],
)
def test_however_an_experiment_is_swept(explain: Any, app: Path, overrides: list[str]) -> None:
    (app / "conf" / "experiment").mkdir()
    (app / "conf" / "mode").mkdir()
    for name, text in {
        "search": "sweeper: {params: {experiment: 'plain,skips', a: 'interval(0,1)'}}",
        "multirun": "mode: MULTIRUN\nsweeper: {params: {experiment: skips}}",
    }.items():
        (app / "conf" / "mode" / f"{name}.yaml").write_text(f"# @package hydra\n{text}\n")
    for name, text in {"plain": "a: 2", "skips": "defaults: [/skip: rollout_cache]\n"}.items():
        (app / "conf" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    config = "defaults: [_self_, {experiment: plain}]\na: 1\n"
    said = explain(*overrides, config=config)
    assert "one job is explained, experiment=skips" in said_of(said, "command")
    assert "comes with it, and each job refuses" in said_of(said, "sweep")
    assert "on: cache" in said_of(said, "rollout")
    assert errors(explain(*overrides, "hydra/callbacks=rlskip", config=config)) == []


@pytest.mark.parametrize(
    ("overrides", "config", "topic", "said"),
    [
        (["skip.critic.enable=true", "skip.critic.warmup=3"], HOST, "skip",
         "role critic is the application's own"),
        (["+skip.attach.rollout='lib:Trainer.generate'"], HOST + "job: ${oc.env:SET_IN_THE_JOB}\n",
         "rollout", "on: cache at steps all"),
        (["skip.dump_dir=${hydra:runtime.output_dir}/d"], HOST, "dump dir", "/out/d (to be made"),
        (["-m", "skip.n=1,2", "skip.dump_dir=${hydra:runtime.output_dir}/d"], HOST, "dump dir",
         "/sweep/0/d (to be made"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_sound_command(
    explain: Callable[..., Any], overrides: list[str], config: str, topic: str, said: str
) -> None:
    found = explain("+skip=rollout_cache", *overrides, config=config)
    assert errors(found) == []
    assert said in said_of(found, topic)


FOREIGN = """
import hydra
from hydra.core.plugins import Plugins
real = Plugins.discover
Plugins.discover = lambda self, kind=None: [
    p for p in real(self, kind) if p.__name__ != 'RlskipSearchPathPlugin']
@hydra.main(version_base=None, config_path=None)
def main(cfg): raise SystemExit('it was run')
main()
"""


def test_a_command_whose_hydra_does_not_know_rlskip(rlskip: Any, tmp_path: Path) -> None:
    """As in an environment without rlskip: `+skip=...` arrives as text."""
    (tmp_path / "app.py").write_text(FOREIGN)
    command = (sys.executable, tmp_path / "app.py", "+skip=rollout_cache")
    said = rlskip("doctor", "--json", "--", *command)
    assert [one.split(":")[0] for one in errors(said)] == ["plug-in", "skip"]
    assert "'rollout_cache' arrived as a plain string" in said.out


def test_a_script_without_hydra_is_reported(rlskip: Any, tmp_path: Path) -> None:
    # What it prints need not be UTF-8; what it generates is not begun.
    hello = r"import sys, rlskip; sys.stdout.buffer.write(b'hell\xf6'); "
    hello += "rlskip.SkipManager.init({'a': 1}); open('made', 'w'); sys.exit('it was run')"
    (tmp_path / "script.py").write_text(hello)
    command = ("doctor", "--json", "--", sys.executable)
    said = rlskip(*command, tmp_path / "script.py")
    assert "this is not a Hydra application" in errors(said)[0]
    nowhere = rlskip("doctor", "--json", "--", "/no/such/python", "app.py")
    assert "/no/such/python cannot be run: No such file" in errors(nowhere)[0]
    folder = rlskip("doctor", "--json", "--", tmp_path, "app")
    assert f"{tmp_path} cannot be run: Permission denied" in errors(folder)[0]
    (tmp_path / "app.py").write_text(FOREIGN.replace("RlskipSearchPathPlugin", ""))
    misspelt = rlskip(*command, tmp_path / "app.py", "+skip=rolout_cache")
    assert "Could not find 'skip/rolout_cache'" in errors(misspelt)[0]


@pytest.mark.verl
def test_verls_own_application(
    rlskip: Any, python_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of("verl091")
    monkeypatch.chdir(tmp_path)
    command = (python, "-m", "verl.trainer.main_ppo", f"++skip.dump_dir={tmp_path}")
    v1 = rlskip("doctor", "--json", "--", *command, "+skip=rollout_cache")
    assert any("verl's V1 trainer" in one for one in errors(v1))
    tq = rlskip("doctor", "--json", "--", *command, "+skip=rollout_tq_cache", "trainer.use_v1=True")
    assert errors(tq) == []
    assert f"on: cache at steps all; {tmp_path}/" in said_of(tq, "rollout_tq")
    bare = (*command, "++skip.rollout.enable=True", "trainer.use_v1=False")
    said = rlskip("doctor", "--json", "--", *bare)
    assert errors(said) == []
    assert "no summary; verl's processes load rlskip by verl.plugins" in said_of(said, "callback")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert [one.split(":")[0] for one in errors(rlskip("doctor", "--json", "--", *bare))] == [
        "callback"
    ]


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(command_module, "TIMEOUT_S", 0.5)
    findings = explain_module.explain([sys.executable, str(tmp_path / "app.py")])
    assert "did not print its config" in findings[-1].what


# -- how a command is taken apart --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "start", "arguments"),
    [
        ("uv run python -m pkg.main n=1", [sys.executable, "-m", "pkg.main"], ["n=1"]),
        (
            "torchrun --nproc-per-node 2 -m pkg.main f=x.py",
            [sys.executable, "-m", "pkg.main"],
            ["f=x.py"],
        ),
        ("accelerate launch --module pkg.main", [sys.executable, "-m", "pkg.main"], []),
        ("srun train.py f=x.py", [sys.executable, "train.py"], ["f=x.py"]),
        ("train -m f=x.py n=1,2", ["train"], ["f=x.py", "n=1"]),  # a console script
    ],
)
def test_what_a_command_starts(words: str, start: list[str], arguments: list[str]) -> None:
    command = Command.parse(words.split())
    assert (command.start, command.arguments) == (start, arguments)
    assert command.multirun is (start == ["train"])


@pytest.mark.parametrize("command", [["bash", "run.sh"], ["./run.sh", "skip.n=1"]])
def test_a_shell_script_is_refused(command: list[str]) -> None:
    with pytest.raises(CannotComposeError, match="shell script"):
        Command.parse(command)
