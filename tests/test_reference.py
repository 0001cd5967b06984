"""AsymLoop equals the plain float64 reference, in its logits and in the gradient of every weight."""

import random

import pytest
import torch
from conftest import BACKBONES, SPARSE, asymloop, tokens
from reference import Reference

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def random_fields(seed: int) -> dict:
    draw = random.Random(seed)
    num_encoder_layers, num_decoder_layers = draw.randint(1, 4), draw.randint(1, 3)
    num_key_value_heads = draw.choice([1, 2, 4])
    chosen_kv = [draw.randrange(num_encoder_layers) for _ in range(num_decoder_layers)]
    return {
        "num_encoder_layers": num_encoder_layers,
        "num_decoder_layers": num_decoder_layers,
        "num_loops": draw.randint(1, 4),
        "global_kv_layers": draw.choice([None, chosen_kv]),
        "decoder_init": draw.choice(["encoder", "embedding"]),
        "input_injection": draw.choice(["none", "state", "embedding"]),
        "local_window": draw.choice([None, 1, 2, 3, 7, 50]),
        "num_attention_heads": num_key_value_heads * draw.choice([1, 2]),
        "num_key_value_heads": num_key_value_heads,
        "head_dim": draw.choice([4, 8]),
        "hidden_size": draw.choice([16, 24]),
        "intermediate_size": draw.choice([20, 32]),
        "tie_word_embeddings": draw.random() < 0.3,
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])},
    }


def random_fields_of(name: str, seed: int) -> dict:
    """Random fields that a backbone allows."""
    draw = random.Random(f"{name} {seed}")
    fields = {**random_fields(seed), "mlp_bias": False, **BACKBONES[name]}
    if "clip_qkv" in fields:
        fields["clip_qkv"] = draw.choice([None, 0.5, 2.0])
    if name == "olmoe":
        fields["hidden_size"] = fields["num_attention_heads"] * fields["head_dim"]
    if name in SPARSE:
        fields["num_experts"] = draw.randint(2, 6)
        fields["num_experts_per_tok"] = draw.randint(1, fields["num_experts"])
        fields["norm_topk_prob"] = draw.choice([True, False])
        fields["moe_stacks"] = draw.choice([["encoder", "decoder"], ["decoder"], ["encoder"]])
    return fields


def weights_of(model):
    return {name: weight.detach().clone().requires_grad_() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(120))
def test_logits_and_gradients(seed, attn_implementation):
    check_logits_and_gradients(asymloop(attn_implementation, **random_fields(seed)), seed)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name in BACKBONES if name != "llama"])
def test_logits_and_gradients_of_each_backbone(name, seed, attn_implementation):
    check_logits_and_gradients(asymloop(attn_implementation, **random_fields_of(name, seed)), seed)


def check_logits_and_gradients(model, seed):
    for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    input_ids = tokens(2, 11, seed)
    reference_weights = weights_of(model)

    logits = model(input_ids).logits
    expected = Reference(model.config, reference_weights).logits(input_ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)

    cotangent = torch.randn_like(logits)
    logits.backward(cotangent)
    expected.backward(cotangent)
    for name, parameter in model.named_parameters():
        expected_grad = reference_weights[name].grad
        if name == "model.embed_tokens.weight" and model.config.tie_word_embeddings:
            head_grad = reference_weights["lm_head.weight"].grad
            expected_grad = expected_grad if head_grad is None else expected_grad + head_grad
        if expected_grad is None:  # layers whose KV nobody reads, under decoder_init="embedding"
            assert parameter.grad is None or not parameter.grad.any()
        elif parameter.grad is None:  # the router, where it picks all of one expert
            assert not expected_grad.any()
        elif name == "model.embed_tokens.weight":  # PyTorch keeps the padding row at zero gradient
            torch.testing.assert_close(parameter.grad[1:], expected_grad[1:], **TOLERANCE)
        else:
            torch.testing.assert_close(parameter.grad, expected_grad, **TOLERANCE)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
@pytest.mark.parametrize("name", BACKBONES)
def test_more_and_fewer_loops_than_trained(name, num_loops):
    model = asymloop(local_window=4, **BACKBONES[name])
    input_ids = tokens(2, 9)
    expected = Reference(model.config, weights_of(model)).logits(input_ids, num_loops=num_loops)
    torch.testing.assert_close(model(input_ids, num_loops=num_loops).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("local_window", [None, 1, 3])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", BACKBONES)
def test_packed_documents_do_not_see_each_other(name, local_window, attn_implementation):
    model = asymloop(attn_implementation, local_window=local_window, **BACKBONES[name])
    documents = [tokens(1, length, seed=length) for length in (5, 1, 8)]
    packed = torch.cat(documents, 1)
    position_ids = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    logits = model(packed, position_ids=position_ids).logits
    alone = torch.cat([model(document).logits for document in documents], 1)
    torch.testing.assert_close(logits, alone, **TOLERANCE)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("local_window", [None, 1, 3])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", BACKBONES)
def test_padding_changes_nothing(name, padding_side, local_window, attn_implementation):
    model = asymloop(attn_implementation, local_window=local_window, **BACKBONES[name])
    short, long = tokens(1, 6), tokens(1, 10, seed=1)
    padding = torch.zeros(1, 4, dtype=torch.long)
    row = torch.cat([padding, short] if padding_side == "left" else [short, padding], 1)
    input_ids = torch.cat([row, long])
    attention_mask = (input_ids != 0).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
    torch.testing.assert_close(logits[:1][row.bool()], model(short).logits[0], **TOLERANCE)
    torch.testing.assert_close(logits[1:], model(long).logits, **TOLERANCE)


def test_eager_returns_the_weights_over_global_and_local_keys():
    model = asymloop("eager", local_window=3)
    input_ids = tokens(2, 7)
    outputs = model(input_ids, output_attentions=True, output_hidden_states=True)
    num_visits = model.config.num_hidden_layers
    assert [weights.shape[-1] for weights in outputs.attentions] == [7] * 2 + [14] * (num_visits - 2)
    assert len(outputs.hidden_states) == num_visits + 1
    for weights in outputs.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    local = outputs.attentions[-1][..., 7:]
    assert not local.tril(-3).any() and not local.triu(1).any()


def test_rope_scaling_reaches_both_stacks():
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = asymloop(rope_parameters=scaled)
    plain = asymloop()
    plain.load_state_dict(model.state_dict())
    input_ids = tokens(1, 9)
    quarter_positions = torch.arange(9)[None] / 4
    expected = Reference(plain.config, weights_of(plain)).logits(input_ids, position_ids=quarter_positions)
    torch.testing.assert_close(model(input_ids).logits, expected, **TOLERANCE)
