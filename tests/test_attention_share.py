"""`output_attention_share`: how much of its attention each visit of a decoder layer gives to the global KV."""

import json

import pytest
import torch
from conftest import BACKBONES, asymloop, fullloop, tokens
from transformers import AutoTokenizer, StaticCache

from asymloop_hf import AsymLoopForCausalLM
from asymloop_hf.cli import main
from asymloop_hf.tokenizer import train_tokenizer


def shares(model, *args, **kwargs) -> torch.Tensor:
    """Of shape `(visits, batch, heads)`."""
    return torch.stack(model(*args, output_attention_share=True, **kwargs).attention_share)


@pytest.mark.parametrize("local_window", [None, 1, 3])
@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_the_share_is_the_sum_of_the_attention_weights_on_global_keys(name, local_window):
    fields = {"local_window": local_window, **BACKBONES[name]}
    model, eager = asymloop(**fields), asymloop("eager", **fields)
    eager.load_state_dict(model.state_dict())
    input_ids = tokens(2, 40)
    outputs = eager(input_ids, output_attentions=True, use_cache=False)
    decoder_weights = outputs.attentions[model.config.num_encoder_layers :]
    expected = torch.stack([weights[..., : input_ids.shape[1]].sum(-1).mean(-1) for weights in decoder_weights])
    torch.testing.assert_close(shares(model, input_ids), expected)
    torch.testing.assert_close(shares(eager, input_ids), expected)


@torch.no_grad()
def test_there_is_one_tensor_for_each_visit_of_a_decoder_layer():
    model = asymloop()
    for num_loops in (1, 4):
        visits = num_loops * model.config.num_decoder_layers
        assert shares(model, tokens(2, 9), num_loops=num_loops).shape == (visits, 2, model.config.num_attention_heads)
    assert shares(model.model, tokens(2, 9)).shape == (6, 2, 4)
    assert model(tokens(2, 9)).attention_share is None


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_count(side):
    model, input_ids = asymloop(), tokens(1, 9)
    padding = torch.zeros(1, 4, dtype=torch.long)
    parts = [padding, input_ids] if side == "left" else [input_ids, padding]
    padded = torch.cat(parts, 1)
    attention_mask = (padded != 0).long()
    torch.testing.assert_close(shares(model, padded, attention_mask=attention_mask), shares(model, input_ids))


@torch.no_grad()
def test_padding_does_not_count_with_a_static_cache_either():
    model, input_ids = asymloop(), tokens(1, 9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), input_ids], 1)
    cache = StaticCache(model.config, max_cache_len=16)
    options = {"attention_mask": (padded != 0).long(), "cache": cache}
    torch.testing.assert_close(shares(model, padded, **options), shares(model, input_ids))


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_attention_dropout_does_not_change_the_share_of_a_visit(attn_implementation):
    model = asymloop(attn_implementation, attention_dropout=0.5, num_loops=1, num_encoder_layers=1).train()
    model.config.global_kv_layers = [0, 0]
    model.model.encoder.layers[0].self_attn.attention_dropout = 0.0
    input_ids = tokens(2, 9)
    torch.testing.assert_close(shares(model, input_ids)[0], shares(model.eval(), input_ids)[0])


@torch.no_grad()
def test_while_decoding_it_is_the_share_of_the_new_tokens():
    model, input_ids = asymloop(), tokens(1, 9)
    cache = model(input_ids[:, :8], use_cache=True).past_key_values
    new = shares(model, input_ids[:, 8:], cache=cache)
    whole, before = shares(model, input_ids), shares(model, input_ids[:, :8])
    torch.testing.assert_close(new, 9 * whole - 8 * before)


def test_training_does_not_change_with_it():
    model, input_ids = asymloop().train(), tokens(2, 9)
    model(input_ids, labels=input_ids).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        outputs = model(input_ids, labels=input_ids, output_attention_share=True)
        assert not outputs.attention_share[0].requires_grad
        outputs.loss.backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        model.zero_grad()


# `asymloop inspect CHECKPOINT --text FILE`


@pytest.fixture
def checkpoint(tmp_path):
    asymloop(vocab_size=300, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    train_tokenizer(["some text for the tokenizer " * 20], vocab_size=300).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_inspect_prints_and_plots_the_shares_of_a_text(checkpoint, tmp_path, capsys):
    text = "What is read again and again? " * 20
    (tmp_path / "text.txt").write_text(text)
    arguments = [
        "inspect",
        str(checkpoint),
        "--text",
        str(tmp_path / "text.txt"),
        "--plot",
        str(tmp_path / "plot.png"),
    ]
    assert main([*arguments, "--json"]) == 0
    printed = torch.tensor(json.loads(capsys.readouterr().out)["attention_share"])
    model = AsymLoopForCausalLM.from_pretrained(checkpoint)
    input_ids = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][0]
    assert len(input_ids) > 64  # more than one block
    blocks = [shares(model, block[None])[:, 0] * len(block) for block in input_ids.split(64)]
    torch.testing.assert_close(printed.flatten(0, 1), sum(blocks) / len(input_ids))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "loop 3" in table and "decoder layer 1" in table and f"{printed[2, 1].mean():.1%}" in table


def test_inspect_refuses_texts_that_it_cannot_read(checkpoint, tmp_path, capsys):
    def error_of(model, content: bytes | None, plot="plot.png"):
        file = tmp_path / "text.txt"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert main(["inspect", str(model), "--text", str(file), "--plot", str(tmp_path / plot)]) == 2
        assert not (tmp_path / "plot.png").exists()
        return capsys.readouterr().err

    assert "text.txt" in error_of(checkpoint, None)
    assert "must be a file of UTF-8 text" in error_of(checkpoint, b"\xff\xfe\x00")
    assert "text.txt' is not allowed: the file must not be empty" in error_of(checkpoint, b"")
    assert "plot.pdf' is not allowed: it must be a .png file" in error_of(checkpoint, b"text", plot="plot.pdf")
    assert "in a folder that exists" in error_of(checkpoint, b"text", plot="nowhere/plot.png")
    assert main(["inspect", "60m", "--plot", "plot.png"]) == 2
    assert "not allowed without --text" in capsys.readouterr().err
    assert "which has no weights" in error_of("60m", b"text")
    fullloop(vocab_size=300).save_pretrained(checkpoint)
    assert "model_type='fullloop' is not allowed" in error_of(checkpoint, b"text")
