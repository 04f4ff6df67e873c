"""The environment of rlskip: versions, the plug-in, the hosts, the dump_dir."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import omegaconf
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlskip import _version
from rlskip._files import cannot_write, existing
from rlskip._human import size
from rlskip._wrap import version_of
from rlskip.doctor import ERROR, OK, WARNING, Finding
from rlskip.errors import ConfigError
from rlskip.hosts.verl.facts import is_old_release, refuse_old_release
from rlskip.hosts.verl.handshake import attached_by
from rlskip.hosts.verl.seams import TABLE, lacking

_PLUGIN = "RlskipSearchPathPlugin"


def environment() -> list[Finding]:
    """Versions, whether Hydra discovers the plug-in, the hosts."""

    def of(module: Any) -> str:
        return f"{module.__version__} in {Path(module.__file__).parent}"

    return [
        Finding("python", OK, f"{sys.version.split()[0]}, {sys.executable}"),
        Finding("rlskip", OK, of(_version)),
        Finding("hydra", OK, of(hydra)),
        Finding("omegaconf", OK, omegaconf.__version__),
        _plugin(),
        *_hosts(),
        *_seams(),
    ]


def _plugin() -> Finding:
    if any(p.__name__ == _PLUGIN for p in Plugins.instance().discover(SearchPathPlugin)):
        return Finding("plug-in", OK, f"{_PLUGIN} is discovered")
    remedy = "reinstall it from its sources: pip install --force-reinstall --no-deps PATH"
    return Finding("plug-in", ERROR, f"Hydra does not discover {_PLUGIN}", remedy)


def _hosts() -> Iterator[Finding]:
    if trl := version_of("trl"):
        yield Finding("trl", OK, f"{trl}: attached by rlskip.hosts.trl.attach(trainer, config)")
    if skyrl := version_of("skyrl"):
        how = "trainer.override_entrypoint=rlskip.hosts.skyrl"
        yield Finding("skyrl", OK, f"{skyrl}: attached by {how}")
    if verl := version_of("verl"):
        yield _verl(verl)


def _verl(version: str) -> Finding:
    try:
        refuse_old_release()
    except ConfigError as error:
        return Finding("verl", ERROR, error.what, error.remedy)
    if way := attached_by():
        return Finding("verl", OK, f"{version}: attached by {way}")
    what = f"{version} does not load rlskip's entry point verl.plugins"
    remedy = "unset VERL_USE_EXTERNAL_PLUGINS or add rlskip to it; else reinstall rlskip"
    return Finding("verl", ERROR, what, remedy)


def _seams() -> Iterator[Finding]:
    """The table of what rlskip depends on in verl, by what is off without it."""
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
        level, remedy = OK, ""
        if lost:
            then = f"off is {feature}" if feature else "the run ends when verl is imported"
            level, remedy = WARNING if feature else ERROR, "use verl 0.9"
            what += f": {then}; gone: {', '.join(lost)}"
        yield Finding("seams", level, what, remedy)


def dump_dir_finding(dump_dir: Path) -> Finding:
    """Whether dumps can be written there, and how much space is free."""
    there = existing(dump_dir)
    name = str(dump_dir) if there == dump_dir else f"{dump_dir} (to be made in {there})"
    if (problem := cannot_write(dump_dir)) is not None:
        remedy = "name another: skip.dump_dir=DIRECTORY"
        return Finding("dump dir", ERROR, f"{name} is not writable: {problem}", remedy)
    free = shutil.disk_usage(there).free
    level, remedy = (OK, "") if free >= 1 << 30 else (WARNING, "rlskip prune")
    return Finding("dump dir", level, f"{name} is writable; {size(free)} free", remedy)
