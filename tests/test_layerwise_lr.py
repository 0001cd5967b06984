"""Layerwise rates under Trainer: groups, rates by hand, resuming, schedules, Muon, two processes, logs, bad input."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BACKBONES, asymloop, asymloop_config, tokens
from distributed_training import SETTINGS, has_fsdp2
from layerwise_runs import HEADS, SIZES, arguments, documents, group_states, llama, make_trainer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback

from asymloop_hf import AsymLoopForCausalLM
from asymloop_hf.heavy_tail import heavy_tail_alpha
from asymloop_hf.layer_groups import layer_groups
from asymloop_hf.layerwise_lr import HeavyTailLRCallback, rate_factors
from asymloop_hf.layerwise_table import read_table
from asymloop_hf.muon_adamw import MuonAdamW
from asymloop_hf.shared_spectra import shared_alphas

QUICK = {"every": 4, "ramp": 3, "until": 0.8}


def small_asymloop(**fields) -> AsymLoopForCausalLM:
    torch.manual_seed(0)
    return asymloop(hidden_size=64, intermediate_size=96, initializer_range=0.02, **fields).train()


MODELS = {"llama": llama, "asymloop": small_asymloop}


class Recorder(TrainerCallback):
    """Notes what each step of the optimizer is taken with: every group's rate, and the tensors of the sources."""

    def __init__(self):
        self.rates, self.weights, self.gradients, self.momenta = [], [], [], []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer.register_step_pre_hook(self.note)

    def note(self, optimizer, *_):
        matrices = {group["name"]: group["params"][0] for group in optimizer.param_groups if group["kind"] == "matrix"}
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        self.weights.append({name: weight.detach().clone() for name, weight in matrices.items()})
        self.gradients.append({name: weight.grad.clone() for name, weight in matrices.items()})
        moments = {name: optimizer.state.get(weight, {}) for name, weight in matrices.items()}
        self.momenta.append({name: state["exp_avg"].clone() for name, state in moments.items() if state})


def train(model, folder, llr=None, resume=None, **options) -> Trainer:
    trainer = make_trainer(model, folder, llr, **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def assert_same_weights(model, expected):
    for weight, expected_weight in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, expected_weight)


# The factors


def test_factors_by_hand():
    alphas = {"a": 2.0, "b": 3.0, "c": 4.0, "d": math.nan, "e": 2.5}
    assert rate_factors(alphas, 5) == {"a": 1, "b": 3, "c": 5, "d": 1, "e": 2}
    assert rate_factors(alphas, 5, reverse=True) == {"a": 5, "b": 3, "c": 1, "d": 1, "e": 4}
    root = rate_factors(alphas, 3, "sqrt")
    assert root["b"] == pytest.approx(1 + 2 * (3**0.5 - 2**0.5) / (2 - 2**0.5))
    logarithm = rate_factors(alphas, 3, "log2")
    assert logarithm["b"] == pytest.approx(1 + 2 * (math.log2(3) - 1))
    for factors in (root, logarithm):
        assert (factors["a"], factors["c"], factors["d"]) == (1, 3, 1)


@pytest.mark.parametrize("alphas", [{}, {"a": math.nan}, {"a": 2.5}, {"a": 2.5, "b": 2.5, "c": math.nan}])
@pytest.mark.parametrize("reverse", [False, True])
def test_without_a_difference_all_factors_are_one(alphas, reverse):
    assert rate_factors(alphas, 5, reverse=reverse) == dict.fromkeys(alphas, 1)


# The groups


@pytest.mark.parametrize("name", MODELS)
def test_groups(name):
    model = MODELS[name]()
    groups = layer_groups(model, 0.1, 5)
    by_name = {group["name"]: group for group in groups}
    assert {group["name"]: len(group["params"]) for group in groups if group["kind"] != "matrix"} == {
        "embeddings": 2,
        "norms": 1 + 2 * (2 if name == "llama" else 4),
    }
    layers = {n for n, weight in model.named_parameters() if weight.ndim == 2 and "layers" in n}
    assert {n for n, group in by_name.items() if group["kind"] == "matrix"} == layers
    for group in groups:
        assert group["factor"] == (5 if group["name"] == "embeddings" else 1)
    assert by_name["embeddings"]["params"][1] is model.lm_head.weight


class Odd(nn.Module):
    """One weight of each kind that a language model of another family may have."""

    def __init__(self):
        super().__init__()
        self.position_bias = nn.Embedding(40, 40)
        self.linear = nn.Linear(40, 40)
        self.query_norm = nn.RMSNorm(40)
        self.scale = nn.Parameter(torch.ones(40))
        self.experts = nn.Parameter(torch.randn(3, 40, 60))
        self.router = nn.Linear(40, 3, bias=False)
        self.convolution = nn.Conv2d(40, 40, 3, bias=False)


def test_kinds_of_weights():
    groups = {tuple(group["params"]): group for group in layer_groups(Odd(), 0.1, 5)}
    found = {(group["name"], group["kind"], len(parameters)) for parameters, group in groups.items()}
    assert found == {
        ("embeddings", "embeddings", 1),
        ("linear.weight", "matrix", 1),
        ("biases", "biases", 1),
        ("norms", "norms", 1),  # query_norm, which is not decayed
        ("norms", "norms", 1),  # scale, which is
        ("experts", "matrix", 1),
        ("router.weight", "small matrix", 1),
        ("convolution.weight", "small matrix", 1),
    }


@pytest.mark.parametrize("model", [llama, lambda: llama(attention_bias=True, mlp_bias=True), Odd])
def test_weight_decay_is_trainers(model, tmp_path):
    model = model()
    trainer = Trainer(model=model, args=arguments(tmp_path))
    expected = {
        id(p): group["weight_decay"] for group in trainer.create_optimizer().param_groups for p in group["params"]
    }
    groups = layer_groups(model, 0.1, 5)
    assert {id(p): group["weight_decay"] for group in groups for p in group["params"]} == expected
    assert 0.1 in expected.values()


def test_tied_weights_are_one_group_once():
    groups = layer_groups(llama(tie_word_embeddings=True), 0.1, 5)
    assert [len(group["params"]) for group in groups if group["name"] == "embeddings"] == [1]


def test_frozen_parameters_are_left_out():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    groups = layer_groups(model, 0.1, 5)
    assert not any(group["name"].startswith("model.layers.0") for group in groups)
    assert [len(group["params"]) for group in groups if group["name"] == "embeddings"] == [1]  # the head
    expected = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for group in groups for parameter in group["params"]} == expected


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA makes it."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(rank: int) -> LlamaForCausalLM:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, rank)
    return model


def test_adapters_of_a_rank_below_32_have_no_spectrum_to_speak_of(tmp_path):
    with pytest.raises(ValueError, match="model=LlamaForCausalLM has no trainable matrix with 32 rows and columns"):
        train(adapted(8), tmp_path, HeavyTailLRCallback(**QUICK))
    model = adapted(8)
    model.model.layers[1].mlp.requires_grad_(True)
    groups = {
        group["name"]: group for group in train(model, tmp_path, HeavyTailLRCallback(**QUICK)).optimizer.param_groups
    }
    assert groups["model.layers.0.self_attn.q_proj.lora_B.weight"]["factor"] == 1
    assert groups["model.layers.1.mlp.up_proj.weight"]["alpha"] > 1


def test_adapters_of_a_larger_rank_are_matrices(tmp_path):
    groups = train(adapted(32), tmp_path, HeavyTailLRCallback(**QUICK)).optimizer.param_groups
    assert len(groups) == 4 and all(group["alpha"] > 1 for group in groups)


def test_experts_have_the_mean_of_their_estimates():
    experts = torch.randn(3, 40, 60)
    experts[2] = 0
    mean = torch.stack([heavy_tail_alpha(experts[0]), heavy_tail_alpha(experts[1])]).mean().item()
    alphas = shared_alphas({"experts": experts, "none": None, "zero": torch.zeros(40, 40)})
    assert alphas["experts"] == pytest.approx(mean, rel=1e-12)
    assert math.isnan(alphas["none"]) and math.isnan(alphas["zero"])


# Training


def expected_rates(recorder, tensors, max_steps, scopes=("",), max_ratio=5):
    """Every matrix's rate at every step, from the settings `QUICK` and the tensors whose spectra are taken."""
    names = list(recorder.weights[0])
    factors, old, new, start, rates = dict.fromkeys(names, 1.0), {}, dict.fromkeys(names, 1.0), 0, []
    for step in range(max_steps):
        base = recorder.rates[step]["norms"]
        if step in (4, 8):  # every 4 steps, up to 0.8 of 12
            old, new, start = factors, dict.fromkeys(names, 1.0), step
            for scope in scopes:
                alphas = {n: heavy_tail_alpha(tensors[step][n]).item() for n in names if n.startswith(scope)}
                alphas = {n: alpha for n, alpha in alphas.items() if not math.isnan(alpha)}
                low, high = min(alphas.values()), max(alphas.values())
                new |= {n: 1 + (max_ratio - 1) * (alpha - low) / (high - low) for n, alpha in alphas.items()}
        share = min(1, (step - start + 1) / 3) if step >= 4 else 1
        factors = {n: new[n] * share + old.get(n, 1) * (1 - share) for n in names}
        rates.append(
            {n: base * factor for n, factor in factors.items()} | {"norms": base, "embeddings": base * max_ratio}
        )
    return rates


@pytest.mark.parametrize("source", ["weight", "gradient", "momentum"])
def test_the_rates_of_a_run_by_hand(source, tmp_path):
    recorder = Recorder()
    trainer = train(llama(), tmp_path, HeavyTailLRCallback(**QUICK, source=source), callbacks=[recorder])
    tensors = {"weight": recorder.weights, "gradient": recorder.gradients, "momentum": recorder.momenta}[source]
    for rates, expected in zip(recorder.rates, expected_rates(recorder, tensors, 12), strict=True):
        assert rates == pytest.approx(expected, rel=1e-12)
    assert len(recorder.rates) == 12 and max(group["factor"] for group in trainer.optimizer.param_groups) == 5
    last = {group["name"]: group["alpha"] for group in trainer.optimizer.param_groups if group["kind"] == "matrix"}
    assert str(last) == str({name: heavy_tail_alpha(tensor).item() for name, tensor in tensors[8].items()})


def test_the_rates_of_the_stacks_apart(tmp_path):
    recorder = Recorder()
    llr = HeavyTailLRCallback(**QUICK, max_ratio=3, scope="stack")
    train(small_asymloop(), tmp_path, llr, callbacks=[recorder])
    scopes = ("model.encoder", "model.decoder")
    expected = expected_rates(recorder, recorder.weights, 12, scopes, max_ratio=3)
    for rates, expected_step in zip(recorder.rates, expected, strict=True):
        assert rates == pytest.approx(expected_step, rel=1e-12)


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"bf16": True}, {"max_grad_norm": 0.0}])
def test_what_trainer_does_around_a_step_changes_nothing(options, tmp_path):
    recorder = Recorder()
    train(llama(), tmp_path, HeavyTailLRCallback(**QUICK), callbacks=[recorder], **options)
    for rates, expected in zip(recorder.rates, expected_rates(recorder, recorder.weights, 12), strict=True):
        assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("name", MODELS)
def test_a_ratio_of_one_is_trainers_adamw(name, optim, tmp_path):
    options = {"optim": optim, "adam_beta2": 0.95}
    plain = train(MODELS[name](), tmp_path / "plain", **options)
    layerwise = train(MODELS[name](), tmp_path / "layerwise", HeavyTailLRCallback(max_ratio=1, **QUICK), **options)
    assert_same_weights(layerwise.model, plain.model)
    assert layerwise.optimizer.param_groups[0]["fused"] is plain.optimizer.param_groups[0]["fused"]


SCHEDULES = {
    "cosine": {"lr_scheduler_type": "cosine"},
    "constant": {"lr_scheduler_type": "constant_with_warmup"},
    "wsd": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "eval_loss",
    },
}


def base_rates(trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_base_rate_is_the_schedules(name, tmp_path):
    options = {"save_steps": 5, **SCHEDULES[name]}
    plain = train(llama(), tmp_path / "plain", **options)
    layerwise = train(llama(), tmp_path / "whole", HeavyTailLRCallback(**QUICK), **options)
    resumed = train(
        llama(), tmp_path / "resumed", HeavyTailLRCallback(**QUICK), tmp_path / "whole" / "checkpoint-5", **options
    )
    assert base_rates(plain) == base_rates(layerwise) == base_rates(resumed)
    assert len(set(base_rates(plain))) > 1
    assert_same_weights(resumed.model, layerwise.model)
    state = torch.load(tmp_path / "whole" / "checkpoint-5" / "optimizer.pt", weights_only=True)
    plain_state = torch.load(tmp_path / "plain" / "checkpoint-5" / "optimizer.pt", weights_only=True)
    for key in ("lr", "initial_lr"):
        expected = {group.get(key) for group in plain_state["param_groups"]}
        assert {group.get(key) for group in state["param_groups"]} == expected


RESUMED = {
    "adamw": ({}, {}),
    "the gradient's spectrum": ({"source": "gradient"}, {}),
    "the momentum's spectrum": ({"source": "momentum"}, {}),
    "muon": ({}, {"optimizer": "muon"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_at_any_step_changes_nothing(name, tmp_path):
    settings, options = RESUMED[name]
    whole = train(llama(), tmp_path / "whole", HeavyTailLRCallback(**QUICK, **settings), save_steps=1, **options)
    table = read_table(tmp_path / "whole")
    for step in (1, 4, 5, 6, 8, 10) if name == "adamw" else (5, 8):
        folder, checkpoint = tmp_path / f"from-{step}", tmp_path / "whole" / f"checkpoint-{step}"
        torch.manual_seed(1)
        resumed = train(llama(), folder, HeavyTailLRCallback(**QUICK, **settings), checkpoint, save_steps=1, **options)
        assert_same_weights(resumed.model, whole.model)
        assert str(group_states(resumed.optimizer)) == str(group_states(whole.optimizer))  # nan equals nan
        assert str(read_table(folder)) == str(table) == str(read_table(folder / "checkpoint-12"))


def test_fused_experts(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES | HEADS, num_local_experts=4, num_experts_per_tok=2))
    trainer = make_trainer(model, tmp_path, HeavyTailLRCallback(**QUICK), "muon")
    trainer.train()
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    experts = groups["model.layers.1.mlp.experts.down_proj"]
    assert experts["params"][0].shape == (4, 64, 96)
    assert experts["alpha"] > 1 and not experts["muon"]
    assert groups["model.layers.1.mlp.gate.weight"]["kind"] == "small matrix"
    assert (
        groups["model.layers.1.mlp.gate.weight"]["muon"] and groups["model.layers.1.self_attn.q_proj.weight"]["muon"]
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_has_layerwise_rates(name, tmp_path):
    model = small_asymloop(**BACKBONES[name])
    trainer = make_trainer(model, tmp_path, HeavyTailLRCallback(scope="stack", **QUICK))
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    matrices = {group["name"]: group for group in groups if group["kind"] == "matrix"}
    for stack in ("encoder", "decoder"):
        of_stack = [group for matrix, group in matrices.items() if f".{stack}." in matrix]
        assert len(of_stack) == sum(
            parameter.ndim > 1 and ".gate." not in parameter_name
            for parameter_name, parameter in model.named_parameters()
            if f".{stack}." in parameter_name
        )
        assert all(group["alpha"] > 1 for group in of_stack)


def test_training_again_keeps_the_factors_until_the_next_update(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(llama(), tmp_path, HeavyTailLRCallback(**QUICK), callbacks=[recorder])
    trainer.train()
    factors = [group["factor"] for group in trainer.optimizer.param_groups]
    trainer.train()
    rates = recorder.rates[14]  # of the second step of the second training, whose steps are noted twice
    assert rates["norms"] == 5e-3
    assert list(rates.values()) == pytest.approx([5e-3 * factor for factor in factors], rel=1e-12)


def test_resuming_with_another_ratio(tmp_path):
    train(llama(), tmp_path / "whole", HeavyTailLRCallback(**QUICK), save_steps=6)
    other, checkpoint = HeavyTailLRCallback(**QUICK, max_ratio=2), tmp_path / "whole" / "checkpoint-6"
    resumed = train(llama(), tmp_path / "resumed", other, checkpoint)
    assert resumed.optimizer.param_groups[0]["factor"] == 2
    assert max(group["factor"] for group in resumed.optimizer.param_groups) == 2


# Muon


def test_muon_adamw_is_muon_and_adamw():
    model, apart = llama(), llama()
    groups = layer_groups(model, 0.1, 1)
    for group in groups:
        group["muon"] = group["kind"] == "matrix"
    together = MuonAdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    matrices = [weight for name, weight in apart.named_parameters() if weight.ndim == 2 and "layers" in name]
    embeddings = [apart.model.embed_tokens.weight, apart.lm_head.weight]
    norms = [weight for weight in apart.parameters() if weight.ndim == 1]
    rest = [{"params": embeddings, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    separate = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), eps=1e-8),
    ]
    for seed in range(3):
        for trained, optimizers in ((model, [together]), (apart, separate)):
            loss = trained(tokens(4, 12, seed), labels=tokens(4, 12, seed)).loss
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        together.load_state_dict(together.state_dict())
    assert_same_weights(model, apart)


def test_a_closure_of_muon_adamw_is_called_once_with_gradients():
    weights = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]
    groups = [{"params": [weight], "weight_decay": 0.0, "muon": weight.ndim == 2} for weight in weights]
    optimizer, losses = MuonAdamW(groups, lr=0.1), []

    def closure():
        losses.append(sum(weight.square().sum() for weight in weights))
        losses[-1].backward()
        return losses[-1]

    before = [weight.clone() for weight in weights]
    assert optimizer.step(closure) is losses[0] and len(losses) == 1
    assert not any(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_muon_learns(tmp_path):
    trainer = make_trainer(small_asymloop(), tmp_path, HeavyTailLRCallback(**QUICK), "muon", max_steps=20)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    uses_muon = {group["name"]: group["muon"] for group in trainer.optimizer.param_groups}
    assert uses_muon["model.decoder.layers.1.mlp.up_proj.weight"]
    assert not uses_muon["embeddings"] and not uses_muon["norms"]


# Two processes


def run_two_processes(mode: str, folder: Path) -> list[dict]:
    """What both processes of `distributed_training.py` leave."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("distributed_training.py")), mode, str(folder)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_agree_with_each_other_and_with_one(mode, tmp_path):
    if mode == "fsdp2" and not has_fsdp2():
        pytest.skip("this release of accelerate has no FSDP2")
    one = train(llama(), tmp_path / "one", HeavyTailLRCallback(**SETTINGS), max_steps=6)
    ranks = run_two_processes(mode, tmp_path)
    for rank in ranks:
        assert rank["whole"]["sharded"] == (mode == "fsdp2")
        assert rank["whole"]["spectra"] == 14 and rank["resumed"]["spectra"] == 7  # of 14 matrices, at steps 2 and 4
        assert rank["whole"]["complaint"].startswith("model.layers.1.self_attn.q_proj.weight has entries that are not")
        for run in (rank["whole"], rank["resumed"]):
            assert str(run["groups"]) == str(ranks[0]["whole"]["groups"])
            assert all(run["weights"][name].equal(w) for name, w in ranks[0]["whole"]["weights"].items())
    for group, expected in zip(ranks[0]["whole"]["groups"], group_states(one.optimizer), strict=True):
        assert (group["name"], group.keys()) == (expected["name"], expected.keys())
        assert group["factor"] == pytest.approx(expected["factor"], rel=1e-4)
        assert group.get("alpha", 0) == pytest.approx(expected.get("alpha", 0), rel=1e-4)
    for name, weight in one.model.named_parameters():
        torch.testing.assert_close(ranks[0]["whole"]["weights"][name], weight, rtol=0, atol=1e-4)
    assert [row[:2] for row in read_table(tmp_path / "whole")] == [row[:2] for row in read_table(tmp_path / "one")]


# What is seen of it


class Reporter(TrainerCallback):
    """Stands for TensorBoard and its like, which Trainer puts before the callbacks that it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def test_logs_and_table(tmp_path):
    reporter = Reporter()
    llr = HeavyTailLRCallback(**QUICK)
    trainer = train(llama(), tmp_path, llr, callbacks=[reporter], logging_steps=3, save_steps=6)
    with_alpha = {step: logs for step, logs in reporter.seen if any(key.startswith("alpha/") for key in logs)}
    assert list(with_alpha) == [6, 9]  # the first logs after the updates of steps 4 and 8
    updates = [entry for entry in trainer.state.log_history if any(key.startswith("alpha/") for key in entry)]
    assert [entry["step"] for entry in updates] == [4, 8]
    name = "model.layers.1.mlp.up_proj.weight"
    for entry, logs in zip(updates, with_alpha.values(), strict=True):
        for key in (f"alpha/{name}", f"rate/{name}"):
            assert entry[key] == logs[key]
    table = read_table(tmp_path)
    assert table == read_table(tmp_path / "checkpoint-12") and len(table) == 28
    assert table[:14] == read_table(tmp_path / "checkpoint-6")
    row = next(row for row in reversed(table) if row.layer == name)
    group = next(group for group in trainer.optimizer.param_groups if group["name"] == name)
    assert (row.step, row.alpha, row.rate) == (8, group["alpha"], group["ramp_to"] * row.base_rate)
    assert row.base_rate == updates[1]["learning_rate"]
    saved = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text(encoding="utf-8"))
    assert [entry for entry in saved["log_history"] if entry["step"] == 8 and f"alpha/{name}" in entry] == [updates[1]]


def test_layers_are_in_their_order(tmp_path):
    train(llama(num_hidden_layers=11), tmp_path, HeavyTailLRCallback(**QUICK), max_steps=6)
    layers = [int(row.layer.split(".")[2]) for row in read_table(tmp_path)]
    assert layers == sorted(layers) and layers[-1] == 10


def test_a_run_too_short_for_an_update_is_told_so(tmp_path, caplog):
    trainer = train(llama(), tmp_path, HeavyTailLRCallback(), max_steps=2)
    assert "every=100 and until=0.2 of 2 steps: there is no update of the layers' rates" in caplog.text
    assert [group["factor"] for group in trainer.optimizer.param_groups if group["kind"] == "matrix"] == [1] * 14
    assert not (tmp_path / "layerwise_lr.csv").exists()


# Bad input


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"max_ratio": 0.99}, "max_ratio=0.99 is not allowed: it must be a number of at least 1"),
        ({"max_ratio": math.inf}, "max_ratio=inf is not allowed: it must be a number of at least 1"),
        ({"max_ratio": "5"}, "max_ratio='5' is not allowed"),
        ({"every": 0}, "every=0 is not allowed: it must be a positive integer"),
        ({"every": 2.5}, "every=2.5 is not allowed: it must be a positive integer"),
        ({"every": 10}, "ramp=50 is not allowed: it must be an integer from 0 to every=10"),
        ({"ramp": -1}, "ramp=-1 is not allowed: it must be an integer from 0 to every=100"),
        ({"ramp": 0.5}, "ramp=0.5 is not allowed: it must be an integer from 0 to every=100"),
        ({"until": -0.1}, "until=-0.1 is not allowed: it must be a number from 0 to 1"),
        ({"until": 1.1}, "until=1.1 is not allowed: it must be a number from 0 to 1"),
        ({"until": math.nan}, "until=nan is not allowed: it must be a number from 0 to 1"),
        (
            {"source": "weights"},
            "source='weights' is not allowed: it must be one of .*'weight', 'gradient', 'momentum'",
        ),
        ({"map": "log"}, "map='log' is not allowed: it must be one of .*'linear', 'sqrt', 'log2'"),
        ({"scope": "layer"}, "scope='layer' is not allowed: it must be one of .*'model', 'stack'"),
        ({"reverse": 1}, "reverse=1 is not allowed: it must be True or False"),
    ],
)
def test_bad_settings(settings, problem):
    with pytest.raises(ValueError, match=problem):
        HeavyTailLRCallback(**settings)


@pytest.mark.parametrize("ramp", [0, 1])
def test_without_a_ramp_the_rates_change_at_once(ramp, tmp_path):
    trainer = train(llama(), tmp_path, HeavyTailLRCallback(every=4, ramp=ramp, until=1.0), max_steps=5)
    for group in trainer.optimizer.param_groups:
        assert group["factor"] == group.get("ramp_to", group["factor"])
    assert max(group["factor"] for group in trainer.optimizer.param_groups if group["kind"] == "matrix") == 5


def test_bad_optimizers(tmp_path):
    llr = HeavyTailLRCallback()
    with pytest.raises(ValueError, match="name='sgd' is not allowed: it must be one of .*'adamw', 'muon'"):
        llr.optimizer(arguments(tmp_path), "sgd")
    with pytest.raises(ValueError, match="optim='adafactor' is not allowed: it must be one of .*'adamw_torch'"):
        llr.optimizer(arguments(tmp_path, optim="adafactor"))
    with pytest.raises(
        ValueError, match="source='gradient' is not allowed: it must be 'weight' or 'momentum' with fp16"
    ):
        HeavyTailLRCallback(source="gradient").optimizer(arguments(tmp_path, fp16=True))
    args = arguments(tmp_path)
    args.deepspeed, args.deepspeed_plugin = "zero2.json", object()
    with pytest.raises(ValueError, match="deepspeed='zero2.json' is not allowed: it must be None"):
        llr.optimizer(args)


def test_an_optimizer_that_trainer_was_also_given(tmp_path):
    llr, model, args = HeavyTailLRCallback(), llama(), arguments(tmp_path)
    own = (torch.optim.AdamW(model.parameters()), None)
    with pytest.raises(RuntimeError, match="Passing both `optimizers` and `optimizer_cls_and_kwargs`"):
        Trainer(model=model, args=args, optimizers=own, optimizer_cls_and_kwargs=llr.optimizer(args), callbacks=[llr])
    trainer = Trainer(model=model, args=args, optimizers=own, callbacks=[llr], train_dataset=documents())
    with pytest.raises(ValueError, match="optimizer='AdamW' is not allowed: it must be the one of this callback"):
        trainer.train()


def test_a_callback_that_trainer_was_not_given(tmp_path):
    args = arguments(tmp_path)
    optimizer = HeavyTailLRCallback().optimizer(args)
    trainer = Trainer(model=llama(), args=args, optimizer_cls_and_kwargs=optimizer, train_dataset=documents())
    with pytest.raises(ValueError, match="callbacks=.* must have the HeavyTailLRCallback that made the optimizer"):
        trainer.train()


def test_a_model_without_matrices(tmp_path):
    small = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=24, num_attention_heads=4))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no trainable matrix with 32 rows and columns or more"):
        train(small, tmp_path, HeavyTailLRCallback())


def test_stacks_that_a_model_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="scope='stack' is not allowed: it must be 'model' for LlamaForCausalLM"):
        train(llama(), tmp_path, HeavyTailLRCallback(scope="stack"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(value, tmp_path):
    class Spoiler(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                model.model.layers[1].mlp.gate_proj.weight.data[3, 5] = value

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            assert state.global_step <= 4

    with pytest.raises(ValueError, match="model.layers.1.mlp.gate_proj.weight has entries that are not finite"):
        train(llama(), tmp_path, HeavyTailLRCallback(**QUICK), callbacks=[Spoiler()])


def test_the_small_models_of_the_other_tests_have_matrices_too():
    kinds = {group["kind"] for group in layer_groups(AsymLoopForCausalLM(asymloop_config()), 0.1, 5)}
    assert kinds == {"matrix", "small matrix", "embeddings", "norms"}


def test_biases_of_experts_convolutions_and_position_embeddings_are_no_matrices():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.experts_bias = nn.Parameter(torch.randn(40, 64))
            self.position_embeddings = nn.Parameter(torch.randn(1, 65, 64))
            self.conv = nn.Conv1d(64, 64, 33)

    kinds = {group["name"]: group["kind"] for group in layer_groups(Model(), 0.1, 5)}
    assert kinds.pop("linear.weight") == "matrix"
    assert set(kinds.values()) == {"biases", "small matrix"}
    assert kinds["conv.weight"] == kinds["position_embeddings"] == "small matrix"


def test_a_callback_that_an_earlier_trainer_had_is_missed_too(tmp_path):
    llr = HeavyTailLRCallback(every=2, ramp=1, until=1.0)
    make_trainer(llama(), tmp_path / "first", llr, max_steps=3).train()
    args = arguments(tmp_path / "second", max_steps=3)
    trainer = Trainer(
        model=llama(), args=args, train_dataset=documents(), optimizer_cls_and_kwargs=llr.optimizer(args)
    )
    with pytest.raises(ValueError, match="callbacks="):
        trainer.train()


def test_a_ramp_is_not_gone_through_again_when_train_is_called_again(tmp_path):
    llr = HeavyTailLRCallback(max_ratio=4, every=4, ramp=4, until=1.0)
    trainer = make_trainer(llama(), tmp_path, llr, max_steps=6)
    trainer.train()
    trainer.args.max_steps = 3
    factors = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            factors.append([group["factor"] for group in optimizer.param_groups])

    trainer.add_callback(Recorder())
    trainer.train()
    assert factors[0] == factors[1] == factors[2]


def test_a_subclass_goes_ahead_of_the_reporters_too(tmp_path):
    class Quiet(HeavyTailLRCallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)

    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.extend(key for key in logs if key.startswith("alpha/"))

    make_trainer(llama(), tmp_path, Quiet(every=2, ramp=1, until=1.0), callbacks=[Reporter()], max_steps=5).train()
    assert seen
