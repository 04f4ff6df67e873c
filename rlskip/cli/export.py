"""`rlskip export`: rollouts in the formats of other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rlskip.cli.options import Dir, Json, Target, Tokenizer, decoder, dump_dir
from rlskip.cli.screen import Cell, encode_stdout, progress, put, table, text, writing
from rlskip.runs.find import find_target
from rlskip.runs.scope import Scope


class Unit(str, Enum):
    """Of a table."""

    turn = "turn"
    session = "session"


def export(
    what: Target,
    to: Annotated[
        str,
        typer.Option(
            help="jsonl, messages, verifiers (lines), parquet, verl, verl-text, atif (files)."
        ),
    ],
    directory: Dir = None,
    out: Annotated[
        Path | None, typer.Option(help="A file or a directory; of lines the default is stdout.")
    ] = None,
    by: Annotated[Unit, typer.Option(help="What a row of a table is.")] = Unit.turn,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Write rollouts for other programs."""
    from rlskip.interop import exports, to_verl

    def rows(scope: Scope) -> Iterator[str]:
        for dump in progress(scope.dumps(), "exporting"):
            yield from map(exports.line, scope.read(dump))

    of_lines: dict[str, Callable[[Scope], Iterator[str]]] = {
        "jsonl": rows,
        "messages": exports.chats,
        "verifiers": exports.traces,
    }
    of_files = {"atif": exports.write_atif, "verl-text": exports.write_verl_text}
    known = sorted((*of_lines, *of_files, "verl", "parquet"))
    target = find_target(what, dump_dir(directory), decoder(tokenizer))
    if to not in known:
        remedy = f"give one of {', '.join(known)}"
        raise to_verl.ExportError(f"{to!r} is not a format", "--to", remedy)
    if next(target.iter_dumps(), None) is None:
        raise to_verl.ExportError("there are no dumps to export", target.name)
    if out is None and to in of_lines:
        encode_stdout(encoding="utf-8")  # as JSON is, whatever the terminal's is
        for line in of_lines[to](target):
            print(line)
        return 0
    if out is None:
        remedy = "give a file" if to == "parquet" else "give a directory"
        raise to_verl.ExportError("it is missing", "--out", remedy)
    if to in of_files:
        files = [str(path) for path in of_files[to](target, out)]
        return put(as_json, {"files": files}, [f"{len(files)} files in {out}"])
    if to != "verl":
        if out.exists():
            remedy = "choose another, or remove it"
            raise to_verl.ExportError("the file exists already", str(out), remedy)
        with writing(out) as temporary:
            if to == "parquet":
                count = exports.write_parquet(target, temporary, by.value)
            else:
                count = _write_lines(of_lines[to](target), temporary)
        return put(as_json, {"file": str(out), "rows": count}, [f"{count} rows in {out}"])
    done = list(to_verl.write(progress(target.dumps(), "exporting"), target.run, out))
    written = [str(path) for _, path in done if path is not None]
    left_out = [dump.name for dump, path in done if path is None]
    view: list[Cell] = [table(["written for verl"], zip(written))]
    if left_out:
        names = ", ".join(left_out)
        view.append(text(f"left out, because verl has one call of each step: {names}", "red"))
    return put(as_json, {"files": written, "left_out": left_out}, view)


def _write_lines(lines: Iterator[str], out: Path) -> int:
    count = 0
    with open(out, "x", encoding="utf-8") as file:
        for count, line in enumerate(lines, 1):  # noqa: B007
            file.write(line + "\n")
    return count
