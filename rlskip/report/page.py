"""The page as one HTML file: figures, and as many sessions as fit, compressed for its script.

Data is base64: an index, and a chunk for each dump with its sessions, which the script unpacks when
one is opened. The policy lets nothing run but the scripts of this package, and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from rlskip._human import finite, size
from rlskip._version import __version__
from rlskip.compare.sides import Dumps, Side
from rlskip.errors import RlskipError
from rlskip.report.one_run import OneRun, Progress, packed

_SCRIPTS = (
    "uPlot.iife.min.js", "data.js", "tables.js", "charts.js", "views.js", "overview.js", "step.js",
    "sessions.js", "main.js",
)  # fmt: skip
_STYLES = ("uPlot.min.css", "page.css")


def render(
    shown: Sequence[Side | Dumps],
    *,
    success: float,
    max_bytes: int,
    verdict: Mapping[str, Any] | None = None,
    progress: Progress = iter,
) -> tuple[bytes, dict[str, int]]:
    """The page of one or two runs, of at most `max_bytes`: sessions that do not fit are left out.

    A session succeeds from a reward of `success` on. A `verdict` is ``said`` in a sentence,
    ``is_equal`` or not, and has a table of ``columns`` and ``rows``. Returned are the HTML, and how
    many sessions, groups and steps it shows. Raises RlskipError where not even the figures fit.
    """
    sides = [OneRun(one, progress, success, max_bytes // len(shown)) for one in shown]
    head = {"version": __version__, "success": success, "verdict": verdict}
    least = len(_page(head, sides))
    if least > max_bytes:
        what = f"the page has {size(least)} without any session, more than {size(max_bytes)}"
        raise RlskipError(what, "--max-mb", f"--max-mb {least / 1e6 + 1:.0f}")
    for side in sides:
        side.read_sessions((max_bytes - least) // len(sides))
    while len(html := _page(head, sides)) > max_bytes:
        share = (max_bytes - least) / (len(html) - least)
        for side in sides:
            side.shown = side.shown[: int(len(side.shown) * share * 0.97)]
    counts = {n: int(sum(side.total(n) for side in sides)) for n in ("sessions", "groups")}
    for name in ("shown", "steps"):
        counts[name] = sum(len(getattr(side, name)) for side in sides)
    return html, counts


def _page(head: dict[str, Any], sides: Sequence[OneRun]) -> bytes:
    chunks, runs = list[str](), []
    for side in sides:
        runs.append(side.index(len(chunks)))
        chunks += side.chunks()
    data = {"index": packed(finite({**head, "runs": runs}))}
    data |= {f"chunk-{i}": chunk for i, chunk in enumerate(chunks)}
    scripts, styles = ([_asset(name) for name in names] for names in (_SCRIPTS, _STYLES))
    allowed = [_allowed("script-src", scripts), _allowed("style-src", styles)]
    page = Template(_asset("page.html")).substitute(
        policy="; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *allowed]),
        title=escape(" and ".join(dict.fromkeys(side.name for side in sides))),
        styles="\n".join(f"<style>{style}</style>" for style in styles),
        data="\n".join(
            f'<script type="text/plain" id="{n}">{part}</script>' for n, part in data.items()
        ),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )
    return page.encode("utf-8", "replace")


def _asset(name: str) -> str:
    return (files("rlskip.report") / "assets" / name).read_text(encoding="utf-8")


def _allowed(kind: str, texts: Sequence[str]) -> str:
    """The part of the policy that lets these texts act, by their hashes."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join([kind, *(f"'sha256-{found}'" for found in hashes)])
