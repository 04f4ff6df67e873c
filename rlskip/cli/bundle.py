"""`rlskip bundle`: one step in one file, and its stages computed again from that file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from rlskip._human import counted, size
from rlskip.cli.options import Dir, Json, dump_dir
from rlskip.cli.screen import put, table, text, writing
from rlskip.errors import ConfigError
from rlskip.runs.find import find_target


def bundle(
    what: Annotated[str | None, typer.Argument(metavar="RUN", help="A run, as of show.")] = None,
    step: Annotated[int | None, typer.Argument(metavar="STEP", help="The step of RUN.")] = None,
    directory: Dir = None,
    group: Annotated[
        str | None, typer.Option(help="Only the sessions of this group; the records stay whole.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.")] = None,
    records: Annotated[
        str | None, typer.Option(help="Whose records, as of compare; default: the newest job's.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace texts by hashes; token ids remain.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="A bundle: compute its stages again and compare.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="module:function, as of rescore.")] = None,
    advantages: Annotated[
        str | None, typer.Option(help="grpo, rloo or module:function; grpo,eps=1e-4.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="grpo, rloo, ppo or module:function; ppo,clip=0.3.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Put a step into one file; compute it again.

    With --replay each stage that an option names is computed again, on a CPU, without Ray, weights
    or trainer. Exit code 1 if one differs from what was recorded, or was not recorded.
    """
    if replay is not None:
        named = {"reward": reward, "advantages": advantages, "loss": loss}
        return _replay(replay, {k: v for k, v in named.items() if v is not None}, as_json)
    if what is None or step is None or out is None:
        raise ConfigError("it is incomplete", "bundle", "rlskip bundle RUN STEP --out FILE")
    from rlskip.compare.sides import find_side, recorded_of
    from rlskip.exchange.bundle import make_bundle

    one = find_target(what, dump_dir(directory)).run[step]
    side = find_side(records, one.run.dump_dir) if records else recorded_of(one.run)
    side = side if side is not None and step in side.steps() else None
    with writing(out) as temporary:
        made = make_bundle(one, temporary, side, group=group, redact=redact)
    data = {"file": str(out), "bytes": out.stat().st_size, **made}
    stages = f"with the records of job {made['job']}" if side else "without records of stages"
    rows = counted(made["sessions"], "row")
    said = f"{out}: {rows} of step {step}, {stages}, {size(data['bytes'])}"
    return put(as_json, data, [said])


def _replay(file: Path, functions: dict[str, str], as_json: bool) -> int:
    from rlskip.exchange.bundle import open_bundle
    from rlskip.exchange.recompute import recompute

    if not functions:
        what = "no stage is named"
        raise ConfigError(what, "--replay", "add --advantages grpo, --loss ppo, or --reward m:f")
    opened = open_bundle(file)
    found, about = recompute(opened, functions), opened.manifest
    bad = next((one for one in found if not one.state.startswith(("equal", "within"))), None)
    said = f"{bad.stage} {bad.state}" if bad else "what was named is equal"
    if bad and bad.where:
        said += f" first, in {bad.where}: {bad.recorded:.9g} recorded, {bad.computed:.9g} now"
    rows = [
        (one.stage, one.function, text(one.state, "red" if one is bad else "")) for one in found
    ]
    data = {"equal": bad is None, "verdict": said, "stages": [*map(attrs.asdict, found)]}
    data |= {name: about[name] for name in ("step", "run")}
    view = [said[0].upper() + said[1:], "", table(("stage", "function", "result"), rows)]
    return put(as_json, data, view, failed=bad is not None)
