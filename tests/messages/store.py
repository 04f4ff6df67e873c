"""Of dumps on disk: absent, truncated, newer than this rlskip; what cannot be kept."""

import logging

from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.format.version import check_version
from rlskip.store import (
    AbsentDumpError,
    CorruptDumpError,
    OtherFormatError,
    StepStore,
    UnsupportedTypeError,
    register_codec,
)


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
    (
        "no dump",
        load,
        AbsentDumpError,
        "DIR/run/1",
        "DIR/run/1: there is no dump of this step",
    ),
    (
        "a truncated dump",
        load_truncated,
        CorruptDumpError,
        "DIR/run/1/gen_batch.dp",
        "DIR/run/1/gen_batch.dp: it has 100 bytes of 172",
    ),
    (
        "quarantine",
        list_truncated,
        logging.WARNING,
        "rlskip.store.step_store",
        "DIR/run/1 cannot be used: it has 100 bytes of 172. It is kept as 1.bad-WHEN",
    ),
    (
        "a codec that fails",
        load_with_a_codec_that_fails,
        UnreadableDumpError,
        "DIR/run/1/gen_batch.dp",
        """\
DIR/run/1/gen_batch.dp: this process cannot load it now: ZeroDivisionError: division by zero
  -> the dump stays as it is: run again once the cause is mended""",
    ),
    (
        "a symbolic link",
        load_link,
        CorruptDumpError,
        "DIR/run/1",
        "DIR/run/1: it is a symbolic link, not a directory",
    ),
    (
        "another format",
        lambda _: check_version(1, "meta.json"),
        OtherFormatError,
        "meta.json",
        """\
meta.json: a dump of format 1; this rlskip reads format 4
  -> use the rlskip that wrote it, or generate again into another skip.dump_dir""",
    ),
    (
        "a value that cannot be kept",
        lambda folder: save(folder, {"a": [object]}),
        UnsupportedTypeError,
        "rollouts['a'][0]",
        """\
rollouts['a'][0]: cannot keep a builtins.type
  -> return what it holds as numbers, text, arrays, tensors, or lists, mappings or dataclasses of \
these; or drop it from the result; or register a codec for its type: \
rlskip.store.register_codec(type, name, encode, decode)""",
    ),
]
