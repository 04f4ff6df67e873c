"""Of dumps on disk: absent, truncated, newer than this rlskip; what cannot be kept."""

import logging

from rlskip.format.dump_errors import check_version
from rlskip.store import StepStore, register_codec


def load(folder, step=1):
    return StepStore(folder / "run").load(step)


def save(folder, value="x", step=1):
    """Dump a step; its directory."""
    store = StepStore(folder / "run")
    store.save(step, value)
    return store.directory / str(step)


def truncate(folder):
    dump = save(folder) / "gen_batch.dp"
    dump.write_bytes(dump.read_bytes()[:100])


def load_truncated(folder):
    truncate(folder)
    load(folder)


def list_truncated(folder):
    truncate(folder)
    StepStore(folder / "run").read_meta(1)


class Thing:
    pass


def load_with_a_codec_that_fails(folder):
    register_codec(Thing, "mine.Thing", lambda thing: 1, lambda plain: 1 / 0)
    save(folder, Thing())
    load(folder)


def load_link(folder):
    save(folder).rename(folder / "elsewhere")
    (folder / "run" / "1").symlink_to(folder / "elsewhere")
    load(folder)


CASES = [
    ("no dump", load),
    ("a truncated dump", load_truncated),
    ("quarantine", list_truncated, logging.WARNING, "rlskip.store.step_store"),
    ("a codec that fails", load_with_a_codec_that_fails),
    ("a symbolic link", load_link),
    ("another format", lambda _: check_version(1, "meta.json")),
    ("a value that cannot be kept", lambda folder: save(folder, {"a": [object]})),
]
