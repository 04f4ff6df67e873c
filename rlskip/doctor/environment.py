"""The environment of rlskip: versions, the plug-in, the hosts, the dump_dir."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlskip import _version
from rlskip._files import cannot_write
from rlskip._human import size
from rlskip.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from rlskip.errors import ConfigError
from rlskip.runs.find import find_runs

CALLBACK = "rlskip.hooks.SkipCallback"
_PLUGIN = "RlskipSearchPathPlugin"
_GROUPS = ("skip", "dispatch", "replay", "merge", "hydra/callbacks")


# -- this environment ------------------------------------------------------------------


def environment() -> list[Finding]:
    """Versions, Hydra's view of the plug-in and its options, the hosts."""
    import hydra
    import omegaconf

    def of(module: Any) -> str:
        return f"{module.__version__} in {Path(module.__file__).parent}"

    return [
        Finding("python", OK, f"{sys.version.split()[0]}, {sys.executable}"),
        Finding("rlskip", OK, of(_version)),
        Finding("hydra", OK, of(hydra)),
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
    what = f"Hydra does not discover {_PLUGIN} (seen: {' and '.join(ways) or 'nothing of it'})"
    remedy = "reinstall rlskip into this environment: pip install --force-reinstall --no-deps PATH"
    return Finding("plug-in", ERROR, what, f"{remedy}, the path of its sources")


def _options() -> Iterator[Finding]:
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    with initialize(version_base=None, config_path=None):
        loader = GlobalHydra.instance().config_loader()
        options = {group: loader.get_group_options(group) for group in _GROUPS}
    for group, names in options.items():
        ours = [name for name in names if group != "hydra/callbacks" or name == "rlskip"]
        yield Finding("options", OK if ours else ERROR, f"{group}: {', '.join(ours) or 'none'}")


def _callback() -> Finding:
    from hydra.utils import get_class

    try:
        get_class(CALLBACK)
    except Exception as error:  # whatever an environment lacks
        return Finding("callback", ERROR, f"{CALLBACK} cannot be imported: {error}")
    return Finding("callback", OK, f"{CALLBACK} can be imported; each skip option adds it")


def _hosts() -> Iterator[Finding]:
    verl, trl = _version_of("verl"), _version_of("trl")
    skyrl = _version_of("skyrl") or _version_of("skyrl-train")
    if verl:
        yield _verl(verl)
        yield from _seams()
    if trl:
        what = f"{trl}: attached by rlskip.hosts.trl.attach(trainer, config)"
        yield Finding("trl", OK, what)
    if skyrl:
        what = f"{skyrl}: attached by trainer.override_entrypoint=rlskip.hosts.skyrl"
        yield Finding("skyrl", OK, what)
    hosts = {"verl": verl, "trl": trl, "skyrl": skyrl}
    absent = [name for name, version in hosts.items() if version is None]
    if absent:
        yield Finding("hosts", NOTE, f"not installed here: {', '.join(absent)}")


def _verl(version: str) -> Finding:
    from rlskip.hosts.verl.facts import refuse_old_release
    from rlskip.hosts.verl.handshake import attached_by

    try:
        refuse_old_release()
    except ConfigError as error:
        return Finding("verl", ERROR, error.what, error.remedy)
    way = attached_by()
    if way is not None:
        return Finding("verl", OK, f"{version}: attached by {way}")
    what = f"{version} does not load rlskip's entry point verl.plugins"
    remedy = "unset VERL_USE_EXTERNAL_PLUGINS or add rlskip to it; else reinstall rlskip"
    return Finding("verl", ERROR, what, remedy)


def _seams() -> Iterator[Finding]:
    """The table of what rlskip depends on in verl, by what is off without it."""
    from rlskip.hosts.verl.facts import is_old_release
    from rlskip.hosts.verl.seams import TABLE, lacking

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations or is_old_release():
        return
    gone = lacking(Path(spec.submodule_search_locations[0]))
    if len(gone) == len(TABLE):  # its source is not there
        return
    for feature in dict.fromkeys(seam.feature for seam in TABLE):
        seams = [seam for seam in TABLE if seam.feature == feature]
        lost = [f"{seam.target} (rlskip {seam.purpose})" for seam in seams if seam in gone]
        what = f"{feature or 'required'}: {len(seams) - len(lost)} of {len(seams)} seams are there"
        if not lost:
            yield Finding("seams", OK, what)
        else:
            ends = "the run ends when verl is imported" if not feature else f"off is {feature}"
            level = ERROR if not feature else WARNING
            yield Finding(
                "seams", level, f"{what}: {ends}; gone: {', '.join(lost)}", "use verl 0.9"
            )


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- the dump dir ----------------------------------------------------------------------


def dump_dir_findings(dump_dir: Path) -> Iterator[Finding]:
    """Whether dumps can be written there, on which file system, and how much space is free."""
    there = dump_dir
    while not there.exists() and there != there.parent:
        there = there.parent
    name = str(dump_dir) if there == dump_dir else f"{dump_dir} (to be made in {there})"
    problem = cannot_write(there)
    if problem is not None:
        remedy = "name another: skip.dump_dir=DIRECTORY"
        yield Finding("dump dir", ERROR, f"{name} is not writable: {problem}", remedy)
        return
    kind = _file_system(there)
    free = shutil.disk_usage(there).free
    yield Finding("dump dir", OK, f"{name} is writable; {kind}, {size(free)} free")
    if kind in ("tmpfs", "ramfs"):
        what = f"{kind} is memory: dumps take from it, and are gone after a restart"
        yield Finding("dump dir", WARNING, what)
    for run in find_runs(dump_dir) if dump_dir.is_dir() else ():
        for who, does in run.jobs().items():
            what = f"{run.name}: {who} is at work: {', '.join(sorted(does))}"
            yield Finding("dump dir", NOTE, what)
    if free < 1 << 30:
        yield Finding("dump dir", WARNING, f"only {size(free)} free", "rlskip prune")


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`, under the kernel's name."""
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
