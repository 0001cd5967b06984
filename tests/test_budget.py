"""The budget equals what the built model has, computes and caches."""

import json

import pytest
import torch
from conftest import BACKBONES, asymloop, asymloop_config, fullloop, fullloop_config, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from asymloop_hf import AsymLoopCache, AsymLoopConfig
from asymloop_hf.budget import budget, load_config, matched_budgets
from asymloop_hf.cli import main

CONTEXT = 24
CONFIGS = {
    "asymloop": lambda: asymloop(),
    "asymloop, window of 1": lambda: asymloop(local_window=1),
    "asymloop, window of 5": lambda: asymloop(local_window=5, num_encoder_layers=3),
    "asymloop, window beyond the context": lambda: asymloop(local_window=60),
    "asymloop, tied": lambda: asymloop(tie_word_embeddings=True),
    "full loop": lambda: fullloop(),
    "sparse decoder": lambda: asymloop(num_experts=4, moe_stacks=["decoder"]),
    **{name: lambda name=name: asymloop(**BACKBONES[name]) for name in BACKBONES},
    **{f"full loop, {name}": lambda name=name: fullloop(**BACKBONES[name]) for name in BACKBONES},
}


def cache_bytes(cache) -> int:
    tensors = [tensor for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_built_model(name):
    model = CONFIGS[name]()
    costs = budget(model.config, CONTEXT, dtype=torch.float32)
    assert costs.parameters == sum(weight.numel() for weight in model.parameters())
    embeddings = model.get_input_embeddings().weight.numel()
    assert costs.embedding_parameters == (embeddings if model.config.tie_word_embeddings else 2 * embeddings)

    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    is_full_loop = model.config.model_type == "fullloop"
    cache = DynamicCache(config=model.config) if is_full_loop else AsymLoopCache(model.config)
    visits = []
    for layer_name, layer in model.named_modules():
        if layer_name.endswith(".mlp"):
            layer.register_forward_hook(lambda *args: visits.append(1))
    input_ids = tokens(1, CONTEXT)
    model(input_ids[:, :-1], cache=cache)
    visits.clear()
    with FlopCounterMode(display=False) as counter:
        model(input_ids[:, -1:], cache=cache)
    assert costs.effective_depth == len(visits)
    # Transformers before 5.19 makes the rotary angles with a matrix product.
    rotary = [sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    assert costs.flops_per_token == counter.get_total_flops() - sum(rotary)
    assert costs.kv_bytes_per_token * CONTEXT == pytest.approx(cache_bytes(cache))
    if not is_full_loop:
        lean = AsymLoopCache(model.config, local_kv="last_loop")
        model(input_ids, cache=lean)
        assert costs.kv_bytes_per_token_last_loop * CONTEXT == pytest.approx(cache_bytes(lean))


@torch.no_grad()
@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_the_active_parameters_are_those_without_the_experts_that_are_not_picked(name):
    config = asymloop_config(**BACKBONES[name])
    costs = budget(config)
    config.num_experts = config.num_experts_per_tok
    picked = budget(config)
    routers = config.hidden_size * 4  # of two encoder and two decoder layers, for each expert
    left_out = BACKBONES[name]["num_experts"] - config.num_experts
    assert costs.active_parameters == picked.parameters + left_out * routers
    assert picked.parameters == picked.active_parameters


@pytest.mark.parametrize("name", BACKBONES)
def test_matched_models_are_equal_in_total_and_in_a_token(name):
    asymloop_costs, fullloop_costs = matched_budgets(asymloop_config(**BACKBONES[name])).values()
    assert asymloop_costs.parameters == fullloop_costs.parameters
    assert asymloop_costs.active_parameters == fullloop_costs.active_parameters
    assert asymloop_costs.effective_depth == fullloop_costs.effective_depth


def test_the_windowed_cache_of_a_model_without_a_window_is_that_of_a_window_of_16():
    costs = budget(asymloop_config(), context=100)
    windowed = budget(asymloop_config(local_window=16), context=100)
    assert costs.kv_bytes_per_token_windowed == windowed.kv_bytes_per_token


def test_matched_models_differ_only_in_what_they_read_and_keep():
    asymloop_costs, fullloop_costs = matched_budgets(AsymLoopConfig.preset("60m", num_loops=5)).values()
    assert asymloop_costs.parameters == fullloop_costs.parameters
    assert asymloop_costs.effective_depth == fullloop_costs.effective_depth
    assert asymloop_costs.kv_bytes_per_token == fullloop_costs.kv_bytes_per_token
    read_twice = 4 * 1024 * 768 * 15  # the 15 decoder visits read 1,024 local keys of width 768 too
    assert asymloop_costs.flops_per_token == fullloop_costs.flops_per_token + read_twice


def test_the_claimed_saving_of_a_window():
    sizes = {"num_encoder_layers": 4, "num_decoder_layers": 4, "num_loops": 5, "local_window": 16}
    asymloop_costs, fullloop_costs = matched_budgets(asymloop_config(**sizes), context=4096).values()
    assert fullloop_costs.kv_bytes_per_token / asymloop_costs.kv_bytes_per_token > 5.5


def test_inspect_a_preset_and_a_checkpoint(tmp_path, capsys):
    assert main(["inspect", "60m"]) == 0
    table = capsys.readouterr().out
    assert "asymloop" in table and "fullloop" in table and "effective depth" in table
    asymloop_config(num_loops=2).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--json", "--context", "10"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["context"] == 10
    assert printed["asymloop"]["effective_depth"] == 6
    assert "fullloop" not in printed  # no whole number of loops matches
    fullloop_config().save_pretrained(tmp_path)
    assert list(matched_budgets(load_config(str(tmp_path)))) == ["fullloop"]


def test_inspect_a_preset_of_a_backbone(tmp_path, capsys):
    assert main(["inspect", "60m", "--backbone", "olmoe", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["asymloop"]
    assert 84_000_000 < costs["active_parameters"] < 85_000_000 < costs["parameters"]
    assert main(["inspect", "60m", "--backbone", "gpt2"]) == 2
    assert "backbone='gpt2' is not allowed" in capsys.readouterr().err
    asymloop_config().save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--backbone", "olmo"]) == 2
    assert "backbone='olmo' is not allowed with a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("context", [0, -5])
def test_context_must_be_positive(context, capsys):
    assert main(["inspect", "60m", "--context", str(context)]) == 2
    assert f"context={context} is not allowed: it must be a positive integer" in capsys.readouterr().err


def test_unknown_models(tmp_path, capsys):
    assert main(["inspect", "7b"]) == 2
    assert "'7b' is neither a preset (60m, 130m, 350m, 1b) nor a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert "model_type='gpt2' is not allowed" in capsys.readouterr().err
