"""`rlskip export`: dumps as verl reads them, or as lines of JSON."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from rlskip.cli.screen import Answer, progress, table, text, writing
from rlskip.interop import jsonl, to_verl
from rlskip.interop.to_verl import ExportError
from rlskip.runs.decoding import Decoder
from rlskip.runs.on_disk import Selection


def export_to_verl(target: Selection, out: Path) -> Answer:
    """Write `target` below the directory `out`."""
    dumps = progress(target.dumps(), "exporting")
    done = list(to_verl.write(dumps, target.run, out))
    written = [str(path) for _, path in done if path is not None]
    left_out = [dump.name for dump, path in done if path is None]
    shown = table("written for verl")
    for path in written:
        shown.add_row(text(path))
    view: list[RenderableType] = [shown]
    if left_out:
        names = ", ".join(left_out)
        view.append(text(f"left out, because verl has one call of each step: {names}", "red"))
    return Answer({"files": written, "left_out": left_out}, view)


def export_to_jsonl(target: Selection, out: Path | None, decoder: Decoder | None) -> Answer | None:
    """Write the rows of `target` to the file `out`; to stdout (and no answer) if it is None."""
    if out is None:
        for dump in target.dumps():
            for line in jsonl.lines(dump, decoder):
                print(line)
        return None
    if out.exists():
        raise ExportError("the file exists already", str(out), "choose another, or remove it")
    count = 0
    with writing(out) as temporary, open(temporary, "x", encoding="utf-8") as file:
        for dump in progress(target.dumps(), "exporting"):
            for line in jsonl.lines(dump, decoder):
                file.write(line + "\n")
                count += 1
    return Answer({"file": str(out), "rows": count}, [text(f"{count} rows in {out}")])
