"""`rlskip export`: rollouts in the formats of other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlskip.cli.screen import Answer, Cell, progress, table, text, writing
from rlskip.interop import exports, to_verl
from rlskip.interop.to_verl import ExportError
from rlskip.runs.find import Target
from rlskip.runs.tables import By


def export(target: Target, to: str, out: Path | None, by: By) -> Answer | None:
    """Write `target` in the format `to`: lines to stdout (and no answer) if `out` is None."""
    if to in _LINES:
        return _write_lines(_LINES[to](target), out)
    if to not in (*_FILES, "verl", "parquet"):
        known = ", ".join(sorted((*_LINES, *_FILES, "verl", "parquet")))
        raise ExportError(f"{to!r} is not a format", "--to", f"give one of {known}")
    if out is None:
        a_file = "a file" if to == "parquet" else "a directory"
        raise ExportError("it is missing", "--out", f"give {a_file}")
    if to == "verl":
        return _export_to_verl(target, out)
    if to == "parquet":
        _refuse_existing(out)
        with writing(out) as temporary:
            rows = exports.write_parquet(target, temporary, by)
        return Answer({"file": str(out), "rows": rows}, [f"{rows} rows in {out}"])
    files = [str(path) for path in _FILES[to](target, out)]
    return Answer({"files": files}, [f"{len(files)} files in {out}"])


def _rows(target: Target) -> Iterator[str]:
    for dump in progress(target.dumps(), "exporting"):
        yield from map(exports.line, target.read(dump))


_LINES: dict[str, Callable[[Target], Iterator[str]]] = {
    "jsonl": _rows,
    "messages": exports.chats,
    "verifiers": exports.traces,
}
_FILES = {"atif": exports.write_atif, "verl-text": exports.write_verl_text}


def _write_lines(lines: Iterator[str], out: Path | None) -> Answer | None:
    if out is None:
        for line in lines:
            print(line)
        return None
    _refuse_existing(out)
    count = 0
    with writing(out) as temporary, open(temporary, "x", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
            count += 1
    return Answer({"file": str(out), "rows": count}, [f"{count} rows in {out}"])


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ExportError("the file exists already", str(out), "choose another, or remove it")


def _export_to_verl(target: Target, out: Path) -> Answer:
    dumps = progress(target.dumps(), "exporting")
    done = list(to_verl.write(dumps, target.run, out))
    written = [str(path) for _, path in done if path is not None]
    left_out = [dump.name for dump, path in done if path is None]
    view: list[Cell] = [table(["written for verl"], zip(written))]
    if left_out:
        names = ", ".join(left_out)
        view.append(text(f"left out, because verl has one call of each step: {names}", "red"))
    return Answer({"files": written, "left_out": left_out}, view)
