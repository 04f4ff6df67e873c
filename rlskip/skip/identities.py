"""What the rollouts of a role's calls depend on, and how a dump's differ in that."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import xxhash

from rlskip._version import __version__
from rlskip.batch.columns import uids_of
from rlskip.batch.meta import meta_of
from rlskip.config.check import is_below
from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE, as_given
from rlskip.errors import ConfigError
from rlskip.format.fingerprint import canonical
from rlskip.skip.arguments import Arguments, FirstValues, read_arguments
from rlskip.skip.call import Call
from rlskip.skip.names import ALL, NEUTRAL_META, SELF
from rlskip.skip.notices import Notices
from rlskip.skip.plain import plain_or_not
from rlskip.store import DumpMeta, Identity, UnsupportedTypeError
from rlskip.store.identity import comparable

#: In ``skip.identity``: the code of the stage.
_CODE = "code"


class Identities:
    """The identities of a role's calls; `conditions` is the part that the config decides.

    `place` is where a run without a name comes from; None for one that has a name.
    """

    def __init__(
        self, role: str, local_config: Any, facts: HostFacts, place: str | None, notices: Notices
    ) -> None:
        self._local_config, self._notices = local_config, notices
        # Read now, as the config is copied now: rlskip may change the config later.
        sampling = dict(facts.val_shaping if role == VALIDATION_ROLE else facts.shaping)
        noted = {"model": facts.model, "versions.rlskip": __version__}
        noted["versions.torch"] = importlib.metadata.version("torch")  # it may not be imported yet
        if facts.engine is not None:  # another one is logged as a warning, as a version is
            noted["versions.engine"] = str(facts.engine)
        if place:
            noted["place"] = place
        for name, value in sampling.items():
            if name.endswith("_path") and (file := Path(str(value))).is_file():
                with contextlib.suppress(OSError):  # it may not be readable here
                    noted[f"content of {name}"] = xxhash.xxh3_64_hexdigest(file.read_bytes())
        c = local_config
        compared = {
            "role": role,
            "n": sampling.pop("n", c.n),
            "prompt_len": c.prompt_len,
            "response_len": c.response_len,
            **{f"sampling.{name}": value for name, value in sampling.items()},
        }
        typed = as_given("skip.identity", role, c)
        for key in c.identity or ():
            if key != _CODE:
                compared[f"config.{key}"] = facts.value_at(key, typed)
        self.conditions = Identity.of(compared, noted)
        self._first: dict[str, FirstValues] = {}
        # What the config or a stage ignores, and all that could have been meant.
        self.ignored, self.met = {*(c.ignore or ())}, set[str]()

    def of_call(self, call: Call) -> Identity:
        """What the call's rollouts depend on; without prompts where something is not comparable.

        With ``on_mismatch=error`` that raises UnsupportedTypeError.
        """
        from rlskip.format.prompt_digests import digest_of_batch  # needs torch

        try:
            arguments, asked = self._read(call)
            asked["prompts"] = digest_of_batch(call.prompts, call.digests)
        except UnsupportedTypeError as error:
            self._refuse_uncomparable(call, error)
            return self.made_by(call, None, {})
        return self.made_by(call, arguments, asked)

    def made_by(self, call: Call, arguments: Arguments | None, asked: dict[str, Any]) -> Identity:
        """The `conditions` with a call's stage, what it is `asked` for, and its `arguments`."""
        named = {} if call.stage.stage is None else {"stage": call.stage.stage}
        compared = {**self.conditions.compared, **named, **asked}
        if arguments is None:
            return attrs.evolve(self.conditions, compared=compared)
        for name, value in {**arguments.values, **arguments.attributes}.items():
            compared[f"arguments.{name}"] = value
        noted = {**self.conditions.noted, "defaults": sorted(arguments.usual)}
        for name, value in arguments.reads.items():
            noted[f"reads.{name}"] = value
        if arguments.changing:
            noted["changing"] = arguments.changing
        if (code := arguments.code.digest) is not None:
            noted["code"] = code
            if _CODE in (self._local_config.identity or ()):
                compared["code"] = code
        return Identity(compared, noted, arguments.ignored)

    def _read(self, call: Call) -> tuple[Arguments | None, dict[str, Any]]:
        """What counts of a call besides its prompts, None where it is not known; and what it adds.

        That are the stage's own identity, and what the prompts' meta asks for: a host may ask for
        other sampling there, for a greedy baseline, say.
        """
        stage, found = call.stage, None
        if stage.ignore is not None:
            first = self._first.setdefault(stage.name, FirstValues())
            call.compared = found = read_arguments(call, self._local_config.ignore or (), first)
            self.ignored |= {*stage.ignore}
            given = (*call.arguments, *stage.whole.signature.parameters)
            self.met |= {ALL, _CODE, *SELF, *given, *found.code.reads}
            if stage.identity is None and (found.left or found.changing):
                self._notices.leave(stage.name, found.left, found.changing)
        asked, known = dict[str, Any](), self.conditions.compared
        for name, value in meta_of(call.prompts).items():
            plain = None if name in NEUTRAL_META else plain_or_not(value)[0]
            usual = known.get(name if name == "n" else f"sampling.{name}")
            if plain is not None and canonical(plain) != canonical(usual):
                asked[f"meta_info.{name}"] = plain
        own = stage.identity
        own = own(*call.args, **call.kwargs) if callable(own) else own or {}
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"the function returns {own!r:.80}, and not a mapping",
                f"SkipManager.annotate(role={stage.role!r}, identity=...)",
                "return what must be equal by name, such as {'temperature': 1.0}",
            )
        for name, value in own.items():
            asked[f"identity.{name}"] = comparable(value, f"identity.{name}")
        return found, asked

    def ran(self, call: Call) -> None:
        """Learn which parts of its arguments a stage has changed, as its replay does not."""
        if call.compared is not None:
            self._first[call.stage.name].changing |= call.compared.changed()

    def learn(self, call: Call, meta: DumpMeta) -> None:
        """Learn of the dump that is replayed which attributes change while stages run."""
        now, then = call.identity, meta.identity
        if isinstance(now, Identity) and then is not None and then.changing:
            changing = {n for n in then.changing if is_below(f"arguments.{n}", now.compared)}
            if changing:
                self._first[call.stage.name].changing |= changing
            if call.stage.identity is None:
                self._notices.leave(call.stage.name, {}, changing)

    def differences(self, present: Identity, meta: DumpMeta) -> list[str]:
        """What makes the dump another call's. What is only noteworthy is logged."""
        once, made = self._notices.once, meta.identity
        if made is None:
            what = "dumps in %s record no prompts; they are not compared"
            once("no-identity", what, self._notices.directory)
            return []
        differs, noteworthy = present.differences(made)
        if differs:
            return differs
        if place := present.moved_from(made):
            what = "the dumps were made in %s, by the same function, and are replayed in %s"
            once(f"place {place}", what, place, present.noted["place"], level=logging.INFO)
        others = [line for line in noteworthy if not line.startswith("code: ")]
        if said := "; ".join(others):
            once(f"noteworthy {said}", "replayed although it differs: %s", said)
        if len(others) < len(noteworthy):
            name = present.noted["code"].partition(",")[0]
            what = "replayed although the code of %s has changed since the dump was made; %s=[code]"
            typed = self._notices.typed("skip.identity")
            once(f"code of {name}", f"{what} compares it", name, typed)
        return []

    def of_prompts(
        self, call: Call, submitted: Identity | None
    ) -> tuple[list[str | None], Identity]:
        """What names each of the prompts of a queue, and what their rollouts depend on besides.

        The former is a hash of the stage and the prompt; None for prompts that have only uids, and
        empty for those that cannot be compared, as :meth:`of_call` has it. A refill depends on what
        its step was `submitted` under, and on what it gives itself.
        """
        from rlskip.format.prompt_digests import digests_of  # needs torch

        try:
            arguments, asked = self._read(call)
            digests = digests_of(call.prompts, call.stage.prompt_groups, NEUTRAL_META)
        except UnsupportedTypeError as error:
            self._refuse_uncomparable(call, error)
            return [""] * len(uids_of(call.prompts)), self.made_by(call, None, {})
        made = self.made_by(call, arguments, asked)
        if submitted is not None:
            if arguments is not None:
                own = arguments.values
                asked |= {f"arguments.{name}": value for name, value in own.items()}
                usual = {*submitted.noted.get("defaults", ())} - own.keys()
                noted = {"defaults": sorted(usual | (arguments.usual & own.keys()))}
                submitted = attrs.evolve(submitted, noted={**submitted.noted, **noted})
            made = submitted.adding(asked)
        if None in digests:
            what = "nothing but uids tells the prompts apart, so each is served by the group at its"
            self._notices.once("by-position", f"{what} position in the batch")
            return [None] * len(digests), made
        named = (f"{digest} {call.stage.stage}" for digest in digests)
        return [xxhash.xxh3_128_hexdigest(name.encode()) for name in named], made

    def _refuse_uncomparable(self, call: Call, error: UnsupportedTypeError) -> None:
        error = call.explained(error)
        if self._local_config.on_mismatch == "error":
            raise error
        what = f"{error.where}: {error.what}"
        self._notices.once("uncomparable", "calls cannot be compared with dumps: %s", what)
