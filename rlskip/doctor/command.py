"""A command that starts a Hydra application: its parts, and the config that it composes."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlskip.config.facts import COMPOSES_VARIABLE, is_own
from rlskip.errors import RlskipError

TIMEOUT_S = 300.0
_VALUES = 100  # of a swept key
# Hydra's own -m stands before overrides.
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "fish"})


class CannotComposeError(RlskipError):
    """A command does not print a config."""


@attrs.frozen
class Command:
    """A command taken apart: how the application is started, and its own arguments."""

    start: list[str]
    arguments: list[str]  # of a sweep the first value
    multirun: bool = False
    swept: Mapping[str, list[str]] = {}  # the keys that a multirun sweeps, with each value
    unswept: Sequence[str] = ()  # the arguments from which it builds its callbacks

    @classmethod
    def parse(cls, command: Sequence[str], params: Sequence[str] | None = None) -> Command:
        """`params` are what the config of a multirun sets; searches are left out."""
        if not command:
            raise CannotComposeError("the command is empty", remedy="give it: python train.py ...")
        start, rest = _start_of(list(command))
        given = [word for word in rest if word not in ("-m", "--multirun")]
        if len(given) == len(rest) and "hydra.mode=MULTIRUN" not in given and params is None:
            return cls(start, given)
        sweeps: dict[str, tuple[str, list[str]]] = {}
        for word in params or ():
            with suppress(CannotComposeError):
                sweeps[word] = _sweep_of(word) or (word.partition("=")[0].lstrip("+"), [word])
        sweeps |= {word: sweep for word in given if (sweep := _sweep_of(word))}
        words = [*(word for word in sweeps if word not in given), *given]
        first = [sweeps[word][1][0] if word in sweeps else word for word in words]
        unswept = [word for word in given if word not in sweeps]
        return cls(start, first, True, dict(sweeps.values()), unswept)

    def others(self, groups: Collection[str]) -> Iterator[Command]:
        """The same job with each other value of these keys."""
        for key in self.swept.keys() & {*groups}:
            first, *values = self.swept[key]
            for value in values:
                words = [value if word == first else word for word in self.arguments]
                yield attrs.evolve(self, arguments=words)

    @property
    def module(self) -> str | None:
        """The module that ``python -m`` runs; None for a script."""
        return self.start[-1] if self.start[-2:-1] == ["-m"] else None

    @property
    def script(self) -> Path | None:
        """The file that it runs; None for an installed command or module."""
        files = [self.start[-1]]
        if self.module is not None:
            path = self.module.replace(".", os.sep)
            ends = (f"{path}.py", f"{path}/__main__.py")
            files = [os.path.join(folder, end) for folder in ("", *sys.path) for end in ends]
        return next(filter(is_own, (Path(os.path.abspath(file)) for file in files)), None)


def _sweep_of(argument: str) -> tuple[str, list[str]] | None:
    """The key that an argument of a multirun sweeps, and the argument with each value."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # an option of Hydra's; of what is wrong, the command itself reports
        return None
    if not override.is_sweep_override():
        return None
    try:
        values = [*itertools.islice(override.sweep_string_iterator(), _VALUES)]
    except Exception as error:
        what = f"only the sweeper finds the values of {argument}"
        raise CannotComposeError(what, remedy="give it one value") from error
    return override.key_or_group, [f"{override.get_key_element()}={value}" for value in values]


def _start_of(command: list[str]) -> tuple[list[str], list[str]]:
    """The words that start the application, and the others.

    torchrun, accelerate launch, srun and the like are left out: the application alone composes the
    same config.
    """
    program = os.path.basename(command[0])
    if program in _SHELLS or program.endswith(".sh"):
        what = "a shell script cannot be asked for its config without running it"
        remedy = "give the command that it starts the training with: python ..."
        raise CannotComposeError(what, remedy=remedy)
    for i, word in enumerate(command):
        following = "".join(command[i + 1 : i + 2])
        is_module = word in ("-m", "--module") and _MODULE.fullmatch(following)
        if is_module or (word.endswith(".py") and "=" not in word):
            application = ["-m", following] if is_module else [word]
            start = command[:i] if program.startswith("python") else [sys.executable]
            return [*start, *application], command[i + len(application) :]
    return command[:1], command[1:]


def compose(command: Command) -> DictConfig:
    """The whole config, `hydra` included, as the command composes it.

    Hydra's own ``--cfg all`` prints it and ends before the task starts. CannotComposeError: the
    command fails, takes too long, or is not a Hydra application.
    """
    # A job's own directory is known when it starts.
    place = "hydra.runtime.output_dir="
    place += "${hydra.sweep.dir}/0" if command.multirun else "${hydra.run.dir}"
    asked = [*command.start, *command.arguments, place, "--cfg", "all"]
    run = run_command([*asked, "--resolve"])
    if run.returncode != 0:  # some interpolations resolve in the job only
        run = run_command(asked)
    if run.returncode != 0:
        noise = ("Set the environment", "Config search path", "Traceback")
        said = run.stderr.replace("\n\t", " ")  # the options of a group, one a line
        errors = [line for line in said.splitlines() if line[:1].strip()]  # no traceback's frames
        errors = [line for line in errors if not line.startswith(noise)]
        what = f"it cannot be composed: {' / '.join(errors[-4:]) or 'it printed no error'}"
        raise CannotComposeError(what, remedy="correct the command first")
    lines = run.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("hydra:")), None)
    if first is None:
        what = "it printed no config: this is not a Hydra application"
        raise CannotComposeError(what, remedy="without Hydra, SkipManager.init logs what is on")
    loaded = OmegaConf.create("\n".join(lines[first:]))
    assert isinstance(loaded, DictConfig)
    return loaded


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output."""
    # It may log anything.
    how: Any = {"capture_output": True, "encoding": "utf-8", "errors": "backslashreplace"}
    how["env"] = {**os.environ, COMPOSES_VARIABLE: "1"}
    try:
        return subprocess.run(command, timeout=TIMEOUT_S, check=False, **how)
    except OSError as error:
        raise CannotComposeError(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        what = f"it did not print its config within {TIMEOUT_S:.0f} s"
        raise CannotComposeError(what) from error
