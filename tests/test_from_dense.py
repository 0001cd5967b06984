"""`from_dense`: what is copied is the dense model's, to the last bit; what was done is said; the rest is refused."""

import logging

import pytest
import torch
from conftest import SIZES, tokens
from small_corpus import make_documents
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
)

from asymloop_hf import AsymLoopForCausalLM
from asymloop_hf.tokenizer import train_tokenizer

EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
CONFIGS = {
    "llama": lambda **fields: LlamaConfig(attention_bias=True, mlp_bias=True, head_dim=12, **fields),
    "mistral": lambda **fields: MistralConfig(sliding_window=None, **fields),
    "qwen2": lambda **fields: Qwen2Config(**fields),
    "mixtral": lambda **fields: MixtralConfig(num_local_experts=4, **EXPERTS, **fields),
    "olmo": lambda **fields: OlmoConfig(clip_qkv=0.5, **fields),
    "olmo2": lambda **fields: Olmo2Config(**fields),
    "olmoe": lambda **fields: OlmoeConfig(num_experts=5, clip_qkv=0.7, **EXPERTS, **fields),
}


def dense(name: str, **fields):
    """A dense model of four layers in which no weight is what it starts as."""
    config = CONFIGS[name](**{**SIZES, "num_hidden_layers": 4, "rope_parameters": dict(ROPE), **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_layers_as_encoder_and_a_silent_decoder_give_the_logits_of_the_dense_model(name, tied):
    model = dense(name, tie_word_embeddings=tied)
    ours = AsymLoopForCausalLM.from_dense(model, encoder_from=range(4), num_decoder_layers=2, silent_decoder=True)
    input_ids = tokens(2, 12)
    attention_mask = torch.ones(2, 12, dtype=torch.long)
    attention_mask[0, :5] = 0
    for mask in (None, attention_mask):
        assert torch.equal(ours(input_ids, mask).logits, model(input_ids, mask).logits)
    assert torch.equal(ours(input_ids, num_loops=1).logits, model(input_ids).logits)
    assert not ours.training


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_go_where_they_are_asked_to(name):
    model = dense(name)
    ours, info = AsymLoopForCausalLM.from_dense(
        model, encoder_from=[1, 1, 0], decoder_from=[3], num_loops=2, local_window=4, output_loading_info=True
    )
    config = ours.config
    assert (config.num_encoder_layers, config.num_decoder_layers, config.num_loops, config.local_window) == (
        3,
        1,
        2,
        4,
    )
    assert config.input_injection == "none"
    stacks = {**dict(enumerate(ours.model.encoder.layers)), 3: ours.model.decoder.layers[0]}
    for position, source in enumerate([1, 1, 0, 3]):
        theirs = dict(model.model.layers[source].named_parameters())
        for weight_name, weight in stacks[position].named_parameters():
            if weight_name in theirs:
                assert torch.equal(weight, theirs[weight_name])
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)
    theirs, mine = model.state_dict(), ours.state_dict()
    assert info["dropped"] == sorted(key for key in theirs if key.startswith("model.layers.2."))
    assert info["copied"].keys() | set(info["new"]) == mine.keys()
    for our_name, their_name in info["copied"].items():
        assert torch.equal(mine[our_name], theirs[their_name])
    new = ["self_attn.o_proj.bias"] if name == "qwen2" else []
    assert {key.split(".layers.")[1].split(".", 1)[1] for key in info["new"]} == set(new)
    assert not any(mine[key].any() for key in info["new"])
    ours(tokens(1, 5), labels=tokens(1, 5)).loss.isfinite()


def test_by_default_the_first_half_encodes_and_the_last_half_loops():
    ours, info = AsymLoopForCausalLM.from_dense(dense("llama", num_hidden_layers=5), output_loading_info=True)
    assert info["copied"]["model.encoder.layers.1.input_layernorm.weight"] == "model.layers.1.input_layernorm.weight"
    assert info["copied"]["model.decoder.layers.0.input_layernorm.weight"] == "model.layers.3.input_layernorm.weight"
    assert {key.split(".")[2] for key in info["dropped"]} == {"2"}
    assert ours.config.num_loops == 3


def test_what_was_copied_dropped_and_made_new_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        AsymLoopForCausalLM.from_dense(dense("qwen2"), encoder_from=[0, 1], decoder_from=[3])
        AsymLoopForCausalLM.from_dense(dense("mixtral"), 2, 2, moe_stacks=["decoder"])
    first, second = caplog.messages
    assert "copied: encoder layers from [0, 1], decoder layers from [3], lm_head.weight, model.embed_tokens" in first
    assert "dropped: layer 2; new: model.decoder.layers.*.self_attn.o_proj.bias, model.encoder.layers.*" in first
    assert "dropped: model.layers.*.mlp.experts.down_proj" in second
    assert "new: model.encoder.layers.*.mlp.down_proj.weight" in second


def test_from_a_checkpoint_with_its_tokenizer(tmp_path):
    model = dense("olmoe").to(torch.bfloat16)
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path / "dense")
    train_tokenizer(["some text " * 40], vocab_size=300).save_pretrained(tmp_path / "dense")
    ours = AsymLoopForCausalLM.from_dense(str(tmp_path / "dense"), 2, 2)
    assert ours.dtype == torch.bfloat16 and ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert ours.generation_config.max_length == 77
    ours.save_pretrained(tmp_path / "ours")
    AutoTokenizer.from_pretrained(tmp_path / "dense").save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(loaded(tokens(1, 5)).logits, ours(tokens(1, 5)).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) > 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoder_from": [0, 4]}, r"encoder_from=\[0, 4\] .* 2 layers of the dense model, each from 0 to 3"),
        ({"encoder_from": [-1]}, r"encoder_from=\[-1\] is not allowed"),
        ({"encoder_from": []}, r"encoder_from=\[\] is not allowed: it must be a list of layers"),
        ({"encoder_from": 3}, r"encoder_from=3 is not allowed: it must be a list of layers .* from 0 to 3"),
        ({"decoder_from": {0, 1}}, r"decoder_from=\{0, 1\} is not allowed"),
        ({"decoder_from": "01"}, r"decoder_from='01' is not allowed"),
        ({"encoder_from": [True]}, r"encoder_from=\[True\] is not allowed"),
        ({"decoder_from": [0, 1], "num_decoder_layers": 3}, r"decoder_from=\[0, 1\] .* it must be 3 layers"),
        ({"num_encoder_layers": 0}, "num_encoder_layers=0 .* a positive integer"),
        ({"num_decoder_layers": 5}, "num_decoder_layers=5 .* at most the 4 layers .* decoder_from must be given"),
        ({"num_loops": 0}, "num_loops=0 is not allowed"),
        ({"decoder_layers": [3]}, r"decoder_layers=\[3\] is not allowed: it must be left out"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16 is not allowed"),
        ({"backbone": "olmo2"}, "backbone='olmo2' is not allowed"),
        ({"silent_decoder": "yes"}, "silent_decoder='yes' is not allowed: it must be True or False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True .* head of the dense model is not its embeddings"),
        ({"hidden_size": 64}, r"model.embed_tokens.weight.shape=\(97, 32\) .* \(97, 64\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AsymLoopForCausalLM.from_dense(dense("mistral"), **arguments)


@pytest.mark.parametrize("config", [GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20), Qwen3Config(**SIZES)])
def test_other_kinds_of_models_are_refused(config, tmp_path):
    config.save_pretrained(tmp_path)  # no weights are read before the kind is known
    for model_or_path in (AutoModelForCausalLM.from_config(config), tmp_path):
        with pytest.raises(ValueError, match=f"model_type='{config.model_type}' .* one of .'llama', 'mistral', 'qwen"):
            AsymLoopForCausalLM.from_dense(model_or_path)


@pytest.mark.parametrize("model_or_path", [None, 3, [], LlamaConfig(), torch.nn.Linear(2, 2)])
def test_what_is_neither_a_model_nor_a_path_is_refused(model_or_path):
    with pytest.raises(ValueError, match="model_or_path=.* a model, or the folder or hub name of one"):
        AsymLoopForCausalLM.from_dense(model_or_path)


def test_a_checkpoint_without_all_weights_is_refused(tmp_path):
    model = dense("llama")
    model.model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"missing_keys=\['lm_head.weight'\] is not allowed"):
        AsymLoopForCausalLM.from_dense(tmp_path / "base")
    model.config.num_hidden_layers = 5
    model.save_pretrained(tmp_path / "longer")
    with pytest.raises(ValueError, match=r"missing_keys=\['model.layers.4.input_layernorm.weight'"):
        AsymLoopForCausalLM.from_dense(tmp_path / "longer")
    model.config.num_hidden_layers = 3
    model.save_pretrained(tmp_path / "shorter")
    with pytest.raises(ValueError, match=r"unexpected_keys=\['model.layers.3.input_layernorm.weight'"):
        AsymLoopForCausalLM.from_dense(tmp_path / "shorter")


def test_a_head_that_is_the_embeddings_can_become_its_own():
    model = dense("llama", tie_word_embeddings=True)
    ours = AsymLoopForCausalLM.from_dense(model, tie_word_embeddings=False)
    assert torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)
    assert ours.lm_head.weight is not ours.model.embed_tokens.weight


def test_a_sliding_window_and_another_head_are_refused():
    model = dense("mistral")
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match="sliding_window=8 is not allowed: it must be None in the dense model"):
        AsymLoopForCausalLM.from_dense(model)
    classifier = LlamaForSequenceClassification(LlamaConfig(num_hidden_layers=1, **SIZES))
    with pytest.raises(ValueError, match="model_or_path='LlamaForSequenceClassification' .* a causal language model"):
        AsymLoopForCausalLM.from_dense(classifier)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_trained_start_is_ahead_of_a_new_model_after_the_same_steps(name):
    documents = make_documents(count=96)
    tokenizer = train_tokenizer(documents, vocab_size=400)
    rows = torch.tensor([tokenizer(document)["input_ids"][:100] for document in documents])
    sizes = {**SIZES, "vocab_size": 400, "initializer_range": 0.02, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(CONFIGS[name](**sizes))
    train(model, rows[:64].repeat(2, 1))
    started = AsymLoopForCausalLM.from_dense(model, num_loops=2)
    new = AsymLoopForCausalLM(started.config)
    losses = [train(candidate, rows[64:88]) or held_out(candidate, rows[88:]) for candidate in (started, new)]
    assert losses[0] < losses[1] - 0.1


def train(model, rows) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for batch in rows.split(4):
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out(model, rows) -> float:
    return model.eval()(rows, labels=rows, use_cache=False).loss.item()
