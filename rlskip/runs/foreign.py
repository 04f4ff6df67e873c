"""Files of other programs, opened as runs.

Their rows become dumps in a temporary directory, which goes with the process: whatever reads a run
reads these, too.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from rlskip.format.dump_errors import DumpError
from rlskip.runs.json_lines import read_rows
from rlskip.store import StepStore
from rlskip.store.layout import as_step

_ENDS = (".jsonl", ".parquet")


def files_in(path: Path) -> list[Path]:
    """The file of rollouts itself, or those in a directory: those of steps, else all."""
    if path.is_file():
        return [path] if path.suffix in _ENDS else []
    if not path.is_dir():
        return []
    found = sorted(file for file in path.iterdir() if file.suffix in _ENDS and file.is_file())
    steps = [file for file in found if as_step(file.stem) is not None]
    return steps or found


def run_of_files(path: Path) -> Path:
    """The directory of a run with the rows of a file, or of the files in a directory.

    Raises DumpError where one cannot be read, or nothing tells which program wrote it.
    """
    root = Path(tempfile.mkdtemp(prefix="rlskip-foreign-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    run = root / path.stem / "GBSany_Nany_inany_outany"
    store, parts = StepStore(run), dict[int, int]()
    for file in files_in(path):
        for step, columns in read_rows(file):
            if not columns.n:
                continue
            part = parts[step] = parts.get(step, -1) + 1
            call = f"part-{part}" if part else ""
            rows = {name: list(column) for name, column in columns.columns.items()}
            info = {**columns.fields.to_meta(), "job": str(file.name)}
            store.save(step, rows, info=info, call=call)
    if not parts:
        raise DumpError("it has no rows", str(path))
    return run
