"""slime's and miles' train dumps as stages: what ranks computed of each sample, for `compare`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.content import Imported
from rlskip.interop.pickles import named_errors, read_archive
from rlskip.stages.parts import MARK, VERSION, Entry, encode
from rlskip.store import StepStore
from rlskip.store.layout import STAGES, stages_directory

#: Stages that have other names in slime.
_NAMES = {"rollout_log_probs": "engine_log_probs", "log_probs": "old_log_probs",
          "raw_reward": "scores"}  # fmt: skip
_OF_ROWS = ("tokens", "loss_masks", "response_lengths", "total_lengths", "sample_indices")
_OF_SCHEDULE = ("global_batch_sizes", "max_seq_lens", "micro_batch_indices", "num_microbatches",
                "partition")  # fmt: skip


def import_train_dumps(files: Iterable[Path], dump_dir: Path, job: str) -> Iterator[Imported]:
    """Store what ``--save-debug-train-data`` wrote as the stages of a job, a part for each rank.

    Ranks of one data-parallel group hold the same samples: each of their stages is stored once.

    Raises
    ------
    ForeignDumpError
        A file is not such a dump. The parts before it are stored.
    """
    store = StepStore(stages_directory(dump_dir, job))
    stored: dict[tuple[int, bytes], set[str]] = defaultdict(set)
    for file in files:
        with named_errors(file):
            step, rank, data = _read(file)
            rows = _rows(data)
            known = stored[step, rows.keys.tobytes()]
            entries = [one for one in _entries(data, rows, rank) if one.name not in known]
            if entries and not known:
                entries[0].describes = list(range(len(rows)))
            known.update(one.name for one in entries)
            nbytes = None
            if entries and store.read_meta(step, rank) is None:
                part = encode(entries, tokens=True)
                info = {MARK: VERSION, "job": "import", "imported": str(file)}
                nbytes = store.save(step, part, part=rank, info=info).nbytes
            run = f"{STAGES}/{store.directory.name}"
            yield Imported(str(file), "stages", step, rank, run, len(rows), nbytes)


def _read(file: Path) -> tuple[int, int, dict[str, Any]]:
    found = read_archive(file)
    data = found.get("rollout_data") if isinstance(found, dict) else None
    numbers = [found.get(name) for name in ("rollout_id", "rank")] if data else []
    if not isinstance(data, dict) or not all(type(one) is int and one >= 0 for one in numbers):
        raise ForeignDumpError("it is not what --save-debug-train-data writes", str(file))
    return numbers[0], numbers[1], data


def _rows(data: dict[str, Any]) -> Rows:
    tokens, lengths = data["tokens"], data["response_lengths"]
    masks = data.get("loss_masks") or [[1] * length for length in lengths]
    samples = zip(tokens, lengths, strict=True)
    prompts, responses = zip(
        *((row[: len(row) - length], row[len(row) - length :]) for row, length in samples),
        strict=True,
    )
    columns = {
        "prompt_ids": list(prompts),
        "completion_ids": list(responses),
        "completion_mask": list(masks),
    }
    if len(data.get("sample_indices") or ()) == len(tokens):
        columns["session"] = list(data["sample_indices"])
    return Rows.of(RowColumns.of(columns))


def _entries(data: dict[str, Any], rows: Rows, rank: int) -> Iterator[Entry]:
    """The values that have a number, or one number a token, for each sample."""
    others = (name for name in data if name not in (*_OF_ROWS, *_OF_SCHEDULE))
    for order, name in enumerate(others):
        value = data[name]
        if isinstance(value, list | tuple) and len(value) == len(rows):
            try:
                yield Entry.of(_NAMES.get(name, name), list(value), rows, order=order, rank=rank)
            except RecordError:  # texts, mappings, values of several dimensions
                continue
