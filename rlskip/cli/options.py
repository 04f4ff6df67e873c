"""Options that several commands have, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlskip.batch.decoding import Decoder
from rlskip.config.dump_dir import DEFAULT_DUMP_DIR, parse_dump_dir

STEP = "A step of the only run in --dir (3, or 3/0 for its part 0), or a path."

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
# Of an empty text a Path would be the working directory.
_HELP = "A skip.dump_dir or a run in it; default ~/.rlskip/rollout_dump."
Dir = Annotated[str | None, typer.Option("--dir", "-d", metavar="PATH", help=_HELP)]
Where = Annotated[str | None, typer.Argument(help="As --dir.")]
Target = Annotated[str, typer.Argument(help=f"A run or a step. {STEP}")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A local tokenizer, to show tokens as text (transformers).")
]
MaxMb = Annotated[float, typer.Option(min=0.1, max=1e6, help="The largest size of the page.")]
Success = Annotated[float, typer.Option(help="The reward from which a session succeeds.")]


def dump_dir(*given: str | None) -> Path:
    """The directory that the first of an argument and --dir names."""
    return parse_dump_dir(next(g for g in (*given, DEFAULT_DUMP_DIR) if g is not None), "--dir")


def decoder(tokenizer: Path | None, *, skip_special: bool = False) -> Decoder | None:
    """What makes text of tokens by --tokenizer; None without it."""
    return None if tokenizer is None else Decoder(tokenizer, skip_special=skip_special)
