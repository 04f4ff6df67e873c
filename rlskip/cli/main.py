"""The application: the commands, their options, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlskip.cli.screen import complain, put
from rlskip.errors import RlskipError

if TYPE_CHECKING:
    from rlskip.cli.rows import Decoder
    from rlskip.cli.screen import Answer

BAD_INPUT = 2

app = typer.Typer(
    name="rlskip",
    help="Look after the rollouts that rlskip keeps, and find out why nothing is skipped.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir", "-d", help="A skip.dump_dir or a run in it; default ~/.rlskip/rollout_dump."
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A local tokenizer, to show tokens as text (transformers).")
]
STEP = "A step of the one run in --dir (3, or 3/0 for a mini-batch), or a path."


@app.command()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the command whose config to explain; it is not run."),
    ] = None,
    directory: Dir = None,
    ray: Annotated[bool, typer.Option("--ray", help="Ask every live node of Ray, too.")] = False,
    as_json: Json = False,
) -> int:
    """What is installed and discovered, and what a command would skip. Exit code 1: trouble."""
    from rlskip.cli.doctor import doctor

    return _put(doctor(_where(directory), command or [], ray=ray), as_json)


@app.command()
def ls(
    where: Annotated[Path | None, typer.Argument(help="As --dir.")] = None,
    directory: Dir = None,
    steps: Annotated[bool, typer.Option("--steps", help="The steps of every run, too.")] = False,
    as_json: Json = False,
) -> int:
    """The runs in a dump_dir, or a run's steps: sizes, ages, hits."""
    from rlskip.cli.ls import ls

    return _put(ls(_where(where or directory), steps), as_json)


@app.command()
def show(
    step: Annotated[str, typer.Argument(help=STEP)],
    directory: Dir = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to show.")] = 3,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """What a dump holds: fields, shapes, dtypes, figures, a few rows."""
    from rlskip.cli.dumps import find_target
    from rlskip.cli.show import show

    return _put(show(find_target(step, _where(directory)), rows, _decoder(tokenizer)), as_json)


@app.command()
def verify(
    what: Annotated[
        list[str] | None, typer.Argument(help="Steps or paths; default: all in --dir.")
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> int:
    """Compare every byte with its checksum; changes nothing. Exit code 1: some dump is bad."""
    from rlskip.cli.dumps import find_targets
    from rlskip.cli.verify import verify

    return _put(verify(find_targets(what or [], _where(directory))), as_json)


@app.command()
def prune(
    where: Annotated[Path | None, typer.Argument(help="As --dir.")] = None,
    directory: Dir = None,
    keep_last: Annotated[int | None, typer.Option(min=0, help="Dumps to keep per run.")] = None,
    older_than: Annotated[str | None, typer.Option(help="An age: 7d, 12h, 30min.")] = None,
    max_size: Annotated[str | None, typer.Option(help="For all runs together: 200GB.")] = None,
    set_aside: Annotated[bool, typer.Option(help="Also dumps set aside as bad.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove them.")] = False,
    as_json: Json = False,
) -> int:
    """Remove old dumps, never one being read. Without --yes it only says which."""
    from rlskip.cli.prune import prune

    return _put(
        prune(
            _where(where or directory),
            keep_last=keep_last,
            older_than=older_than,
            max_size=max_size,
            set_aside=set_aside,
            yes=yes,
        ),
        as_json,
    )


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"A run or a step. {STEP}")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    directory: Dir = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="For log-probs and rewards.")] = 0.0,
    limit: Annotated[int, typer.Option(min=0, help="How many rows to show.")] = 20,
    as_json: Json = False,
) -> int:
    """Which prompts, tokens, log-probs and rewards differ. Exit code 1: some do."""
    from rlskip.cli.diff import diff
    from rlskip.cli.dumps import find_target

    where = _where(directory)
    pair = find_target(a, where), find_target(b, where)
    return _put(diff(*pair, tolerance=tolerance, limit=limit), as_json)


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(help="verl's dump_dir, a run in it, or a file.")],
    directory: Dir = None,
    run: Annotated[
        str | None, typer.Option(help="EXPERIMENT_PROJECT/GBS.._N.._in.._out.., if not verl's.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="If its place does not say.")] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read pickles, of the types rollouts need.")
    ] = False,
    as_json: Json = False,
) -> int:
    """verl's dumps (gen_batch.dp, tq_batch.pt) into a dump_dir of rlskip."""
    from rlskip.cli.imports import import_dumps

    answer = import_dumps(source, _where(directory), run=run, step=step, trust_pickle=trust_pickle)
    return _put(answer, as_json)


@app.command()
def export(
    what: Annotated[str, typer.Argument(help=f"A run or a step. {STEP}")],
    to: Annotated[str, typer.Option(help="verl or jsonl.")],
    directory: Dir = None,
    out: Annotated[
        Path | None, typer.Option(help="verl: a dump_dir for it; jsonl: a file, else stdout.")
    ] = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Dumps as verl reads them, or as rows of JSON."""
    from rlskip.cli.dumps import find_target
    from rlskip.cli.export import ExportError, to_jsonl, to_verl

    target = find_target(what, _where(directory))
    if to == "jsonl":
        answer = to_jsonl(target, out, _decoder(tokenizer))
    elif to == "verl" and out is not None:
        answer = to_verl(target, out)
    elif to == "verl":
        raise ExportError("nothing says where to", "--out", "name a directory")
    else:
        raise ExportError(f"{to!r} is none of verl, jsonl", "--to")
    return 0 if answer is None else _put(answer, as_json)


@app.command()
def report(
    where: Annotated[Path | None, typer.Argument(help="A run, or a dump_dir with one.")] = None,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("rlskip.html"),
    directory: Dir = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to show.")] = 50,
    tokenizer: Tokenizer = None,
    timeline: Annotated[
        Path | None, typer.Option(help="The job's dispatch.timeline_dir, if there was one.")
    ] = None,
    as_json: Json = False,
) -> int:
    """One page about a run: hits, time saved, lengths, rewards, a sample of its rollouts."""
    from rlskip.cli.dumps import the_run
    from rlskip.cli.report import report

    answer = report(
        the_run(_where(where or directory).resolve()),
        html,
        rows=rows,
        decoder=_decoder(tokenizer),
        timeline_dir=timeline,
    )
    return _put(answer, as_json)


def _where(directory: Path | None) -> Path:
    from rlskip.cli.dumps import default_dir

    return directory.expanduser() if directory is not None else default_dir()


def _decoder(tokenizer: Path | None) -> Decoder | None:
    if tokenizer is None:
        return None
    from rlskip.cli.rows import Decoder

    return Decoder(tokenizer)


def _put(answer: Answer, as_json: bool) -> int:
    put(answer, as_json)
    return answer.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        code = app(
            args=sys.argv[1:] if arguments is None else list(arguments), standalone_mode=False
        )
        sys.stdout.flush()
    except RlskipError as error:
        complain("; ".join(filter(None, [_head(error), error.remedy])))
        return BAD_INPUT
    except BrokenPipeError:
        # Whoever read it has enough (`| head`); Python must not complain of it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # The command line's own errors, of whichever click typer brings.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        complain(f"{message()} (see `rlskip --help`)")
        return BAD_INPUT
    return code if isinstance(code, int) else 0


def _head(error: RlskipError) -> str:
    return f"{error.where}: {error.what}" if error.where else error.what


if __name__ == "__main__":
    sys.exit(main())
