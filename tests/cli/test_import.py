"""import: verl's dumps, written by verl itself, and dumps that try to do something else."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from rlskip import SkipManager
from rlskip.cli.dumps import Target, the_run
from rlskip.cli.pickles import ForeignDumpError, read_data_proto, read_queue_batch
from rlskip.errors import ConfigError, MismatchError
from rlskip.keys import status_tag
from rlskip.queue import MemoryQueue, to_rows
from rlskip.replay import ReplayBuffer
from rlskip.store import StepStore, UnknownTypeError

RUN = "exp_proj/GBS2_N2_in6_out5"
SERIALISATIONS = ["verl-0.9.1-torch", "verl-0.9.1-numpy", "verl-0.8.0-torch", "verl-0.8.0-numpy"]


@pytest.fixture
def foreign(tmp_path: Path, verl_files: Path) -> Path:
    """A dump_dir of verl's: two steps of `rollout`, one of `rollout_tq` in two mini-batches."""
    run = tmp_path / "verl" / RUN
    for step, name in ((1, "verl-0.9.1-torch"), (2, "verl-0.9.1-numpy")):
        (run / str(step)).mkdir(parents=True)
        shutil.copy(verl_files / f"{name}.dp", run / str(step) / "gen_batch.dp")
        (run / str(step) / "meta.json").write_text(f'{{"global_steps": {step}}}')
    (run / "7" / "0").mkdir(parents=True)
    shutil.copy(verl_files / "verl-0.9.1-queue.pt", run / "7" / "0" / "tq_batch.pt")
    return tmp_path / "verl"


# -- what verl wrote ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERIALISATIONS)
def test_every_serialisation_gives_the_same_rollouts(verl_files: Path, name: str) -> None:
    batch, others, meta_info = read_data_proto(verl_files / f"{name}.dp")
    assert isinstance(batch, TensorDict)
    assert batch["responses"].shape == (4, 5)
    assert batch["responses"][1, 3:].tolist() == [0, 0]
    assert batch["rm_scores"].sum() == 4
    reference, _, _ = read_data_proto(verl_files / "verl-0.9.1-torch.dp")
    assert all(torch.equal(batch[k], reference[k]) for k in list(reference.keys()))
    assert others["uid"].tolist() == ["a", "a", "b", "b"]
    assert others["multi_modal_inputs"][1]["pixel_values"].tolist() == [0, 1, 2]
    assert others["raw_prompt"][3] == [{"role": "user", "content": "3 + 2?"}]
    assert others["score"].dtype == np.float64
    assert meta_info["timing"]["gen"] == 1.5


def test_they_become_dumps_of_the_same_run(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    said = rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle", "--json")
    assert said.code == 0
    assert [(one["role"], one["step"], one["rows"]) for one in said.json] == [
        ("rollout", 1, 4),
        ("rollout", 2, 4),
        ("rollout_tq", 7, 5),
    ]
    run = tmp_path / "ours" / RUN
    store = StepStore(run)
    assert store.steps() == [1, 2]
    meta = store.peek(1)
    assert meta is not None
    assert meta.identity is None
    assert meta.info["imported"].endswith("1/gen_batch.dp")
    shown = rlskip("show", 1, "-d", run).out
    assert "not recorded: it is replayed without a comparison" in shown
    assert "row 0, uid a" in shown
    with pytest.raises(UnknownTypeError, match="verl cannot be imported"):
        store.load(1)


def test_a_dump_that_is_there_stays(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    StepStore(tmp_path / "ours" / RUN).save(1, ["ours"])
    said = rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle", "--json")
    assert [one["nbytes"] is None for one in said.json] == [True, False, False]
    assert StepStore(tmp_path / "ours" / RUN).load(1) == ["ours"]


def test_verl_0_8_names_its_steps_otherwise(rlskip: Any, verl_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "verl" / RUN / "genstep_000012"
    folder.mkdir(parents=True)
    shutil.copy(verl_files / "verl-0.8.0-torch.dp", folder / "gen_batch.dp")
    (folder / "meta.json").write_text('{"global_steps": 9, "gen_steps": 12}')
    (one,) = rlskip(
        "import", tmp_path / "verl", "-d", tmp_path / "o", "--trust-pickle", "--json"
    ).json
    assert (one["step"], one["run"]) == (9, RUN)


def test_a_single_file_says_run_and_step_itself(
    rlskip: Any, verl_files: Path, tmp_path: Path
) -> None:
    file, out = verl_files / "verl-0.9.1-torch.dp", tmp_path / "o"
    assert "--step" in rlskip("import", file, "-d", out, "--trust-pickle").err
    assert "--run" in rlskip("import", file, "-d", out, "--trust-pickle", "--step", 3).err
    for run in ("../out/side", "a b/GBS1_N1_in1_out1", "/abs/GBS1_N1_in1_out1"):
        said = rlskip("import", file, "-d", out, "--trust-pickle", "--step", 3, "--run", run)
        assert said.code == 2, run
    assert not out.exists()
    said = rlskip("import", file, "-d", out, "--trust-pickle", "--step", 3, "--run", RUN)
    assert said.code == 0
    assert StepStore(out / RUN).steps() == [3]


def test_it_refuses_pickles_that_nobody_trusts(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    said = rlskip("import", foreign, "-d", tmp_path / "ours")
    assert said.code == 2
    assert "add --trust-pickle" in said.err
    assert not (tmp_path / "ours").exists()


# -- replaying a queue's batch -----------------------------------------------------------------


class Trainer:
    """Submits prompts that have content, and samples the real buffer."""

    def __init__(self) -> None:
        self.queue = MemoryQueue()
        self.buffer = ReplayBuffer(self.queue, {"replay": {"timeout_s": 20.0}})
        self.submitted: list[str] = []

    @SkipManager.annotate(role="rollout_tq", queue=lambda self, *_, **__: self.queue)
    def submit(self, prompts: dict[str, Any]) -> None:
        self.submitted += prompts["uid"]
        for uid in prompts["uid"]:
            self.queue.put([uid], "train", tags=[status_tag(7, "finished", 2)])


@pytest.fixture
def replaying(rlskip: Any, foreign: Path, tmp_path: Path) -> Callable[..., Trainer]:
    rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle")

    def start(**more: Any) -> Trainer:
        shape = {"gbs": 2, "n": 2, "prompt_len": 6, "response_len": 5}
        names = {"experiment_name": "exp", "project_name": "proj"}
        skip = {"dump_dir": str(tmp_path / "ours"), **shape, **names, **more}
        SkipManager.init({"skip": {**skip, "rollout_tq": {"enable": True}}})
        SkipManager.set_step(7)
        return Trainer()

    return start


@pytest.fixture(autouse=True)
def _fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RLSKIP_JOB", "job")
    yield SkipManager.reset()
    SkipManager.reset()


def test_a_queue_batch_is_replayed_group_by_group_in_order(
    replaying: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = replaying()
    assert trainer.submit({"uid": ["x_1", "y"], "text": ["what", "else"]}) is None
    assert trainer.submitted == []
    batch, _ = trainer.buffer.sample(7, "train")
    rows = dict(zip(batch.keys, to_rows(trainer.queue.get(batch.keys, "train")), strict=True))
    # Every session and every row of it, which verl's own replay loses.
    assert sorted(rows) == ["x_1_0_0", "x_1_1_0", "y_0_0", "y_0_1", "y_1_0"]
    assert rows["x_1_1_0"]["responses"].tolist() == [100, 101, 102, 103]
    assert rows["y_0_1"]["prompts"].tolist() == [20, 21, 22, 23, 24]
    assert rows["y_0_1"]["uid"] == "y"
    assert "name no prompts; not compared" in caplog.text


def test_it_goes_by_place_so_the_number_of_prompts_must_be_the_same(
    replaying: Callable[..., Trainer],
) -> None:
    with pytest.raises(MismatchError, match="holds 2 groups for the batch's 3 prompts"):
        replaying().submit({"uid": ["x", "y", "z"], "text": ["a", "b", "c"]})


def test_nothing_is_imported_through_a_link(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    for path in ("ours", "outside"):
        (tmp_path / path).mkdir()
    (tmp_path / "ours" / "exp_proj").symlink_to(tmp_path / "outside")
    said = rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle")
    assert said.code == 2
    assert "is a symbolic link" in said.err
    assert not list((tmp_path / "outside").iterdir())


def test_a_short_group_is_generated_again(
    rlskip: Any, foreign: Path, tmp_path: Path, replaying: Callable[..., Trainer]
) -> None:
    lacking = tmp_path / "ours" / RUN.replace("N2", "N3")
    lacking.parent.mkdir(exist_ok=True)
    (foreign / RUN).rename(foreign / RUN.replace("N2", "N3"))
    rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle")
    trainer = replaying(n=3, on_mismatch="regenerate")
    trainer.submit({"uid": ["x", "y"], "text": ["a", "b"]})
    assert trainer.submitted == ["x", "y"], "two sessions of three were dumped"


def test_restore_rng_is_refused_for_what_was_imported(replaying: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match="holds no generators' states"):
        replaying(restore_rng=True).submit({"uid": ["x", "y"], "text": ["a", "b"]})


# -- hostile files -----------------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled by anybody careless."""

    def __init__(self, proof: Path, call: Callable[..., Any] = os.system) -> None:
        self.call, self.argument = call, f"touch {proof}"

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def proto(state: Any) -> bytes:
    """A gen_batch.dp with this state, as export writes it."""
    inner = pickle.dumps(state, protocol=4)
    head = b"\x80\x04cverl.protocol\nDataProto\n)\x81"
    return head + inner[2:-1] + b"b."


def test_the_attacks_below_would_work(tmp_path: Path) -> None:
    """Else the tests that nothing happened would prove nothing."""
    for i, data in enumerate([pickle.dumps(Evil(tmp_path / "0")), saved(Evil(tmp_path / "1"))]):
        if i:
            torch.load(io.BytesIO(data), weights_only=False)
        else:
            pickle.loads(data)
        assert (tmp_path / str(i)).exists()


def attacks(proof: Path) -> dict[str, bytes]:
    evil = Evil(proof)
    batch = {"x": torch.zeros(1)}
    storage = torch.storage._load_from_bytes
    legacy = saved(evil, _use_new_zipfile_serialization=False)

    class InStorage:
        def __reduce__(self) -> tuple[Any, ...]:
            return storage, (saved(evil),)

    class InLegacyStorage:
        def __reduce__(self) -> tuple[Any, ...]:
            return storage, (legacy,)

    class Getattr:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (TensorDict, "load_memmap")

    class Torch:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.load, (str(proof),)

    polyglot = io.BytesIO(legacy)
    with zipfile.ZipFile(polyglot, "a") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(batch))
    return {
        "a bare pickle": pickle.dumps(evil),
        "in the state": proto((saved(batch), {}, {"x": evil})),
        "in a column": proto((saved(batch), {"x": np.array([evil], object)}, {})),
        "within the zip of the tensors": proto((saved({"x": evil}), {}, {})),
        "instead of the tensors": proto((saved(evil), {}, {})),
        "legacy bytes of torch": proto((legacy, {}, {})),
        "a zip behind legacy bytes": proto((polyglot.getvalue(), {}, {})),
        "within a storage's bytes": proto((saved(batch), {}, {"x": InStorage()})),
        "within a storage's legacy bytes": proto((saved(batch), {}, {"x": InLegacyStorage()})),
        "the numpy form": proto((([1], None, {"x": evil}), {}, {})),
        "getattr": proto((saved({"x": Getattr()}), {}, {})),
        "torch.load": proto((saved({"x": Torch()}), {}, {})),
        "eval": pickle.dumps(Evil(proof, eval)),
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    }


@pytest.mark.parametrize("which", list(attacks(Path("x"))))
def test_a_dump_that_would_run_a_command_is_refused(
    rlskip: Any, tmp_path: Path, which: str
) -> None:
    proof = tmp_path / "proof"
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(attacks(proof)[which])
    out = tmp_path / "ours"
    arguments = ("import", file, "-d", out, "--trust-pickle", "--step", 1, "--run", RUN)
    said = rlskip(*arguments)
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert not proof.exists()
    assert not out.exists()


class Made:
    """Pickled as ``call(*arguments)``; with keywords as ``call.__new__(call, ...)``."""

    def __init__(self, call: Any, *arguments: Any, **keywords: Any) -> None:
        self.call, self.arguments, self.keywords = call, arguments, keywords

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


class Stated:
    """Something that is given states, one after the other."""

    def __init__(self, made: Any, *states: Any) -> None:
        self.made, self.states = made, states


class Crafting(pickle._Pickler):  # type: ignore[name-defined]
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Made) and obj.keywords:
            for part in (obj.call, obj.arguments, obj.keywords):
                self.save(part)
            self.write(pickle.NEWOBJ_EX)
        elif isinstance(obj, Stated):
            self.save(obj.made)
            for state in obj.states:
                self.save(state)
                self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


def crafted(value: Any) -> bytes:
    buffer = io.BytesIO()
    Crafting(buffer, 4).dump((None, {"x": value}, {}))
    return b"\x80\x04cverl.protocol\nDataProto\n)\x81" + buffer.getvalue()[2:-1] + b"b."


def dtype(code: str, *state: Any) -> Stated:
    return Stated(Made(np.dtype, code, False, True), state)


def memory_attacks() -> dict[str, Any]:
    """What would make Python read or write at an address of the file's choice, or beyond an end."""
    reconstruct = np.array(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    buffered = np.arange(2).__reduce_ex__(5)[0]
    retyped = torch._tensor._rebuild_from_type_v2
    a, objects, flags = b"A" * 8, np.dtype("O"), np.dtype("O").flags
    hidden = dtype("O8", 3, "|", None, None, None, -1, -1, 0)
    beyond = dtype("S8", 3, "|", None, ("x",), {"x": (np.dtype("i8"), 1 << 40)}, 8, 1, 0)
    field = dtype("S8", 3, "|", None, ("x",), {"x": (objects, 0)}, 8, 1, flags)
    part = dtype("S8", 3, "|", (objects, (1,)), None, None, 8, 1, flags)
    growing = dtype("S8", 3, "|", None, None, None, 8, 1, 0)
    grown = (3, "|", None, None, None, 1 << 30, 1, 0)

    def array(*states: Any, shape: tuple[int, ...] = (0,)) -> Stated:
        return Stated(Made(reconstruct, np.ndarray, shape, b"b"), *states)

    def column(kind: Any, data: Any, n: int = 1) -> Stated:
        return array((1, (n,), kind, False, data))

    return {
        "an array of addresses": Made(np.ndarray, (1,), objects, a),
        "memory as it is": Made(np.ndarray, (1000,)),
        "by way of a tensor": Made(retyped, np.ndarray, np.ndarray, ((1,), objects, a), None),
        "a state of addresses": column(objects, a),
        "a state of too few objects": column(objects, [], 100_000),
        "not empty at first": array(shape=(1000,)),
        "filled twice": array(*[(1, (n,), np.dtype("u1"), False, bytes(n)) for n in (8, 4000)]),
        "objects that a state hides": column(hidden, a),
        "objects that a buffer hides": Made(buffered, a, hidden, (1,), "C"),
        "objects that a scalar hides": Made(scalar, hidden, a),
        "a field of objects": column(field, a),
        "a field beyond the end": column(beyond, a),
        "a part of objects": Made(scalar, part, a),
        "a dtype that grows": [growing, column(growing, a), Stated(growing, grown)],
        "a structure": Made(np.dtype, "O,i8", False, True),
        "a structure's mapping": Made(np.dtype, {"x": (objects, 0)}, False, True),
        "objects in a buffer": Made(buffered, a, objects, (1,), "C"),
        "a buffer that may move": Made(buffered, np.zeros(100), np.dtype("i8"), (100,), "C"),
        "a tensor at an address": Made(torch.Tensor, cdata=0x41414141),
        "a storage of an allocator": Made(torch.UntypedStorage, 8, allocator=0x41414141),
        "a function's defaults": Stated(torch._utils._rebuild_parameter, (None, {"x": 1})),
    }


@pytest.mark.parametrize("which", list(memory_attacks()))
def test_a_dump_that_would_reach_into_memory_is_refused(tmp_path: Path, which: str) -> None:
    file = tmp_path / "gen_batch.dp"
    file.write_bytes(crafted(memory_attacks()[which]))
    with pytest.raises(ForeignDumpError):
        read_data_proto(file)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_kind_of_array_is_read_as_pickle_would(tmp_path: Path, protocol: int) -> None:
    arrays = {
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "bcd"]),
        "bytes": np.array([b"a", b"xx"]),
        "times": np.array(["2026-01-01"], "M8[s]"),
        "spans": np.array([3], "m8[D]"),
        "objects": np.array([[None, {"a": np.arange(2)}], ["x", 1.5]], object),
        "no objects": np.zeros((0, 2), object),
        "empty": np.zeros((0, 3)),
        "one": np.array(1.5),
        "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "complex": np.ones(2, "c16"),
        "scalar": np.float32(3),
        "flag": np.bool_(True),
        "half": torch.rand(2).bfloat16(),
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }
    file = tmp_path / "gen_batch.dp"
    inner = pickle.dumps((None, arrays, {}), protocol=protocol)
    head = b"\x80" + bytes([protocol]) + b"cverl.protocol\nDataProto\n)\x81"
    file.write_bytes(head + inner[2:-1] + b"b.")
    _, found, _ = read_data_proto(file)
    assert repr(found) == repr(pickle.loads(inner)[1])
    assert found["columns first"].flags.f_contiguous
    found["big"][0] = 7  # memory of its own


def test_images_and_batches_of_every_kind_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(12, dtype="u1").reshape(2, 2, 3))
    lists = [torch.ones(2), torch.ones(3)]
    batch = TensorDict(
        {
            "ragged": torch.nested.nested_tensor(lists, layout=torch.jagged),
            "strided": torch.nested.nested_tensor(lists, layout=torch.strided),
            "texts": NonTensorStack("a", "b"),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "within": TensorDict({"x": torch.ones(2, dtype=torch.uint8)}, [2]),
        },
        [2],
    )
    lazy = LazyStackedTensorDict(*(TensorDict({"x": x}, []) for x in lists))
    images = np.empty(1, object)
    images[0] = {"image": [image]}
    file = tmp_path / "gen_batch.dp"
    for packed in (batch, saved(batch)):
        file.write_bytes(proto((packed, {"images": images}, {"lazy": lazy})))
        found, others, meta_info = read_data_proto(file)
        assert [len(x) for x in found["ragged"].unbind()] == [2, 3]
        assert [len(x) for x in found["strided"].unbind()] == [2, 3]
        assert found["texts"] == ["a", "b"]
        assert found["within", "x"].tolist() == [1, 1]
        assert isinstance(found["parameter"], torch.nn.Parameter)
        assert others["images"][0]["image"][0].tobytes() == bytes(range(12))
        assert meta_info["lazy"][1]["x"].tolist() == [1, 1, 1]


def test_a_queue_batch_that_would_run_a_command_is_refused(tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", tmp_path / "tq_batch.pt"
    payload = {"tensordict": TensorDict({}, [0]), "tags": [], "keys": [], "global_steps": 1}
    for place in payload:
        file.write_bytes(saved({**payload, place: Evil(proof)}))
        with pytest.raises(ForeignDumpError, match=r"names posix\.system.*nothing of it was run"):
            read_queue_batch(file)
    assert not proof.exists()


def test_scripted_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tq_batch.pt"
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(file))
    with pytest.raises(ForeignDumpError, match="holds code"):
        read_queue_batch(file)


@pytest.mark.parametrize("cut", [0, 1, 100, 2000, -1])
def test_a_torn_file_is_an_error_of_one_line(verl_files: Path, tmp_path: Path, cut: int) -> None:
    for name, read in (
        ("verl-0.9.1-torch.dp", read_data_proto),
        ("verl-0.9.1-queue.pt", read_queue_batch),
    ):
        file = tmp_path / name
        file.write_bytes((verl_files / name).read_bytes()[:cut])
        with pytest.raises(ForeignDumpError):
            read(file)


def test_the_imported_run_is_one_of_ours(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    rlskip("import", foreign, "-d", tmp_path / "ours", "--trust-pickle")
    target = Target(the_run(tmp_path / "ours"))
    assert [dump.name for dump in target.dumps()] == ["1", "2", "7/0"]
    assert rlskip("verify", "-d", tmp_path / "ours").code == 0
