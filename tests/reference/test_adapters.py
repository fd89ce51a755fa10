"""LoRA adapters against `transformers` with the changes merged into its weights: several in one step, on both op sets, and bad files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import difference, make_tiny, oracle_logits, token_ids
from tradewind.config.adapter_files import AdapterError, by_key, look_at
from tradewind.config.goals import AdapterRoom
from tradewind.config.ledger_adapters import bank_bytes
from tradewind.contract.errors import UserError
from tradewind.layers.adapters import Adapters
from tradewind.models.registry import FAMILIES
from tradewind.quantization.numerics import Numerics
from tradewind.weights.adapters import read_adapter

TOLERANCE = 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYTHING = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "deepseek_v2_lite": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gemma3": EVERYTHING,
    "gpt_oss": ATTENTION,
    "granite_biases": EVERYTHING,
    "llama3": EVERYTHING,
    "llama4": EVERYTHING,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2": EVERYTHING,
    "qwen3_moe": ATTENTION,
}


def write_adapter(folder: Path, oracle: Any, *, targets: tuple[str, ...], seed: int, rank: int, **config: Any) -> Any:
    """A random adapter of matrices that end in `targets`; returns a copy of the oracle with it merged."""
    torch.manual_seed(seed)
    alpha = 2.0 * rank
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    changed, tensors = copy.deepcopy(oracle), {}
    for name, module in changed.named_modules():
        if not name.endswith(targets) or not isinstance(module, torch.nn.Linear):
            continue
        n, k = module.weight.shape
        a, b = torch.randn(rank, k) * k**-0.5, torch.randn(n, rank) * (0.5 * rank**-0.5 / scale)
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
        with torch.no_grad():
            module.weight += scale * b @ a
    assert tensors, targets
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), **config})
    )
    return changed


@dataclass(frozen=True)
class Tiny:
    """A tiny model, three adapters of it, and what it says with each to one text; the last is what it says without."""

    name: str
    folder: Path
    adapters: list[Path]
    ids: list[int]
    wanted: list[np.ndarray]


@pytest.fixture(scope="module", params=sorted(TARGETS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder, ids = tmp_path_factory.mktemp(request.param), token_ids(count=70)
    oracle, targets = make_tiny(request.param, folder), TARGETS[request.param]
    folders, wanted = [], []
    for seed, (rank, some, config) in enumerate(
        ((4, targets, {}), (16, targets[:1], {"use_rslora": True}), (9, targets[-1:], {}))
    ):
        folders.append(folder / f"adapter{seed}")
        merged = write_adapter(folders[-1], oracle, targets=some, seed=seed, rank=rank, **config)
        wanted.append(oracle_logits(merged, ids))
    return Tiny(request.param, folder, folders, ids, [*wanted, oracle_logits(oracle, ids)])


@pytest.fixture(params=OP_SETS)
def driver(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Driver]:
    ops = open_ops(request.param)
    adapters = Adapters(ops, slots=4, rank=16)
    model, card = load(tiny.folder, ops, adapters=adapters)
    for slot, folder in enumerate(tiny.adapters):
        changes = read_adapter(look_at(folder), family=FAMILIES[card.family], card=card)
        adapters.check(changes)
        adapters.put(slot, changes)
    driver = Driver(model, card=card, ops=ops)
    driver.adapter_of = {0: 0, 1: 1, 2: 2}  # sequence 3 has none
    yield driver
    getattr(ops, "close", lambda: None)()


def test_adapters_beside_each_other(tiny: Tiny, driver: Driver) -> None:
    """Four texts in each step, each with its own adapter or none: whole, in pieces, token by token, in changing order."""
    got: dict[int, list[np.ndarray]] = {k: [] for k in range(4)}
    for turn, (first, last) in enumerate(((0, 33), (33, 50), (50, 51), (51, 52), (52, 70))):
        order = np.random.default_rng(turn).permutation(4).tolist()
        for k, logits in zip(order, driver.step([(k, tiny.ids[first:last]) for k in order]), strict=True):
            got[k].append(logits)
        ends = np.stack([got[k][-1][-1] for k in order])
        assert difference(driver.ends(), ends) < TOLERANCE, "where the last layer ends for these tokens alone"
    for k in range(4):
        assert difference(np.concatenate(got[k]), tiny.wanted[k]) < TOLERANCE, k
    spread = [np.abs(tiny.wanted[k] - tiny.wanted[3]).mean() / tiny.wanted[3].std() for k in range(3)]
    assert min(spread) > 0.05, "the adapters were to say something else than the model"


@pytest.mark.parametrize("exact", [True, False])
def test_the_ledger_knows_the_banks(tiny: Tiny, exact: bool) -> None:
    """To the byte, for every family."""
    ops = open_ops("cpu")
    adapters = Adapters(ops, slots=3, rank=20, exact=exact)
    _, card = load(tiny.folder, ops, adapters=adapters)
    assert adapters.nbytes == bank_bytes(card, AdapterRoom(slots=3, rank=20), exact=exact)
    ops.close()  # type: ignore[attr-defined]


def test_a_slot_takes_another_adapter(tiny: Tiny) -> None:
    """What was in a slot is gone wholly, also where the new adapter changes fewer matrices."""
    ops = open_ops("cpu")
    adapters = Adapters(ops, slots=1, rank=16)
    model, card = load(tiny.folder, ops, adapters=adapters)
    driver = Driver(model, card=card, ops=ops)
    driver.adapter_of = dict.fromkeys(range(9), 0)
    for sequence, which in enumerate((0, 1, 2, 0)):
        adapters.put(0, read_adapter(look_at(tiny.adapters[which]), family=FAMILIES[card.family], card=card))
        assert difference(driver.step([(sequence, tiny.ids)])[0], tiny.wanted[which]) < TOLERANCE
    adapters.put(0, {})
    assert difference(driver.step([(8, tiny.ids)])[0], tiny.wanted[3]) < TOLERANCE
    ops.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_stay_exact_over_quantised_weights(tmp_path: Path, quantization: Any) -> None:
    """An adapter that undoes nothing: the change of logits that it makes is the same over rounded weights, nearly."""
    oracle = make_tiny("llama3", tmp_path)
    merged, ids = write_adapter(tmp_path / "a", oracle, targets=("lm_head",), seed=0, rank=4), token_ids(count=20)
    del merged
    ops = open_ops("cpu", activation_terms=2)
    adapters = Adapters(ops, slots=2, rank=16)
    model, card = load(tmp_path, ops, numerics=Numerics(compute="int8", quantization=quantization), adapters=adapters)
    with pytest.raises(UserError, match=r"changes head.weight, which cannot be changed"):
        adapters.check(read_adapter(look_at(tmp_path / "a"), family=FAMILIES["llama"], card=card))
    write_adapter(tmp_path / "b", oracle, targets=EVERYTHING, seed=1, rank=4)
    changes = read_adapter(look_at(tmp_path / "b"), family=FAMILIES["llama"], card=card)
    adapters.put(1, changes)
    driver = Driver(model, card=card, ops=ops)
    driver.adapter_of = {1: 1, 2: 0}
    plain, changed, empty = (driver.step([(k, ids)])[0] for k in (0, 1, 2))
    assert np.array_equal(plain, empty)
    assert np.abs(changed - plain).mean() / plain.std() > 0.05
    ops.close()  # type: ignore[attr-defined]


def test_what_an_adapter_must_not_say(tmp_path: Path) -> None:
    oracle = make_tiny("llama3", tmp_path)
    folder = tmp_path / "a"
    write_adapter(folder, oracle, targets=("q_proj",), seed=0, rank=4)
    _, card = load(tmp_path, open_ops("plain"))
    config = json.loads((folder / "adapter_config.json").read_text())

    def read(change: dict[str, Any]) -> Any:
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
        return read_adapter(look_at(folder), family=FAMILIES["llama"], card=card)

    assert len(read({})) == 3
    for change, message in (
        ({"bias": "all"}, "bias is 'all'; it must be \"none\""),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; it must be \"LORA\""),
        ({"use_dora": True}, "use_dora is True; it must be false"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
        ({"r": 0}, "r is 0; it must be a whole number from 1"),
    ):
        with pytest.raises(AdapterError, match=message):
            read(change)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.zeros(4, 64), torch.zeros(64, 4)
    for tensors, message in (
        ({f"{at}.lora_A.weight": a}, "needs lora_A and lora_B"),
        ({f"{at}.lora_embedding_A": a}, "is no half of a low-rank change"),
        ({"x.lora_A.weight": a, "x.lora_B.weight": b}, "changes 'x', which a llama model does not have"),
        ({}, "changes nothing"),
    ):
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=message):
            read({})
    ops = open_ops("plain")
    adapters = Adapters(ops, slots=1, rank=3)
    load(tmp_path, ops, adapters=adapters)
    place = "layers.0.attention.q.weight"
    for change, message in (
        ({place: (np.zeros((4, 64), np.float32), np.zeros((64, 4), np.float32))}, "has rank 4; the largest .* is 3"),
        ({place: (np.zeros((2, 60), np.float32), np.zeros((64, 2), np.float32))}, r"the matrix is \(64, 64\)"),
    ):
        with pytest.raises(UserError, match=message):
            adapters.check(change)


def test_the_version_follows_the_files(tmp_path: Path) -> None:
    oracle = make_tiny("llama3", tmp_path)
    folder = tmp_path / "a@b"
    write_adapter(folder, oracle, targets=("q_proj",), seed=0, rank=4)
    first = look_at(folder)
    assert by_key(first.key) == first == look_at(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3}))
    assert look_at(folder).version != first.version
    with pytest.raises(AdapterError, match="have changed since it was loaded"):
        by_key(first.key)
    with pytest.raises(AdapterError, match=r"is no adapter: adapter_config.json cannot be read"):
        look_at(tmp_path / "nothing")
