"""``rlskip.write``: rollouts of any origin as the dump of one step."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip._human import counted
from rlskip.batch.columns import columns_of, named
from rlskip.batch.row_fields import RowFields
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.doctor.explain import directory_of
from rlskip.errors import ConfigError, RlskipError
from rlskip.exchange.rows import BadRowError, groups_of, known_prompt, refuse_other_order, rows_of
from rlskip.format.prompt_digests import digest_of_batch, digests_of
from rlskip.runs.columns import rollout_columns
from rlskip.runs.find import the_run
from rlskip.runs.on_disk import has_dump
from rlskip.runs.opened import Run, Scope, Step
from rlskip.skip.names import NEUTRAL_META
from rlskip.skip.prompt_rows import PromptRows, prompt_groups
from rlskip.store import Identity, StepStore
from rlskip.store.identity import GIVEN
from rlskip.store.index import PROMPTS, ROWS_PER_PROMPT
from rlskip.store.layout import refuse_links, run_directory, run_name, shape_of

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


class StepExistsError(RlskipError, FileExistsError):
    """``rlskip.write`` is to write a step that has a dump already."""

    @classmethod
    def of(cls, run: Path, step: int) -> StepExistsError:
        what = "the step has a dump already, which stays"
        return cls(what, str(run / str(step)), "write another step, or into another run")


def write(
    dump_dir: _Path | None,
    rows: Any,
    *,
    step: int | None = None,
    experiment_name: str | None = None,
    project_name: str | None = None,
    gbs: int | None = None,
    n: int | None = None,
    prompt_len: int | None = None,
    response_len: int | None = None,
    like: Scope | _Path | None = None,
    for_command: str | Sequence[str] | None = None,
    prompts: Any = None,
    returns: Callable[[dict[str, list[Any]]], Any] | None = None,
) -> Step:
    """Write sessions of any origin as the dump of one step, completely or not at all.

    :func:`rlskip.open` reads it as any other, and a run of that directory replays it, by step or
    with ``skip.match=prompt``. The stage then returns a mapping of columns: for each field a list
    with the value of each row, the rows of one prompt after the other.

    Parameters
    ----------
    dump_dir
        A ``skip.dump_dir``, or the directory of a run in it. None: that of `like` or `for_command`.
    rows
        One mapping for each session, all with the same fields; or a DataFrame, a data set, a
        TensorDict, a DataProto or a mapping of columns, whose padding is left out.
        Fields have the names that :func:`rlskip.open` gives its rows, or those of verl, TRL and
        SkyRL:

        - ``prompt_ids`` [P] and ``completion_ids`` [R]: integers, kept as lists;
        - ``completion_mask`` and ``logprobs``: one number for each token of the response, or of
          prompt and response; None in a row that has none;
        - ``reward``: a number, or one for each token, or None;
        - ``prompt`` and ``completions``: text, or chat messages;
        - ``uid``: names the prompt. Without it, rows with equal prompts are one group.

        Other fields may hold anything that a dump can keep.
    step
        A whole number from 1 on. None: the next one after the run's last; a run finds the prompts
        in it with ``skip.match=prompt``.
    experiment_name, project_name, gbs, n, prompt_len, response_len
        Name the run's directory, as the run's config does. A size that the run does not state is
        None.
    like
        A run or a step as :func:`rlskip.open` has it, or a directory: names and sizes are its.
    for_command
        The command that is to replay the step, such as ``"python train.py +skip=rollout_cache"``:
        the directory is the one that ``rlskip doctor -- COMMAND`` shows. It is not run.
    prompts
        The prompts as the loop gives them to its stage, one for each group of rows, or, as for TRL,
        one for each row. If they have the field ``uid``, it tells which group is whose; else they
        are in order. By default a list of the rows' own prompts: text or messages if the rows have
        them, else token ids.
    returns
        Makes of the columns what the stage returns, where that is not a mapping of lists: a
        DataProto, a TensorDict, a mapping with further values. Its rows keep their order.

    Returns
    -------
    Step
        The step, as :func:`rlskip.open` has it. What its rows lack, such as log-probs of the
        engine, is a warning.

    Raises
    ------
    BadRowError
        There is no row; a row has other fields than the first one, or no prompt; or the groups are
        not those of the prompts, or of the size that the directory's name says.
    LengthError
        A mask, log-probs or rewards have another length than their tokens.
    StepExistsError
        The step has a dump, which stays.
    ConfigError
        `step` is not a whole number from 1 on, or the run's directory is not known.
    UnsupportedTypeError
        A value cannot be kept, or the prompts cannot be compared.
    """
    if step is not None and (type(step) is not int or step < 1):
        what = f"{step!r:.80} is not a whole number from 1 on"
        raise ConfigError(what, "rlskip.write(step=...)", "number steps from 1, or give none")
    names = experiment_name, project_name
    run = _directory(dump_dir, names, (gbs, n, prompt_len, response_len), like, for_command)
    refuse_links(run)
    shape = _shape_of(run)
    if step is not None and has_dump(run, step):
        raise StepExistsError.of(run, step)
    given, fields = rows_of(rows)
    groups, firsts = groups_of(given, fields, shape["n"])
    if prompts is None:
        prompts = [known_prompt(row) for row in firsts]
    elif (uids := prompt_groups(prompts, fields)) is not None:
        of_prompts = named(uids)
        if odd := sorted(groups.keys() ^ {*of_prompts}):
            what = f"the rows and the prompts do not both have {', '.join(odd)[:80]}"
            remedy = "give each prompt the uid of its rows"
            raise BadRowError(what, "rlskip.write(prompts=...)", remedy)
        groups = {uid: groups[uid] for uid in of_prompts}
    identity, summary = _recorded(prompts, shape)
    if (uids := prompt_groups(prompts, fields)) is None:
        if len(summary.digests) == len(given):  # as TRL gives its stage prompts
            groups, firsts = {str(i): [row] for i, row in enumerate(given)}, given
        refuse_other_order(firsts, summary.digests, fields.group or "uid")
    if len(summary.digests) != len(groups):
        prompts_given = counted(len(summary.digests), "prompt")
        what = f"the rows are {counted(len(groups), 'group')}, for {prompts_given}"
        raise BadRowError(what, "rlskip.write(prompts=...)", "give one for each group")
    counts = [len(of_group) for of_group in groups.values()]
    ordered = [row for of_group in groups.values() for row in of_group]
    made: Any = columns_of(ordered)
    if returns is not None:
        made = returns(made)
        columns = rollout_columns(made)
        if columns.n != len(ordered):
            what = f"it made {counted(columns.n, 'row')} of {len(ordered)}"
            raise BadRowError(what, "rlskip.write(returns=...)", "keep the rows and their order")
        fields = RowFields.of(columns.columns.keys())
    info = {
        "job": "rlskip.write",
        **fields.to_meta(),
        PROMPTS: attrs.asdict(summary),
        ROWS_PER_PROMPT: counts[0] if len({*counts}) == 1 else counts,
    }
    store, number = StepStore(run), step or max(Run(run).steps(), default=0) + 1
    # Another process may have written the step meanwhile.
    while not store.write(store.prepare(number, made, identity=identity, info=info))[1]:
        if step is not None:
            raise StepExistsError.of(run, step)
        number += 1
    written = Step(Run(run), number)
    has_tokens = fields.response is not None or fields.whole is not None
    lacking = [] if has_tokens else ["tokens"]
    lacking += ["log-probs of the engine"] if has_tokens and fields.log_probs is None else []
    lacking += ["rewards"] if fields.reward is None else []
    if lacking:
        text = "rlskip.write: %s has no %s; a trainer that needs them refuses the dump"
        log.warning(text, written.name, ", ".join(lacking))
    return written


def _directory(
    dump_dir: _Path | None,
    names: tuple[str | None, str | None],
    sizes: tuple[int | None, ...],
    like: Scope | _Path | None,
    for_command: str | Sequence[str] | None,
) -> Path:
    for size in sizes:
        if size is not None and (type(size) is not int or size < 1):
            what = f"a size is {size!r:.80}, not a whole number from 1 on"
            raise ConfigError(what, "rlskip.write", "give gbs, n, prompt_len, response_len so")
    if sum([any((*names, *sizes)), like is not None, for_command is not None]) > 1:
        what = "names and sizes, like= and for_command= each name the run"
        raise ConfigError(what, "rlskip.write", "give one of them")
    found = None if dump_dir is None else parse_dump_dir(os.fspath(dump_dir), "rlskip.write")
    if found is not None and os.path.isfile(found):
        remedy = "name a directory, which may be new"
        raise ConfigError("it is a file", f"rlskip.write({str(found)!r})", remedy)
    if like is not None or for_command is not None:
        if like is not None:
            own = like.run if isinstance(like, Scope) else the_run(Path(os.path.expanduser(like)))
            named = own.directory
        else:
            words = shlex.split(for_command) if isinstance(for_command, str) else for_command
            named = directory_of(list(words or ()))
        found = named if found is None else found / run_name(named)
    elif found is None:
        raise ConfigError("it is missing", "rlskip.write(dump_dir=...)", "give a skip.dump_dir")
    elif all(names):
        known = ["any" if size is None else size for size in sizes]
        found = run_directory(found, str(names[0]), str(names[1]), *known)
    elif any((*names, *sizes)):
        what = "experiment_name and project_name name a run only together"
        raise ConfigError(what, "rlskip.write", "give both")
    return Path(os.path.abspath(found))


def _shape_of(directory: Path) -> dict[str, int | None]:
    """What the name of a run's directory, or of a role's in it, says of its batches."""
    found = shape_of(directory.name) or shape_of(directory.parent.name)
    if found is None:
        what, where = "this is not the directory of a run", f"rlskip.write({str(directory)!r})"
        remedy = "add experiment_name= and project_name=, like= or for_command=; or give "
        remedy += "DUMP_DIR/EXPERIMENT_PROJECT/GBSany_Nany_inany_outany"
        raise ConfigError(what, where, remedy)
    return {name: int(text) if text.isdecimal() else None for name, text in found.items()}


def _recorded(prompts: Any, shape: Mapping[str, int | None]) -> tuple[Identity, PromptRows]:
    """What the dump records of its prompts: as a whole, for a call by step, and one by one."""
    digests = digests_of(prompts, neutral=NEUTRAL_META)  # raises where they cannot be compared
    told = [digest for digest in digests if digest is not None]
    if len(told) < len(digests):
        what = f"prompt {digests.index(None)} has nothing but fields that are never compared"
        raise BadRowError(what, "rlskip.write(prompts=...)", "give each its content, or its text")
    sizes = {name: shape[name] for name in ("n", "prompt_len", "response_len")}
    identity = Identity.of(sizes, {GIVEN: True}).for_prompts(digest_of_batch(prompts, told))
    return identity, PromptRows.of(prompts, told)
