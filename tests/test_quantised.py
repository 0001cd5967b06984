"""Quantised loading: torchao's int8 weights, which run on a CPU."""

import pytest
import torch
from conftest import KINDS, tokens
from transformers import AutoModelForCausalLM, TorchAoConfig

quantization = pytest.importorskip("torchao.quantization")

every_model = pytest.mark.parametrize("name", KINDS)


def load_int8(model, folder, kind="Int8WeightOnlyConfig"):
    model.save_pretrained(folder)
    config = TorchAoConfig(getattr(quantization, kind)())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@every_model
def test_the_weights_of_linear_maps_are_int8(name, tmp_path):
    """Embeddings, norms, head, routers and experts stay as they are, as in Transformers' own models."""
    model = load_int8(KINDS[name](), tmp_path)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            assert module.weight.qdata.dtype == torch.int8
            assert module.weight.qdata.shape == (module.out_features, module.in_features)
    assert model.lm_head.weight.dtype == model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@every_model
def test_int8_stays_close_to_float(name, kind, tmp_path):
    model = KINDS[name](embedding_initializer_range=1.0)  # that a layer must not drown
    with torch.no_grad():
        expected = model(tokens(2, 9)).logits
        logits = load_int8(model, tmp_path, kind)(tokens(2, 9)).logits
    assert 0 < (logits - expected).norm() < 0.05 * expected.norm()


@every_model
def test_int8_generates_with_a_cache_what_it_does_without(name, tmp_path):
    model = load_int8(KINDS[name](), tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False, "num_loops": 2}
    generated = model.generate(tokens(2, 9), **options)
    assert torch.equal(generated, model.generate(tokens(2, 9), use_cache=False, **options))


@every_model
def test_int8_is_saved_and_loaded(name, tmp_path):
    model = load_int8(KINDS[name](), tmp_path / "float")
    model.save_pretrained(tmp_path / "int8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert torch.equal(loaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


@every_model
def test_an_adapter_on_int8_weights_learns(name, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_int8(KINDS[name](), tmp_path)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens(2, 9), labels=tokens(2, 9)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
