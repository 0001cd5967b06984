"""Models by name: what is matched, and what a name may say."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from asymloop_hf import FullLoopForCausalLM
from asymloop_hf.budget import budget
from asymloop_hf.model_variants import parse_variant
from asymloop_hf.sizes import SIZES

every_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@every_size
def test_the_two_looped_models_are_matched(size):
    asymloop, full_loop = (parse_variant(name).config(size) for name in ("asymloop", "full_loop"))
    assert full_loop.to_dict() == asymloop.matched_full_loop().to_dict()
    assert budget(asymloop).parameters == budget(full_loop).parameters
    assert asymloop.num_hidden_layers == full_loop.num_hidden_layers


@every_size
def test_llama_is_as_deep_and_not_looped(size):
    llama = parse_variant("llama").config(size)
    assert llama.num_loops == 1
    assert llama.num_hidden_layers == parse_variant("asymloop").config(size).num_hidden_layers


def test_llama_is_transformers_llama():
    config = parse_variant("llama").config(SIZES["tiny"])
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    dense = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in fields}))
    assert dense.num_parameters() == FullLoopForCausalLM(config).num_parameters()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("asymloop+window", {"local_window": 16}),
        ("asymloop+window=1", {"local_window": 1}),
        ("asymloop+window=None", {"local_window": None}),
        ("asymloop+num_loops=5+decoder_init=embedding", {"num_loops": 5, "decoder_init": "embedding"}),
        ("asymloop+llr+embedding_initializer_range=0.3", {"embedding_initializer_range": 0.3}),
        ("full_loop+num_loops=3+input_injection=none", {"num_loops": 3, "input_injection": "none"}),
        ("llama+num_layers=12", {"num_layers": 12}),
    ],
)
def test_a_name_sets_fields(name, fields):
    variant = parse_variant(name)
    config = variant.config(SIZES["tiny"])
    assert {field: getattr(config, field) for field in fields} == fields
    assert variant.layerwise_lr == ("llr" in name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("huginn", "'huginn' is not allowed: it must start with one of asymloop, full_loop, llama"),
        ("", "'' is not allowed"),
        ("asymloop+", "'' in 'asymloop[+]' is not allowed"),
        ("asymloop+wide", "'wide' in 'asymloop[+]wide' is not allowed: it must be llr, window"),
        ("asymloop+num_layers=3", "'num_layers=3' in .* with a field of AsymLoopConfig"),
        ("full_loop+window", "'window' in 'full_loop[+]window' is not allowed: it must be llr or FIELD=VALUE"),
        (
            "asymloop+dtype=half",
            "'dtype=half' in .* with a field of AsymLoopConfig that is of the model, not of the data",
        ),
        ("llama+vocab_size=512", "'vocab_size=512' in"),
        ("asymloop+num_loops=", "'num_loops=' in"),
        ("asymloop+num_loops=2+num_loops=3", "'num_loops=3' in .* once each"),
        ("asymloop+llr+llr", "'llr' in"),
    ],
)
def test_names_that_are_not_allowed(name, message):
    with pytest.raises(ValueError, match=message):
        parse_variant(name)


def test_values_that_a_configuration_does_not_allow():
    with pytest.raises(ValueError, match="local_window=0"):
        parse_variant("asymloop+window=0").config(SIZES["tiny"])
