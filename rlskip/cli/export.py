"""`rlskip export`: rollouts in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlskip._human import counted
from rlskip.cli.options import Dir, Json, Target, Tokenizer, decoder, dump_dir
from rlskip.cli.screen import encode_stdout, put, writing
from rlskip.errors import ConfigError, RlskipError
from rlskip.runs.find import find_target


def export(
    what: Target,
    to: Annotated[str, typer.Option(help="jsonl, messages (lines) or parquet (a table).")],
    directory: Dir = None,
    out: Annotated[Path | None, typer.Option(help="A file; for lines by default stdout.")] = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Write rollouts for other programs."""
    from rlskip.runs import tables

    target = find_target(what, dump_dir(directory), decoder(tokenizer))
    if to not in ("jsonl", "messages", "parquet"):
        remedy = "give jsonl, messages or parquet; docs/recipes.md writes others"
        raise ConfigError(f"{to!r} is not a format", "--to", remedy)
    if next(target.iter_dumps(), None) is None:
        raise RlskipError("there are no dumps to export", target.name)
    if out is None and to == "parquet":
        raise ConfigError("it is missing", "--out", "give a file")
    rows = map(tables.line, target.iter_rows())
    lines = rows if to == "jsonl" else tables.chats(target.sessions())
    if out is None:
        encode_stdout(encoding="utf-8")  # as JSON is, whatever the terminal's is
        for line in lines:
            print(line)
        return 0
    if out.exists():
        raise RlskipError("the file exists already", str(out), "choose another, or remove it")
    with writing(out) as temporary:
        if to == "parquet":
            table = target.to_arrow()
            tables.extra("pyarrow.parquet").write_table(table, temporary)
            count = int(table.num_rows)
        else:
            with temporary.open("x", encoding="utf-8") as file:
                count = sum(bool(file.write(line + "\n")) for line in lines)
    return put(as_json, {"file": str(out), "rows": count}, [f"{counted(count, 'row')} in {out}"])
