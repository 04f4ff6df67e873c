"""What is equal: prompts by their fingerprint, other values by their plain JSON, calls by both."""

from __future__ import annotations

import enum
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from rlskip.batch.tables import DataProtoParts
from rlskip.store import Identity, UnsupportedTypeError, fingerprint
from rlskip.store.identity import comparable
from tests.format.values import INCOMPARABLE


def _prompts() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(12).reshape(3, 4),
        "raw_prompt": np.array([[{"role": "user", "content": "hi"}], [], None], dtype=object),
        "task": ["a", "b", "c"],
        "uid": ["1", "2", "3"],
        "extra_info": [{"index": i, "uid": f"{i}"} for i in range(3)],
    }


_SAME: list[Callable[[Any], Any]] = [
    lambda p: p.update(uid=["9", "8", "7"]),
    lambda p: p.update(request_id="r", sample_id="s", global_steps=7, meta_info={"t": 1}),
    lambda p: p.update(created_at=time.time(), timestamp=[1, 2, 3]),
    lambda p: [row.update(uid="9", timestamp=time.time()) for row in p["extra_info"]],
    lambda p: p.update(extra_info=NonTensorStack(*p["extra_info"])),
    lambda p: p.update(input_ids=p.pop("input_ids")),  # another order of keys
]
_OTHER: list[Callable[[Any], Any]] = [
    lambda p: p["input_ids"].__setitem__((2, 3), 99),
    lambda p: p.update(input_ids=p["input_ids"][[1, 0, 2]]),  # another order of prompts
    lambda p: p["raw_prompt"][0][0].update(content="ho"),
    lambda p: p["raw_prompt"][0][0].update(uid="within a prompt it is content"),
    lambda p: p["extra_info"][2].update(index=7),
    lambda p: p.pop("task"),
    lambda p: p.update(new=None),
]


@pytest.mark.parametrize(
    ("change", "is_same"), [*((one, True) for one in _SAME), *((one, False) for one in _OTHER)]
)
def test_content_counts_and_uids_times_and_layout_do_not(change: Any, is_same: bool) -> None:
    changed = _prompts()
    change(changed)
    assert (fingerprint(changed) == fingerprint(_prompts())) == is_same


def test_batches_of_every_kind_are_compared_by_their_fields() -> None:
    ids, text = torch.arange(4).reshape(2, 2), np.array(["a", "b"], dtype=object)
    plain = {"ids": ids, "text": text}
    batch = TensorDict({"ids": ids}, [2])
    proto = DataProtoParts(batch, {"text": text, "uid": text}, {"global_steps": 7})
    assert fingerprint(proto) == fingerprint(plain)
    batch["text"] = NonTensorStack("a", "b")
    assert fingerprint(batch) == fingerprint(plain)
    assert fingerprint(DataProtoParts(None, {"text": text}, {})) == fingerprint({"text": text})
    assert fingerprint({"a": 1, "b": 2}, volatile=["b"]) == fingerprint({"a": 1}, volatile=[])


def _lazy(*parts: dict[str, Any]) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*(TensorDict(part, []) for part in parts))


_JAGGED = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
_ONE_ZERO = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
_ROWS = [torch.arange(2), torch.arange(2, 5)]
_NEGATIVE_NAN = np.array([0xFFF8_0000_0000_0001], "u8").view("f8")


class _Split(enum.Enum):
    TRAIN = "train"
    TEST = "test"


@dataclass
class _Asked:
    text: Any
    more: Any


# Equal in arguments and in the config, and two prompts.
_BY_VALUE: list[tuple[Any, Any]] = [
    (1, 1.0), ([1, [2.0]], (1.0, [2])), (2**40, float(2**40)), (2**80, float(2**80)),
    (_Asked("a", {"n": 8}), _Asked("a", {"n": 8.0})),
]  # fmt: skip
_EQUAL: list[tuple[Any, Any]] = [
    (3, np.int64(3)),
    (3, torch.tensor(3)),
    (3, np.array(3)),
    (0.5, torch.tensor(0.5, dtype=torch.bfloat16)),
    (True, torch.tensor(True)),
    ("a", np.str_("a")),
    (float("nan"), np.float32("nan")),
    (5, np.array(5, object)),
    (float("nan"), float(_NEGATIVE_NAN[0])),
    (np.array([1.0, np.nan]), np.array([1.0, _NEGATIVE_NAN[0]])),
    (torch.tensor([np.nan], dtype=torch.bfloat16), -torch.tensor([np.nan]).bfloat16()),
    (torch.tensor([0.0, 1]), torch.tensor([-0.0, 1])),
    (0.0, -0.0),
    ({1: 2, "x": [None], 0.0: 3}, {"x": (None,), np.int64(1): 2, -0.0: 3}),
    (np.array([1, 2], ">i8"), np.array([1, 2], "<i8")),
    (np.arange(3), torch.arange(3)),
    (np.array(["a", ""], "<U5"), np.array(["a", ""], ">U1")),
    (np.array([b"ab"], "S9"), np.array([b"ab"])),
    (np.array([1, "a"], object), [1, "a"]),
    (np.empty(0, object), []),
    (np.array([[1, 2], [3, 4]], object), [[1, 2], [3, 4]]),
    (_JAGGED, _ROWS),
    (_JAGGED, np.array([row.numpy() for row in _ROWS], object)),
    (TensorDict({"x": _JAGGED}, [2]), {"x": _ROWS}),
    (_lazy({"x": _ROWS[0]}, {"x": _ROWS[1]}), {"x": _JAGGED}),
    (_lazy({"x": torch.ones(2)}, {"x": torch.zeros(2)}), {"x": _ONE_ZERO}),
    (
        _lazy({"x": torch.ones(2), "t": "a"}, {"x": torch.zeros(2), "t": "b"}),
        {"x": _ONE_ZERO, "t": ["a", "b"]},
    ),
    (torch.ones(3), torch.nn.Parameter(torch.ones(3))),
    (Path("a/b"), PurePosixPath("a/b")),
    (Path("a"), "a"),
    ({"b", "a", "c"}, frozenset(["c", "a", "b"])),
    (OmegaConf.create({"a": [1, {"b": 2}]}), {"a": [1, {"b": 2}]}),
    (b"ab", bytearray(b"ab")),
    (_Asked("a", {1: -0.0, 2: np.arange(3)}), _Asked(Path("a"), {2: torch.arange(3), 1: 0.0})),
    (_Asked(_ROWS[0], _ROWS[0]), _Asked(_ROWS[0], _ROWS[0].clone())),
]
_DIFFERENT: list[tuple[Any, Any]] = [
    (True, 1),
    (1, "1"),
    (None, "None"),
    (float("nan"), None),
    (float("nan"), float("inf")),
    (2**80, 2**80 + 1),
    ("a", b"a"),
    (b"a", b"b"),
    ("a" * 100 + "b" + "a" * 100, "a" * 100 + "c" + "a" * 100),
    ([], {}),
    ([1], [1, 1]),
    (["ab"], ["a", "b"]),
    ([["a"], ["b"]], [["a", "b"]]),
    ({"a": None}, {}),
    ({1: "a"}, {True: "a"}),
    ({1: "a", "1": "b"}, {1: "b", "1": "a"}),
    ({1: 2}, {"<key 1>": 2}),
    ({(1, "a"): 1}, {"(1, 'a')": 1}),
    ({"a"}, {"<set>": ["a"]}),
    ({"a", "b"}, ["a", "b"]),
    ({1, 2}, {1, 3}),
    (np.array([1, 2]), comparable(np.array([1, 2]), "x")),
    (b"ab", comparable(b"ab", "x")),
    (np.array([1, 2]), np.array([1, 2], np.int32)),
    (np.array([1, 2]), np.array([1, 2], ">i4").astype("<i4")),
    (np.array([1, 2]), [1, 2]),
    (np.arange(4).astype(object), np.arange(4).reshape(2, 2).astype(object)),
    (np.empty((0, 2), object), np.empty(0, object)),
    (np.zeros(1000), np.where(np.arange(1000) == 500, 1.0, 0.0)),
    (torch.tensor([np.nan]), torch.tensor([np.inf])),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.bfloat16, torch.float16),
    (_JAGGED, [_ROWS[1], _ROWS[0]]),
    (_JAGGED, torch.arange(5)),
    (_lazy({"x": _ROWS[0]}, {"x": _ROWS[1]}), _lazy({"x": _ROWS[1]}, {"x": _ROWS[0]})),
    (_lazy({"x": 1, "y": 1}, {"x": 1}), _lazy({"x": 1, "y": 2}, {"x": 1})),
    (_Split.TRAIN, _Split.TEST),
    (_Asked("a", [1]), _Asked("a", [2])),
    (Path("a"), Path("b")),
    (date(2026, 1, 1), date(2026, 1, 2)),
]


def _again(identity: Identity) -> Identity:
    return Identity.from_json(json.loads(json.dumps(identity.as_json())))


def test_equal_values_are_equal_everywhere() -> None:
    for a, b in (*_EQUAL, *_BY_VALUE):
        one, other = Identity.of({"x": a}), Identity.of({"x": b})
        for now, then in ((one, other), (other, one), (one, _again(other)), (other, _again(one))):
            assert now.differences(then) == ([], []), (a, b)
        assert one.digest(whole=True) == _again(other).digest(whole=True)
        is_prompt = not any(a is x and b is y for x, y in _BY_VALUE)
        assert (fingerprint({"field": a}) == fingerprint({"field": b})) is is_prompt, (a, b)
        assert (fingerprint([a]) == fingerprint((b,))) is is_prompt, (a, b)


def test_different_values_differ_everywhere_and_the_line_shows_how() -> None:
    for a, b in _DIFFERENT:
        one, other = Identity.of({"x": a}), Identity.of({"x": b})
        for now, then in ((one, other), (other, one), (one, _again(other))):
            must, warn = now.differences(then)
            assert (bool(must), warn) == (True, []), (a, b)
            for line in must:
                shown = line.removesuffix(" in the dump").split(": ", 1)[1].split(" now, ")
                assert shown[0] != shown[1]
                assert len(line) < 200
        assert fingerprint({"field": a}) != fingerprint({"field": b}), (a, b)


def test_of_an_image_its_pixels_count_and_no_notes() -> None:
    images = pytest.importorskip("PIL.Image")
    notes = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
    notes.add_text("Software", "another")

    def png(pixel: int = 1, **options: Any) -> Any:
        file = io.BytesIO()
        images.new("L", (2, 2), pixel).save(file, "PNG", **options)
        return images.open(file)

    for same in (png(dpi=(9, 9), pnginfo=notes), images.new("L", (2, 2), 1)):
        assert fingerprint([png()]) == fingerprint([same])
    for other in (png(2), png().convert("RGB"), png(transparency=1)):
        assert fingerprint([png()]) != fingerprint([other])


@pytest.mark.parametrize("name", INCOMPARABLE)
def test_an_incomparable_value_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlskip.format.codec.MAX_PARTS", 2000)
    incomparable = INCOMPARABLE[name]()
    with pytest.raises(UnsupportedTypeError, match=r"prompts\[0\]\['field'\]") as caught:
        fingerprint([{"field": incomparable}])
    assert "annotate(prompts=...)" in caught.value.remedy
    assert len(str(caught.value)) < 900
    with pytest.raises(UnsupportedTypeError, match=r"^identity\.tool\[0\]"):
        Identity.of({"identity.tool": [incomparable]})


# -- what dumps carry: another value would make all of them mismatch ---------------------------

_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]
_BATCH = TensorDict({"input_ids": _ROWS[0].repeat(2, 1), "prompts": _JAGGED}, [2])
_BATCH.set("each", NonTensorStack("a", "b"))


@pytest.mark.parametrize(
    ("golden", "prompts"),
    [
        ("6fe3bef0ba2634357f667e0ed89880b3", torch.arange(12).reshape(3, 4)),
        ("e268b54ebfc59a48afd483cffa8709c3", torch.linspace(-1, 1, 6, dtype=torch.bfloat16)),
        ("ce60634b14275b83269c370194e63e55", [[1, 2, 3], [4], []]),
        ("4c8e5117909b57a6dd11a9a585907fee", np.array([_CHAT, _CHAT[:1]], object)),
        (
            "f71dcb68193a053cd03e5fad8e9d1d69",
            [{"prompt": _CHAT, "n": 8, "temperature": 1.0, "greedy": False, "tools": None}],
        ),
        ("8e2166ccebf76629ba45e4fc153548c0", _BATCH),
        (
            "0a42cfba1795be3b5ea2419d52f1a9b9",
            [None, True, 1, 1.5, 2**70, 1e300, float("nan"), 1j, {1: {2, 3}}],
        ),
        # Every process gives the texts of a set another order.
        (
            "57ffb128e33261d4838f5d19581ff7d7",
            [{frozenset("abc"): 1, ("t", frozenset("xyz")): 3}, {frozenset("abc"), "u", "v"}],
        ),
    ],
)
def test_ordinary_prompts_keep_their_fingerprints(golden: str, prompts: Any) -> None:
    assert fingerprint(prompts) == golden


# -- what counts as the same call ----------------------------------------------------------------

MADE = {
    "prompts": "ab",
    "n": 8,
    "response_len": 4096,
    "sampling.temperature": 1.0,
    "sampling.stop": ("a", "b"),
    "identity.tools": {"search": True},
}
NOTED = {"model": "some/model", "versions.torch": "2.13.0"}


def _identity(**changes: Any) -> Identity:
    return Identity.of({**MADE, **changes}, NOTED)


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ({"n": 4}, ["n: 4 now, 8 in the dump"]),
        ({"prompts": "cd"}, ["prompts: 'cd' now, 'ab' in the dump"]),
        (
            {"sampling.temperature": 0.7, "sampling.min_p": 0.1},
            [
                "sampling.min_p: 0.1 now, absent in the dump",
                "sampling.temperature: 0.7 now, 1.0 in the dump",
            ],
        ),
        ({"identity.tools": {}}, ["identity.tools.search: absent now, True in the dump"]),
        ({"response_len": None}, ["response_len: None now, 4096 in the dump"]),
    ],
)
def test_differences_are_named(changes: dict, must: list[str]) -> None:
    assert _identity(**changes).differences(_identity()) == (must, [])


@pytest.mark.parametrize(
    ("code", "is_told"),
    [("f, cpython-311 aa", False), ("f, cpython-311 bb", True), ("f, cpython-312 bb", False)],
)
def test_code_is_compared_within_a_version_of_python(code: str, is_told: bool) -> None:
    now, then = (Identity.of(MADE, {"code": one}) for one in ("f, cpython-311 aa", code))
    must, warn = now.differences(then)
    assert must == []
    assert any(line.startswith("code: ") for line in warn) == is_told


def test_what_has_no_role_or_stage_was_made_by_hand() -> None:
    now = _identity(role="critic", stage="Trainer.score")
    assert now.differences(_identity(role="rollout", stage="Trainer.generate"))[0] == [
        "role: 'critic' now, 'rollout' in the dump",
        "stage: 'Trainer.score' now, 'Trainer.generate' in the dump",
    ]
    assert now.differences(_again(now)) == ([], [])
    assert now.differences(_identity()) == _identity().differences(now) == ([], [])


@pytest.mark.parametrize(
    ("now", "then", "must"),
    [
        (({"n": 2}, []), ({"n": 4}, ["n"]), ["arguments.n: 2 now, 4 in the dump"]),
        (({"n": 4}, ["n"]), ({}, []), []),
        (({}, []), ({"n": 4}, ["n"]), []),
        (({"n": 4}, []), ({}, []), ["arguments.n: 4 now, absent in the dump"]),
        (({}, []), ({"n": 4}, []), ["arguments.n: absent now, 4 in the dump"]),
        (({"n": 4}, []), ({"n": 4}, ["n"]), []),
        (({"n": 2}, ["n"]), ({"n": 4}, ["n"]), ["arguments.n: 2 now, 4 in the dump"]),
        (({"n": 2}, []), None, []),  # not known
        (None, ({"n": 2}, []), []),
    ],
)
def test_an_argument_at_its_default_equals_an_absent_one(now: Any, then: Any, must: Any) -> None:
    def made(arguments: Any) -> Identity:
        if arguments is None:
            return _identity()
        given, usual = arguments
        values = {f"arguments.{name}": value for name, value in given.items()}
        return Identity.of({**MADE, **values}, {**NOTED, "defaults": usual})

    assert made(now).differences(_again(made(then)))[0] == must
    assert bool(made(then).differences(made(now))[0]) == bool(must), "both ways"
    assert made(({}, [])).digest(whole=True) == made(({"n": 4}, ["n"])).digest(whole=True)


def test_arguments_that_are_ignored_now_are_not_compared() -> None:
    noted = {"defaults": []}
    then = Identity.of({"arguments.a.top_p": 1, "arguments.b": 2}, noted)
    for ignored, left in (((), 2), (("a",), 1), (("a", "b"), 0), (("*",), 0)):
        assert len(Identity({}, noted, ignored).differences(then)[0]) == left


def test_the_digest_is_of_role_stage_and_prompts_alone() -> None:
    """It says where to look; whatever else differs, a replay judges and names."""
    now = _identity(role="rollout", stage="generate")
    assert now.digest() == _identity(role="rollout", stage="generate", n=1).digest()
    others = [_identity(role=role, stage="generate") for role in ("rollout", "other")]
    others += [now.for_prompts("other"), now.for_prompts(None), _identity()]
    assert len({now.digest(), *(other.digest() for other in others)}) == 5


@pytest.mark.parametrize("kind", [list, tuple, dict, str])
def test_how_long_a_value_is_changes_no_rule(kind: Any) -> None:
    """A long value is recorded as a hash: each dump's meta.json would hold it else."""

    def of(n: int, as_: Any = int, last: Any = 0) -> Any:
        if kind is str:
            return "a" * n + str(last)
        items = [as_(i) for i in range(n)] + [last]
        return {f"k{i}": item for i, item in enumerate(items)} if kind is dict else kind(items)

    for n in (3, 300, 5_000):
        now, equal, other = of(n), of(n, float), of(n, last=1)
        recorded = Identity.of({"x": now}).compared["x"]
        assert (n < 3000) or recorded.startswith(f"<{'list' if kind is tuple else kind.__name__}")
        assert not Identity.of({"x": now}).differences(Identity.of({"x": equal}))[0]
        assert Identity.of({"x": now}).differences(Identity.of({"x": other}))[0]
        if kind is not str:
            assert Identity.of({"x": now}).differences(Identity.of({"x": of(n, str)}))[0]


@pytest.mark.parametrize(
    "data",
    [5, None, [], "x", {}, {"compared": {}}, {"compared": {}, "noted": []},
     {"compared": {"prompts": 5}, "noted": {}}, {"compared": {}, "noted": {"defaults": "x"}},
     {"compared": {}, "noted": {"defaults": [5]}}, {"compared": {}, "noted": {}, "more": 1}],
)  # fmt: skip
def test_a_mapping_that_is_not_an_identity_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Identity.from_json(data)
