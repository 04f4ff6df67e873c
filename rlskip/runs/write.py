"""``rlskip.write``: rollouts of any origin as the dump of one step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip.batch.columns import UIDS
from rlskip.batch.meta import plain
from rlskip.batch.prompts import named
from rlskip.batch.ragged import numbers
from rlskip.batch.row_fields import CONVENTION, RowFields
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.errors import ConfigError, RlskipError
from rlskip.format.fingerprint import fingerprint
from rlskip.format.prompt_digests import DIGITS, digest_of_batch, digests_of
from rlskip.runs.on_disk import has_dump
from rlskip.runs.opened import Run, Step
from rlskip.skip.arguments import NEUTRAL_META
from rlskip.skip.prompt_rows import PromptRows, prompt_groups
from rlskip.store import DumpMeta, Identity, StepStore
from rlskip.store.index import PROMPTS, ROWS_PER_PROMPT
from rlskip.store.layout import refuse_links, shape_of

Row = dict[str, Any]
Groups = dict[str, list[Row]]

_IDS = ("prompt", "response", "whole")
_OF_TOKENS = ("mask", "log_probs")
_PROMPTS = ("prompt", "raw_prompt", *CONVENTION["prompt"])


class BadRowError(RlskipError, ValueError):
    """A row given to ``rlskip.write`` is no session, or does not fit the others."""


class StepExistsError(RlskipError, FileExistsError):
    """``rlskip.write`` is to write a step that has a dump already."""


def write(
    directory: str | os.PathLike[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    step: int,
    prompts: Any = None,
) -> Step:
    """Write sessions of any origin as the dump of one step, completely or not at all.

    :func:`rlskip.open` reads it as any other, and a run of that directory replays it, by step or
    with ``skip.match=prompt``. The stage then returns a mapping of columns: for each field a list
    with the value of each row, the rows of one prompt after the other.

    Parameters
    ----------
    directory
        That of a run: ``{dump_dir}/{experiment}_{project}/GBS.._N.._in.._out..``, as
        :func:`rlskip.store.run_directory` and ``rlskip doctor`` name it. A number that the run
        does not state is ``any``.
    rows
        One mapping for each session, all with the same fields. Fields have the names that
        :func:`rlskip.open` gives its rows, or those of verl, TRL and SkyRL:

        - ``prompt_ids`` [P] and ``completion_ids`` [R]: lists, arrays or tensors of integers, kept
          as lists;
        - ``completion_mask`` and ``logprobs``: one number for each token of the response, [R], kept
          as lists; None in a row that has none;
        - ``reward``: a number, or [R] numbers, or None;
        - ``prompt`` and ``completions``: text, or chat messages;
        - ``uid``: names the prompt. Without it, rows with equal prompts are one group.

        Other fields may hold anything that a dump can keep.
    step
        A whole number from 1 on.
    prompts
        The prompts as the loop gives them to its stage, one for each group of rows. If they have
        the field ``uid``, it tells which group is whose; else the groups are in their order. By
        default a list of the rows' own prompts: text or messages if the rows have them, else token
        ids.

    Returns
    -------
    Step
        The step, as :func:`rlskip.open` has it.

    Raises
    ------
    BadRowError
        There is no row; a row has other fields than the first one, a mask or log-probs of another
        length than its response, or no prompt; or the groups are not those of the prompts, or not
        of as many sessions as the directory's name says.
    StepExistsError
        The step has a dump, which stays.
    ConfigError
        `step` is no such number, or `directory` is not named as that of a run.
    UnsupportedTypeError
        A value cannot be kept, or the prompts cannot be compared.

    Examples
    --------
    >>> rows = [{"prompt": "1+1=", "completion_ids": [17, 2], "reward": 1.0}]
    >>> rlskip.write("dumps/mine_math/GBSany_Nany_inany_outany", rows, step=1)
    """
    if type(step) is not int or step < 1:
        what = f"{step!r:.80} is not the number of a step"
        raise ConfigError(what, "rlskip.write(step=...)", "give a whole number from 1 on")
    run = Path(os.path.abspath(parse_dump_dir(os.fspath(directory), "rlskip.write")))
    refuse_links(run)
    shape = _shape_of(run)
    exists = StepExistsError(
        "the step has a dump already, which stays",
        str(run / str(step)),
        "write another step, or into another run",
    )
    if has_dump(run, step):
        raise exists

    def refuse(other: DumpMeta) -> None:
        raise exists

    given, fields = _rows_of(rows)
    groups = _groups_of(given, fields, shape["n"])
    if prompts is None:
        prompts = [_known(of_group[0]) for of_group in groups.values()]
    elif (uids := prompt_groups(prompts, fields)) is not None:
        groups = _in_order(groups, named(uids))
    identity, summary = _recorded(prompts, shape)
    if len(summary.digests) != len(groups):
        what = f"the rows are {len(groups)} groups, and there are {len(summary.digests)} prompts"
        raise BadRowError(what, "rlskip.write(prompts=...)", "give one for each group")
    counts = [len(of_group) for of_group in groups.values()]
    ordered = [row for of_group in groups.values() for row in of_group]
    StepStore(run).save(
        step,
        {name: [row[name] for row in ordered] for name in ordered[0]},
        identity=identity,
        info={
            "job": "rlskip.write",
            **fields.to_meta(),
            PROMPTS: attrs.asdict(summary),
            ROWS_PER_PROMPT: counts[0] if len({*counts}) == 1 else counts,
        },
        on_conflict=refuse,  # another process may have written the step meanwhile
    )
    return Step(Run(run), step)


def _shape_of(directory: Path) -> dict[str, int | None]:
    """What the name of a run's directory, or of a role's in it, says of its batches."""
    found = shape_of(directory.name) or shape_of(directory.parent.name)
    if found is None:
        what = "this is not the directory of a run"
        remedy = (
            "give DUMP_DIR/EXPERIMENT_PROJECT/GBSany_Nany_inany_outany, or what "
            "`rlskip doctor -- <your command>` shows"
        )
        raise ConfigError(what, f"rlskip.write({str(directory)!r})", remedy)
    return {name: int(text) if text.isdecimal() else None for name, text in found.items()}


def _recorded(prompts: Any, shape: Mapping[str, int | None]) -> tuple[Identity, PromptRows]:
    """What the dump records of its prompts: as a whole, for a call by step, and one by one."""
    digests = digests_of(prompts, neutral=NEUTRAL_META)  # raises where they cannot be compared
    told = [digest for digest in digests if digest is not None]
    if len(told) < len(digests):
        what = f"prompt {digests.index(None)} has nothing but fields that are never compared"
        raise BadRowError(what, "rlskip.write(prompts=...)", "give each its content, or its text")
    sizes = {name: shape[name] for name in ("n", "prompt_len", "response_len")}
    identity = Identity.of(sizes).for_prompts(digest_of_batch(prompts, told))
    return identity, PromptRows.of(prompts, told)


def _rows_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Row], RowFields]:
    """Copies of the rows, with tokens as lists, and what their fields hold."""
    copies: list[Row] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadRowError(f"it is a {type(row).__name__}, not a mapping", f"row {i}")
        copies.append(dict(row))
    if not copies:
        raise BadRowError("there are no rows", "rlskip.write(rows=...)")
    names = copies[0].keys()
    for i, row in enumerate(copies):
        if odd := sorted(map(str, row.keys() ^ names)):
            what = f"it and row 0 do not both have {', '.join(odd)}"
            raise BadRowError(what, f"row {i}", "give all rows the same fields; None for no value")
    fields = _fields_of(copies)
    for i, row in enumerate(copies):
        _make_plain(row, fields, f"row {i}")
    if fields.group in UIDS:
        return copies, fields
    for row in copies:
        row["uid"] = fingerprint(_known(row))[:DIGITS]
    return copies, attrs.evolve(fields, group="uid")


def _fields_of(rows: Sequence[Row]) -> RowFields:
    """What the fields hold: those with a trainer's names, else those with `rlskip.open`'s."""
    usual = RowFields.of(rows[0])
    own = {
        what: what
        for what in ("prompt", "response", *_OF_TOKENS)
        if getattr(usual, what) is None and any(_one_a_token(r.get(what)) is not None for r in rows)
    }
    return RowFields.of(rows[0], own)


def _make_plain(row: Row, fields: RowFields, where: str) -> None:
    """Make lists of a row's tokens, mask, log-probs and reward, and refuse what does not fit."""
    length = None
    for what in (*_IDS, *_OF_TOKENS, "reward"):
        name = getattr(fields, what)
        if name is None or (row[name] is None and what not in _IDS):  # a row may have none
            continue
        found = _one_a_token(row[name])
        if what in _IDS:
            if found is None or (found.size and found.dtype.kind not in "iu"):
                remedy = "give a sequence of integers; texts are `prompt` and `completions`"
                raise BadRowError(f"{name} is not a sequence of token ids", where, remedy)
            if what == "response" or (what == "whole" and fields.response is None):
                length = len(found)
        elif found is None and what in _OF_TOKENS:
            raise BadRowError(f"{name} is not a sequence of numbers", where)
        elif found is not None and len(found) != length:
            has = "no response" if length is None else f"a response of {length} tokens"
            raise BadRowError(f"{name} has {len(found)} numbers, and the row has {has}", where)
        row[name] = plain(row[name] if found is None else found)


def _one_a_token(value: Any) -> np.ndarray | None:
    """A sequence of numbers as an array; None for anything else."""
    return numbers(value) if getattr(value, "ndim", 1) == 1 else None


def _prompt_of(row: Row) -> Any:
    """The prompt: text or messages, else token ids; None without one."""
    return next((row[name] for name in _PROMPTS if row.get(name) is not None), None)


def _known(row: Row) -> Any:
    """The prompt, which must be there."""
    if (prompt := _prompt_of(row)) is None:
        what = f"a row has no prompt, only {', '.join(row)}"
        remedy = f"give all rows one of {', '.join(_PROMPTS)}; or a uid, and rlskip.write(prompts=)"
        raise BadRowError(what, "rlskip.write(rows=...)", remedy)
    return prompt


def _groups_of(rows: Sequence[Row], fields: RowFields, n: int | None) -> Groups:
    """The rows of each prompt by its uid, in the order of their first ones, `n` of each."""
    groups: Groups = {}
    prompts: dict[str, str] = {}
    uids = named(row[fields.group or ""] for row in rows)
    for i, (uid, row) in enumerate(zip(uids, rows, strict=True)):
        groups.setdefault(uid, []).append(row)
        prompt = fingerprint(_prompt_of(row))
        if prompts.setdefault(uid, prompt) != prompt:
            what = f"its {fields.group}, {uid!r:.80}, is that of rows with another prompt"
            raise BadRowError(what, f"row {i}", "give each prompt a uid of its own")
    for uid, of_group in groups.items():
        if n not in (None, len(of_group)):
            what = f"it has {len(of_group)} sessions, and the directory's name says N{n}"
            raise BadRowError(what, f"group {uid!r:.80}", f"write to N{len(of_group)} or Nany")
    return groups


def _in_order(groups: Groups, uids: Sequence[str]) -> Groups:
    """The groups in the order of these uids, which must be theirs."""
    if odd := sorted(groups.keys() ^ {*uids}):
        what = f"the rows and the prompts do not both have {', '.join(odd)[:80]}"
        remedy = "give each prompt the uid of its rows"
        raise BadRowError(what, "rlskip.write(prompts=...)", remedy)
    return {uid: groups[uid] for uid in uids}
