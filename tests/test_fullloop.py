"""Full Loop: with one loop it is what its backbone is; with more it is that applied to its own state."""

import pytest
import torch
from conftest import BACKBONES, SIZES, SPARSE, fullloop, fullloop_config, tokens
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OlmoeConfig,
    StaticCache,
)

from asymloop_hf import FullLoopForCausalLM

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("tied", [False, True])
def test_one_loop_loads_a_llama_and_gives_its_logits_and_loss(tied):
    llama_config = LlamaConfig(num_hidden_layers=3, tie_word_embeddings=tied, attention_bias=True, **SIZES)
    llama = LlamaForCausalLM(llama_config).eval()
    model = FullLoopForCausalLM(fullloop_config(num_loops=1, tie_word_embeddings=tied, attention_bias=True)).eval()
    model.load_state_dict(llama.state_dict(), strict=True)
    input_ids = tokens(2, 13)
    outputs, expected = model(input_ids, labels=input_ids), llama(input_ids, labels=input_ids)
    torch.testing.assert_close(outputs.logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(outputs.loss, expected.loss, **TOLERANCE)


DENSE_CONFIGS = {
    "llama": LlamaConfig,
    "olmo": OlmoConfig,
    "olmo2": Olmo2Config,
    "olmoe": OlmoeConfig,
    "mixtral": MixtralConfig,
}


def same_model(name: str, **fields):
    """A model of Transformers' own class, and the Full Loop with one loop that loaded its weights."""
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    fields = {"rms_norm_eps": 1e-4, "rope_parameters": rope, **BACKBONES[name], **fields}
    model = FullLoopForCausalLM(fullloop_config(num_loops=1, **fields)).eval()
    own_fields = {field: value for field, value in fields.items() if field != "backbone"}
    config = DENSE_CONFIGS[name](num_hidden_layers=3, **SIZES, **own_fields)
    expected = AutoModelForCausalLM.from_config(config).eval()
    for parameter in expected.parameters():  # norms start at one, which would hide a mistake
        torch.nn.init.normal_(parameter, std=0.3)
    model.load_state_dict(expected.state_dict(), strict=True)
    return model, expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", DENSE_CONFIGS)
def test_one_loop_loads_each_backbone_and_gives_its_logits_and_loss(name, tied):
    model, expected = same_model(name, tie_word_embeddings=tied)
    attention_mask = torch.ones(2, 13, dtype=torch.long)
    attention_mask[0, :4] = 0
    for mask in (None, attention_mask):
        inputs = {"input_ids": tokens(2, 13), "labels": tokens(2, 13), "attention_mask": mask}
        outputs, expected_outputs = model(**inputs), expected(**inputs)
        torch.testing.assert_close(outputs.logits, expected_outputs.logits, **TOLERANCE)
        torch.testing.assert_close(outputs.loss, expected_outputs.loss, **TOLERANCE)


@pytest.mark.parametrize("name", ["olmo", "olmoe"])
def test_clipping_changes_the_logits(name):
    model, _ = same_model(name)
    unclipped, _ = same_model(name, clip_qkv=None)
    unclipped.load_state_dict(model.state_dict())
    difference = (model(tokens(1, 9)).logits - unclipped(tokens(1, 9)).logits).abs().max()
    assert difference > 1e-3


@pytest.mark.parametrize("coefficient", [0.5, 0.01])
@pytest.mark.parametrize("name", SPARSE)
def test_one_loop_gives_the_load_balancing_loss_of_each_sparse_model(name, coefficient):
    model, expected = same_model(name, router_aux_loss_coef=coefficient)
    attention_mask = torch.ones(2, 13, dtype=torch.long)
    attention_mask[0, :4] = 0
    for mask in (None, attention_mask):
        inputs = {"input_ids": tokens(2, 13), "labels": tokens(2, 13), "attention_mask": mask}
        outputs = model(**inputs, output_router_logits=True)
        expected_outputs = expected(**inputs, output_router_logits=True)
        torch.testing.assert_close(outputs.aux_loss, expected_outputs.aux_loss, **TOLERANCE)
        torch.testing.assert_close(outputs.loss, expected_outputs.loss, **TOLERANCE)
        for logits, expected_logits in zip(outputs.router_logits, expected_outputs.router_logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, **TOLERANCE)


@pytest.mark.parametrize("injection", ["none", "embedding"])
def test_loops_are_repeated_llama_layers(injection):
    model = fullloop(num_loops=3, input_injection=injection)
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SIZES)).eval()
    llama.load_state_dict(model.state_dict())
    llama.model.norm = torch.nn.Identity()
    input_ids = tokens(2, 13)
    embeds = state = model.get_input_embeddings()(input_ids)
    for loop in range(3):
        state = state + embeds if injection == "embedding" and loop > 0 else state
        state = llama.model(inputs_embeds=state).last_hidden_state
    expected = model.lm_head(model.model.norm(state))
    torch.testing.assert_close(model(input_ids).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("chunks", [(10,), (1,) * 10, (4, 1, 5)])
@pytest.mark.parametrize("new_cache", [lambda config: None, lambda config: DynamicCache(config=config), "static"])
def test_cached_equals_uncached(chunks, new_cache):
    model = fullloop(num_loops=3)
    cache = StaticCache(model.config, max_cache_len=12) if new_cache == "static" else new_cache(model.config)
    input_ids = tokens(2, 10)
    logits = []
    for chunk in input_ids.split(chunks, dim=1):
        outputs = model(chunk, cache=cache, use_cache=True)
        cache = outputs.get("cache", outputs.get("past_key_values"))
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(input_ids, use_cache=False).logits, **TOLERANCE)


@pytest.mark.parametrize("num_loops", [1, 4])
def test_generate_at_other_loop_counts(num_loops):
    model = fullloop()
    other = fullloop(num_loops=num_loops)
    other.load_state_dict(model.state_dict())
    prompt = tokens(2, 5)
    for cache_implementation in (None, "static"):
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache_implementation}
        options["disable_compile"] = True
        generated = model.generate(prompt, num_loops=num_loops, **options)
        assert generated.tolist() == other.generate(prompt, **options).tolist()


def test_a_cache_for_other_loops_is_refused():
    model = fullloop(num_loops=2)
    cache = DynamicCache(config=fullloop_config(num_loops=3))
    with pytest.raises(ValueError, match=r"cache=.* is not allowed: it must be made for 6 visits \(it has 9 slots\)"):
        model(tokens(1, 3), cache=cache)


def test_masks_and_positions_of_another_size_are_refused():
    model, input_ids = fullloop(), tokens(2, 8)
    for shape in ((2, 7), (2, 9), (1, 8), (8,)):
        with pytest.raises(ValueError, match=r"attention_mask.shape=.* is not allowed: it must be \(2, 8\)"):
            model(input_ids, attention_mask=torch.ones(shape))
    with pytest.raises(
        ValueError, match=r"position_ids.shape=\(1, 3\) is not allowed: it must be \(2, 8\) or \(1, 8\)"
    ):
        model(input_ids, position_ids=torch.arange(3)[None])


@pytest.mark.parametrize("num_loops", [0, -1, 1.5, True])
def test_num_loops_must_be_a_positive_integer(num_loops):
    with pytest.raises(ValueError, match="num_loops=.* is not allowed: it must be a positive integer"):
        fullloop()(tokens(1, 3), num_loops=num_loops)
