"""The application: the commands, and how errors are reported."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rlskip._version import __version__
from rlskip.cli.bundle import bundle
from rlskip.cli.compare import compare
from rlskip.cli.doctor import doctor
from rlskip.cli.export import export
from rlskip.cli.ls import ls
from rlskip.cli.prune import prune
from rlskip.cli.report import report
from rlskip.cli.rescore import rescore
from rlskip.cli.screen import complain, encode_stdout
from rlskip.cli.show import show
from rlskip.cli.verify import verify
from rlskip.errors import RlskipError

BAD_INPUT, BUG = 2, 3

app = typer.Typer(
    name="rlskip",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (doctor, ls, show, verify, prune, compare, export, rescore, report, bundle):
    app.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rlskip {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def rlskip(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look after the rollouts that rlskip keeps, and find out why nothing is skipped."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on stderr, not a traceback.

    0; 1 if the command found what it looks for; 2 for bad input; 3 for a bug.
    """
    encode_stdout(errors="backslashreplace")  # what its encoding lacks
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
        long = f"{error.filename!s:.60}...: {error.strerror}; shorten it"
        complain(long if error.errno == errno.ENAMETOOLONG else str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # The command line's own errors, of the click that typer brings.
        if (message := getattr(error, "format_message", None)) is not None:
            command = getattr(getattr(error, "ctx", None), "command_path", "rlskip")
            complain(f"{message()} (see `{command} --help`)")
            return BAD_INPUT
        if sys.flags.dev_mode:
            raise
        how = "please report it with the traceback that PYTHONDEVMODE=1 shows"
        complain(f"unexpected {type(error).__name__}: {error}; this is a bug: {how}")
        return BUG
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
