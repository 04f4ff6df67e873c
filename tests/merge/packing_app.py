"""Checks packed forward passes of genuine models: ``python packing_app.py CASES RESULTS``.

Run by the interpreter that $RLSKIP_TRL names, which has transformers and TRL. Both are JSON files:
a list of ``[function, *arguments]``, and what each of them returned.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from rlskip.merge import pack
from rlskip.merge.packed_forward import PackingError, packed_forward, refuse_inexact
from rlskip.testing import assert_exact_packing

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16
    },
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    # Their layers do not pass on what the forward pass was given.
    "Falcon": {"hidden_dropout": 0.0},
    "StableLm": {},
    # Its layers need contiguous attention.
    "JetMoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Not exact, each for another reason.
    "Mistral": {"sliding_window": 4},
    "Gemma3Text": {"head_dim": 8},
    "GptOss": {"head_dim": 8, "num_local_experts": 4},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "Doge": {"head_dim": 8},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mamba": {"state_size": 4},
    "Rwkv": {"attention_hidden_size": 32},
    "Phi3": {"pad_token_id": 0, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4
    }, "original_max_position_embeddings": 32},
}  # fmt: skip


def model_of(name: str, attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**TINY, **MODELS[name], **more})
    kind = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    cls = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))
    model = cls._from_config(config, attn_implementation=attention)
    if name == "Qwen3Moe":  # the batched experts compute in another order for each batch
        model.set_experts_implementation("eager")
    return model


def exact(name: str, attention: str) -> str:
    assert_exact_packing(model_of(name, attention))
    return "exact"


class Adapted(torch.nn.Module):
    """A model in a wrapper as PEFT's: it takes any arguments."""

    def __init__(self, base: Any, is_prompt_learning: bool) -> None:
        super().__init__()
        self.base, self.config = base, base.config
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=is_prompt_learning)}

    def get_base_model(self) -> Any:
        return self.base

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        return self.base(input_ids=input_ids, **given)


def adapted(is_prompt_learning: bool) -> str:
    try:
        assert_exact_packing(Adapted(model_of("Llama"), is_prompt_learning))
    except PackingError as error:
        return error.what
    return "exact"


def checkpointing(name: str) -> str:
    model = model_of(name)
    model.gradient_checkpointing_enable()

    def forward(model: Any, rows: Any) -> Any:
        model.train()
        [packed] = pack(rows, 1000)
        found = packed.log_probs(packed_forward(model, packed)).unbind()
        return [found[packed.rows.index(row)] for row in range(len(found))]

    assert_exact_packing(model, forward=forward)
    return "exact"


def flex(name: str) -> float:
    """The largest difference between flex_attention's log-probs and those of sdpa, in float32."""
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 9]]
    [packed] = pack(rows, 100)
    found = []
    for attention in ("sdpa", "flex_attention"):
        model = model_of(name, attention, head_dim=16).eval()
        with torch.no_grad():
            found.append(packed.log_probs(packed_forward(model, packed)).values())
    return float((found[0] - found[1]).abs().max())


def refused(name: str, changes: dict[str, Any]) -> str:
    training = changes.pop("training", False)
    attention = changes.pop("attention", "eager")
    model = model_of(name, attention, **changes).train(training)
    try:
        refuse_inexact(model)
    except PackingError as error:
        return error.what
    return ""


def refused_mask() -> str:
    """What is said of a layer that gives the attention function a mask of its own."""
    model = model_of("Llama").eval()
    layer = model.model.layers[1].self_attn
    attend, own = layer.forward, {"attention_mask": torch.ones(1, 1, 3, 3)}
    layer.forward = lambda **given: attend(**{**given, **own})
    try:
        packed_forward(model, *pack([[1, 2, 3]], 3))
    except PackingError as error:
        return error.what
    return ""


def wrong(kind: str) -> str:
    """What the oracle says of a packing that is wrong."""

    def forward(model: Any, rows: Any) -> Any:
        [packed] = pack(rows, 1000)
        mask = packed.dense_mask()
        positions = packed.position_ids
        if kind == "positions":  # counted through the pack
            positions = torch.arange(len(packed))
        if kind == "mask":  # plain causal
            mask = torch.ones_like(mask).tril()
        logits = model(
            packed.input_ids[None], attention_mask=mask[None, None], position_ids=positions[None]
        ).logits[0]
        if kind == "detached":
            logits = logits.detach() + 0 * logits
        found = packed.log_probs(logits).unbind()
        return [found[packed.rows.index(row)] for row in range(len(found))]

    try:
        assert_exact_packing(model_of("Llama"), forward=forward)
    except AssertionError as error:
        return str(error)
    return "exact"


def spread(name: str) -> list[float]:
    """Differences of gradients in float32: packed against one by one, and of two batchings."""
    rows = [[1, 2, 3, *(i % 7 + n for i in range(9))] for n in range(8)]
    found = []
    for how in ("packed", "one by one", "all at once"):
        model = model_of(name).float().eval()
        chunks = [rows[i : i + 1] for i in range(8)] if how == "one by one" else [rows]
        for chunk in chunks:
            if how == "packed":
                [packed] = pack(chunk, 1000)
                loss = packed.log_probs(packed_forward(model, packed)).values().sum()
            else:
                ids = torch.tensor(chunk)
                log_probs = model(ids).logits[:, :-1].log_softmax(-1)
                loss = log_probs.gather(-1, ids[:, 1:, None]).sum()
            loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    scale = float(found[1].abs().max())
    return [float((found[i] - found[1]).abs().max()) / scale for i in (0, 2)]


def trls(name: str) -> str:
    """The oracle on TRL's planner, with a dense mask in the place of its FlashAttention."""
    from trl.experimental.async_grpo.packing import TreeRow

    def forward(model: Any, rows: Any) -> Any:
        tree = TreeRow()
        for i, (row, mask) in enumerate(zip(rows["input_ids"], rows["loss_mask"], strict=True)):
            tree.add({
                "input_ids": torch.tensor(row), "completion_mask": torch.tensor(mask),
                "group_id": i, "old_log_probs": torch.zeros(len(row)), "advantage": 1.0,
            })  # fmt: skip
        plan = tree.pack()
        size = len(plan["input_ids"])
        mask = torch.zeros(size, size, dtype=torch.bool)
        queries, keys = plan["tree_cu_seqlens_q"].tolist(), plan["tree_cu_seqlens_k"].tolist()
        for s in range(len(queries) - 1):
            first, stop = queries[s], queries[s + 1]
            path = plan["tree_kv_index"][keys[s] : keys[s + 1]]
            own = torch.arange(first, stop)
            mask[first:stop, path] = True
            mask[first:stop, first:stop] = own[None] <= own[:, None]
        logits = model(
            plan["input_ids"][None], attention_mask=mask[None, None],
            position_ids=plan["position_ids"][None],
        ).logits[0]  # fmt: skip
        chosen = logits.log_softmax(-1)
        results = [torch.zeros(len(row), dtype=logits.dtype) for row in rows["input_ids"]]
        places = {i: [t for t in range(1, len(m)) if m[t]] for i, m in enumerate(rows["loss_mask"])}
        for term, (position, i) in enumerate(
            zip(plan["token_index"].tolist(), plan["segment_id"].tolist(), strict=True)
        ):
            token = places[i].pop(0)
            label = rows["input_ids"][i][token]
            assert plan["shift_labels"][position] == label, term
            results[i] = results[i].index_put((torch.tensor(token),), chosen[position, label])
        return results

    assert_exact_packing(model_of(name), forward=forward)
    return "exact"


def trainer_of(name: str, folder: str, dropout: float = 0.0, **arguments: Any) -> Any:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate([*map(str, range(35)), "<pad>", "<eos>"])}
    bare = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    transformers.set_seed(0)
    model_of("Qwen2", eos_token_id=36, pad_token_id=35).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attention_dropout=dropout)
    defaults = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
        "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": False, "beta": 0.1, "num_iterations": 2, "temperature": 0.9,
    }  # fmt: skip
    config = getattr(trl, f"{name}Config")(folder, **{**defaults, **arguments})
    return getattr(trl, f"{name}Trainer")(
        model=model, args=config, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": [f"{i} 1 2 3" for i in range(8)]}),
    )  # fmt: skip


def trained(name: str) -> list[list[dict[str, float]]]:
    """Logs of a training by itself, with log-probabilities two rows at a time, and on packs."""
    from rlskip.hosts import trl as host

    logs = []
    with tempfile.TemporaryDirectory() as folder:
        for how in ("plain", "two at a time", "packed"):
            trainer = trainer_of(name, folder)
            if how == "packed":
                host.attach(trainer, pack=64)
            elif how == "two at a time":
                usual = trainer._get_per_token_logps_and_entropies
                trainer._get_per_token_logps_and_entropies = functools.partial(by_two, usual)
            trainer.train()
            logs.append([{k: row.get(k, 0.0) for k in ("loss", "grad_norm", "kl")}
                         for row in trainer.state.log_history[:-1]])  # fmt: skip
    return logs


def trained_by_ranks() -> list[list[float]]:
    """Losses on rows and on packs, of which each process makes another number."""
    from rlskip.hosts import trl as host

    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (None, 13 if int(os.environ["RANK"]) else 1000):
            trainer = trainer_of("GRPO", folder)
            if size is not None:
                host.attach(trainer, pack=size)
            trainer.train()
            losses.append([row["loss"] for row in trainer.state.log_history[:-1]])
    return losses


def recorded_on_packs(*order: str) -> list[int]:
    """How often log-probabilities were recorded and packs computed, attached in that order."""
    from rlskip import stages
    from rlskip.hosts import trl as host
    from rlskip.hosts import trl_packing

    recorded, packs = [], []
    usual = stages.record, trl_packing.packed_forward
    stages.record = lambda name, *_, **more: recorded.append(name)
    trl_packing.packed_forward = lambda *given: packs.append(given) or usual[1](*given)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of("GRPO", folder)
            recording = {"record": {"enable": True, "dump_dir": f"{folder}/records"}}
            how = {"record": {"config": recording}, "pack": {"pack": 64}}
            for name in order:
                host.attach(trainer, **how[name])
            trainer.train()
    finally:
        stages.record, trl_packing.packed_forward = usual
        stages.stop()
    return [recorded.count("log_probs"), len(packs)]


def by_two(usual: Any, *args: Any, batch_size: Any = None, **kwargs: Any) -> Any:
    return usual(*args[:4], 2, *args[5:], **kwargs)


def trained_with_dropout(name: str) -> str:
    from rlskip.hosts import trl as host

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(name, folder, dropout=0.1)
        try:
            host.attach(trainer, pack=64)
            trainer.train()
        except PackingError as error:
            return error.what
    return ""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = [globals()[name](*arguments) for name, *arguments in cases]
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[2]).write_text(json.dumps(results))
