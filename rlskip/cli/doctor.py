"""`rlskip doctor`: the first thing to run when nothing is skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import RenderableType
from rich.table import Table

from rlskip.cli.screen import Answer, size, text

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_MARKS = {OK: ("ok", "green"), NOTE: ("--", "dim"), WARNING: ("!", "yellow"), ERROR: ("X", "red")}
_PLUGIN = "RlskipSearchPathPlugin"
_GROUPS = ("skip", "dispatch", "replay", "merge", "hydra/callbacks")
# As /proc/mounts calls them.
_NETWORK = {"nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "9p", "fuse.sshfs"}


@attrs.frozen
class Finding:
    """One thing looked at: its level (ok, note, warning, error) and what to do about it."""

    topic: str
    level: str
    what: str
    remedy: str = ""


def doctor(dump_dir: Path, command: Sequence[str], *, ray: bool) -> Answer:
    """Look at this environment; at what `command` would skip; at Ray's nodes.

    Exit code 1 where a finding is an error.
    """
    sections: list[tuple[str, list[Finding]]] = [("this environment", environment())]
    dump_dirs = [dump_dir]
    if command:
        from rlskip.cli.explain import explain

        findings, roles_dirs = explain(command)
        sections.append((" ".join(command), findings))
        dump_dirs = roles_dirs
    else:
        sections[0][1].extend(dump_dir_findings(dump_dir))
    if ray:
        from rlskip.cli.nodes import ask_nodes

        sections += ask_nodes(dump_dirs)
    view: list[RenderableType] = []
    for i, (title, findings) in enumerate(sections):
        shown = findings
        if command and i == 0:
            # What is well here is no news to who asks about a command.
            shown = [finding for finding in findings if finding.level in (WARNING, ERROR)]
            title = title if shown else f"{title} is well"
        view += [text(""), text(title, "bold"), *([_table(shown)] if shown else [])]
    levels = [finding.level for _, findings in sections for finding in findings]
    data = [
        {"about": title, "findings": [attrs.asdict(finding) for finding in findings]}
        for title, findings in sections
    ]
    view.append(text(""))
    view.append(text(f"errors: {levels.count(ERROR)}, warnings: {levels.count(WARNING)}"))
    return Answer(data, view[1:], exit_code=1 if ERROR in levels else 0)


def _table(findings: Sequence[Finding]) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        shown.add_row(text(mark, style), text(finding.topic), text(finding.what))
        if finding.remedy:
            shown.add_row("", "", text(f"-> {finding.remedy}", style))
    return shown


# -- this environment ------------------------------------------------------------------


def environment() -> list[Finding]:
    """Versions, Hydra's view of the plug-in and its options, the hosts."""
    import hydra
    import omegaconf

    import rlskip

    def said(module: Any) -> str:
        return f"{module.__version__} in {Path(module.__file__).parent}"

    return [
        Finding("python", OK, f"{sys.version.split()[0]}, {sys.executable}"),
        Finding("rlskip", OK, said(rlskip)),
        Finding("hydra", OK, said(hydra)),
        Finding("omegaconf", OK, omegaconf.__version__),
        _plugin(),
        *_options(),
        _callback(),
        *_hosts(),
    ]


def _plugin() -> Finding:
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    found = [p for p in Plugins.instance().discover(SearchPathPlugin) if p.__name__ == _PLUGIN]
    ways = []
    spec = importlib.util.find_spec("hydra_plugins")
    places = spec.submodule_search_locations if spec is not None else None
    if any(module.name == "rlskip_plugin" for module in pkgutil.iter_modules(places or [])):
        ways.append("the namespace package hydra_plugins")
    if any(e.name == "rlskip" for e in importlib.metadata.entry_points(group="hydra.plugins")):
        ways.append("the entry point hydra.plugins (Hydra 1.4)")
    if found:
        return Finding("plug-in", OK, f"{_PLUGIN} is discovered; it is in {' and in '.join(ways)}")
    return Finding(
        "plug-in",
        ERROR,
        f"Hydra does not discover {_PLUGIN} (seen: {' and '.join(ways) or 'nothing of it'})",
        "reinstall rlskip into this environment: pip install --force-reinstall --no-deps rlskip",
    )


def _options() -> list[Finding]:
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    with initialize(version_base=None, config_path=None):
        loader = GlobalHydra.instance().config_loader()
        options = {group: loader.get_group_options(group) for group in _GROUPS}
    findings = []
    for group, names in options.items():
        ours = [name for name in names if group != "hydra/callbacks" or name == "rlskip"]
        level = OK if ours else ERROR
        what = f"{group}: {', '.join(ours)}" if ours else f"{group}: none"
        findings.append(Finding("options", level, what))
    return findings


def _callback() -> Finding:
    try:
        from rlskip.hooks import SkipCallback
    except Exception as error:  # whatever an environment lacks
        return Finding("callback", ERROR, f"rlskip.hooks cannot be imported: {error}")
    name = f"{SkipCallback.__module__}.{SkipCallback.__qualname__}"
    return Finding("callback", OK, f"{name} can be imported; each skip option brings it")


def _hosts() -> list[Finding]:
    installed = {name: _version(name) for name in ("verl", "trl", "skyrl")}
    installed["skyrl"] = installed["skyrl"] or _version("skyrl-train")
    findings = []
    if installed["verl"]:
        findings.append(_verl(installed["verl"]))
    if installed["trl"]:
        what = f"{installed['trl']}: attached by rlskip.hosts.trl.attach(trainer, config)"
        findings.append(Finding("trl", OK, what))
    if installed["skyrl"]:
        what = f"{installed['skyrl']}: attached by trainer.override_entrypoint=rlskip.hosts.skyrl"
        findings.append(Finding("skyrl", OK, what))
    absent = [name for name, version in installed.items() if version is None]
    if absent:
        findings.append(Finding("hosts", NOTE, f"not installed here: {', '.join(absent)}"))
    return findings


def _verl(version: str) -> Finding:
    from rlskip.hosts.verl import MODULES_VARIABLE, PLUGIN, attached_by

    way = attached_by()
    if way is not None:
        return Finding("verl", OK, f"{version}: attached by {way}")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= (0, 9):
        return Finding(
            "verl",
            ERROR,
            f"{version} does not load rlskip's entry point verl.plugins",
            "unset VERL_USE_EXTERNAL_PLUGINS or add rlskip to it; else reinstall rlskip",
        )
    what = f"{version}: attached by {MODULES_VARIABLE}, which the Hydra callback sets"
    remedy = f"without Hydra's callback: export {MODULES_VARIABLE}={PLUGIN}"
    return Finding("verl", NOTE, what, remedy)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- the dump dir ----------------------------------------------------------------------


def dump_dir_findings(dump_dir: Path) -> list[Finding]:
    """Whether dumps can be written there, on which file system, how much room is left."""
    there = dump_dir
    while not there.exists() and there != there.parent:
        there = there.parent
    name = str(dump_dir) if there == dump_dir else f"{dump_dir} (to be made in {there})"
    problem = _cannot_write(there)
    if problem is not None:
        remedy = "name another: skip.dump_dir=DIRECTORY"
        return [Finding("dump dir", ERROR, f"{name} is not writable: {problem}", remedy)]
    kind = _file_system(there)
    free = shutil.disk_usage(there).free
    findings = [Finding("dump dir", OK, f"{name} is writable; {kind}, {size(free)} free")]
    if kind in ("tmpfs", "ramfs"):
        what = f"{kind} is memory: dumps take from it, and are gone after a restart"
        findings.append(Finding("dump dir", WARNING, what))
    if kind in _NETWORK:
        findings.append(Finding("dump dir", NOTE, f"{kind} is a network file system: that is fine"))
    if free < 1 << 30:
        findings.append(Finding("dump dir", WARNING, f"only {size(free)} free", "rlskip prune"))
    return findings


def _cannot_write(directory: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".rlskip-doctor-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`, as the kernel calls it."""
    best, kind = "", "unknown file system"
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, name, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")  # a space is \040
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind
