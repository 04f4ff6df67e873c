"""The application: the commands, their options, and how errors are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlskip._version import __version__
from rlskip.cli.screen import complain, put
from rlskip.config.dump_dir import DEFAULT_DUMP_DIR
from rlskip.errors import RlskipError

if TYPE_CHECKING:
    from rlskip.batch.decoding import Decoder
    from rlskip.cli.screen import Answer

BAD_INPUT, BUG = 2, 3

app = typer.Typer(
    name="rlskip",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
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
Html = Annotated[Path, typer.Option(help="The page to write.")]
MaxMb = Annotated[float, typer.Option(min=0.1, help="The largest size of the page.")]
Success = Annotated[float, typer.Option(help="The reward from which a session succeeds.")]


class Order(str, Enum):
    """Of what `ls` lists."""

    name = "name"
    size = "size"
    age = "age"
    hits = "hits"


class Unit(str, Enum):
    """Of a table that `export` writes."""

    turn = "turn"
    session = "session"


RUN = "A job, Hydra's output directory, a run, a dump_dir; of dumps also a step as of show."
STEP = "A step of the only run in --dir (3, or 3/0 for its part 0), or a path."


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rlskip {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def rlskip(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Look after the rollouts that rlskip keeps, and find out why nothing is skipped."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the command to explain; it is not run."),
    ] = None,
    directory: Dir = None,
    ray: Annotated[bool, typer.Option("--ray", help="Check every node of Ray, too.")] = False,
    as_json: Json = False,
) -> int:
    """Find out why nothing is skipped.

    Reports what is installed and discovered, and what COMMAND would skip. Exit code 1 if there is
    an error.
    """
    from rlskip.cli.doctor import doctor

    return _put(doctor(_where(directory), command or [], ray=ray), as_json)


@app.command()
def ls(
    where: Annotated[Path | None, typer.Argument(help="As --dir.")] = None,
    directory: Dir = None,
    steps: Annotated[bool, typer.Option("--steps", help="List the steps of every run.")] = False,
    sort: Annotated[
        Order, typer.Option(help="By name, or largest, newest or most hits first.")
    ] = Order.name,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many runs, or dumps of each run, to list.")
    ] = None,
    only: Annotated[
        str, typer.Option("--filter", help="Only runs with this in their names: lr2, lr*seed1.")
    ] = "",
    as_json: Json = False,
) -> int:
    """List the runs, or the steps of a run."""
    from rlskip.cli.ls import ls

    answer = ls(_where(where or directory), steps, sort=sort.value, limit=limit, only=only)
    return _put(answer, as_json)


@app.command()
def show(
    step: Annotated[str, typer.Argument(help=STEP)],
    directory: Dir = None,
    sessions: Annotated[int, typer.Option(min=0, help="How many to show.")] = 3,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Show a dump: fields, figures, some sessions."""
    from rlskip.cli.show import show
    from rlskip.runs.find import find_target

    target = find_target(step, _where(directory), _decoder(tokenizer))
    return _put(show(target, sessions, success), as_json)


@app.command()
def verify(
    what: Annotated[
        list[str] | None, typer.Argument(help="Steps or paths; default: all in --dir.")
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> int:
    """Compare every byte with its checksum.

    Nothing is changed. Exit code 1 if a dump is unusable.
    """
    from rlskip.cli.verify import verify
    from rlskip.runs.find import find_targets

    where = _where(directory)
    return _put(verify(find_targets(what or [], where), where), as_json)


@app.command()
def prune(
    where: Annotated[Path | None, typer.Argument(help="As --dir.")] = None,
    directory: Dir = None,
    keep_last: Annotated[int | None, typer.Option(min=0, help="Dumps to keep per run.")] = None,
    older_than: Annotated[str | None, typer.Option(help="An age: 7d, 12h, 30min.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Of all runs together: 200GB.")] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Also quarantined dumps.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    as_json: Json = False,
) -> int:
    """Remove old dumps; list them without --yes.

    A dump that is being read is kept.
    """
    from rlskip.cli.prune import prune

    answer = prune(
        _where(where or directory),
        keep_last=keep_last,
        older_than=older_than,
        max_size=max_size,
        quarantined=quarantined,
        yes=yes,
    )
    return _put(answer, as_json)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN)],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The other; without it, the engine and the trainer of A."),
    ] = None,
    directory: Dir = None,
    steps: Annotated[str, typer.Option(help="Steps to compare: 3, 1-10, all.")] = "all",
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Relative tolerance; default: by dtype.")
    ] = None,
    atol: Annotated[float | None, typer.Option(min=0.0, help="Absolute tolerance.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many lines to show.")] = 60,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page about both, as report does.")
    ] = None,
    max_mb: MaxMb = 5.0,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Find where two trainings first differ.

    Compares what +record=stages recorded; without that, the rollouts: two runs or two steps. Exit
    code 1 if anything differs. With A alone: the engine's log-probs against the trainer's.
    """
    from rlskip.cli.compare import compare, compare_engine
    from rlskip.cli.report import Output
    from rlskip.compare.rounding import Rounding

    where, decode = _where(directory), _decoder(tokenizer)
    if b is None:
        return _put(compare_engine(a, where, steps=steps, decode=decode), as_json)
    answer = compare(
        a,
        b,
        where,
        steps=steps,
        rounding=Rounding(rtol, atol),
        limit=limit,
        decode=decode,
        out=None if html is None else Output(html, max_mb, success),
    )
    return _put(answer, as_json)


@app.command(name="import")
def import_dumps(
    source: Annotated[Path, typer.Argument(help="A file, or a directory of files.")],
    directory: Dir = None,
    run: Annotated[
        str | None,
        typer.Option(help="The run to import into, e.g. exp_proj/GBS4_N2_in6_out8."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="If the path has none.")] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read pickles, of the types rollouts need.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Import rollouts of other programs."""
    from rlskip.cli.imports import import_

    answer = import_(source, _where(directory), run=run, step=step, trust_pickle=trust_pickle)
    return _put(answer, as_json)


@app.command()
def export(
    what: Annotated[str, typer.Argument(help=f"A run or a step. {STEP}")],
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
    from rlskip.cli.export import export
    from rlskip.runs.find import find_target

    target = find_target(what, _where(directory), _decoder(tokenizer))
    answer = export(target, to, out, by.value)
    return 0 if answer is None else _put(answer, as_json)


@app.command()
def rescore(
    what: Annotated[str, typer.Argument(help=f"A run or a step. {STEP}")],
    reward: Annotated[str, typer.Option(help="The function: package.module:name.")],
    directory: Dir = None,
    steps: Annotated[str, typer.Option(help="Steps to score: 3, 1-10, all.")] = "all",
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Only sessions with 0, or less than the best.")
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="Verdicts for each session; their mean counts.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Calls that are under way at a time.")] = 8,
    tokenizer: Tokenizer = None,
    data: Annotated[
        Path | None, typer.Option(help="The data set, for columns that the run lacks.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where verdicts are kept; default ~/.rlskip/verdicts.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="A dump_dir for a run with the new scores.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Run a reward function over cached rollouts.

    Each verdict is asked for once, by all jobs. Exit code 1 if a session has no new score.
    """
    from rlskip.cli.rescore import rescore
    from rlskip.runs.find import find_target

    decode = _decoder(tokenizer, skip_special=True)
    answer = rescore(
        find_target(what, _where(directory), decode),
        reward,
        steps=steps,
        only_failed=only_failed,
        repeat=repeat,
        workers=workers,
        data=data,
        cache=cache,
        write=write,
    )
    return _put(answer, as_json)


@app.command()
def report(
    where: Annotated[Path | None, typer.Argument(help="A run, or a dump_dir with one.")] = None,
    html: Html = Path("rlskip.html"),
    directory: Dir = None,
    max_mb: MaxMb = 5.0,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write it again while the run goes on, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Write a page about a run."""
    from rlskip.cli.report import Output, follow_run, report
    from rlskip.runs.find import the_run

    run = the_run(_where(where or directory).resolve(), _decoder(tokenizer))
    out = Output(html, max_mb, success)
    if follow:
        follow_run(run, out, as_json=as_json)
    return _put(report(run, out), as_json)


def _where(directory: Path | None) -> Path:
    return (directory or Path(DEFAULT_DUMP_DIR)).expanduser()


def _decoder(tokenizer: Path | None, *, skip_special: bool = False) -> Decoder | None:
    if tokenizer is None:
        return None
    from rlskip.batch.decoding import Decoder

    return Decoder(tokenizer, skip_special=skip_special)


def _put(answer: Answer, as_json: bool) -> int:
    put(answer, as_json)
    return answer.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. An error is one line on stderr, never a traceback.

    Returns
    -------
    int
        The exit code: 0; 1 if the command found what it looks for; 2 for bad input; 3 for a bug.
    """
    try:
        code = app(args=arguments, prog_name="rlskip", standalone_mode=False)
        sys.stdout.flush()
    except RlskipError as error:
        complain(str(error).replace("\n  -> ", "; "))
        return BAD_INPUT
    except (BrokenPipeError, SystemExit):  # typer's answer to a BrokenPipeError is to exit with 1
        # The reader closed the pipe (`| head`); Python must not report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # The command line's own errors, of the click that typer brings.
        message = getattr(error, "format_message", None)
        if message is not None:
            command = getattr(getattr(error, "ctx", None), "command_path", "rlskip")
            complain(f"{message()} (see `{command} --help`)")
            return BAD_INPUT
        if sys.flags.dev_mode:
            raise
        complain(
            f"unexpected {type(error).__name__}: {error}; this is a bug: please report it with the "
            "traceback that PYTHONDEVMODE=1 shows"
        )
        return BUG
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
