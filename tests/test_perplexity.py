"""Held-out perplexity: each token of each document predicted once, by loop count, document and position."""

import json
import math

import pytest
import torch
from conftest import KINDS, SIZES, asymloop, tokens
from small_corpus import make_documents, write_corpus
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asymloop_hf.cli import main
from asymloop_hf.perplexity import perplexity
from asymloop_hf.tokenizer import train_tokenizer

CONTEXT = 8
LENGTHS = (35, 1, 7, 9, 0, 17)


def documents(lengths=LENGTHS) -> list[list[int]]:
    return [tokens(1, length, seed)[0].tolist() if length else [] for seed, length in enumerate(lengths)]


def losses_one_by_one(model, document, stride, num_loops) -> list[float]:
    """The loss of each token but the first, from a forward pass over just the tokens that it is predicted from."""
    losses = []
    for position in range(1, len(document)):
        windows_before = max(0, math.ceil((position - CONTEXT) / stride))
        end = min(len(document), CONTEXT + 1 + windows_before * stride)
        start = max(0, end - CONTEXT - 1)
        logits = model(torch.tensor([document[start:position]]), num_loops=num_loops).logits[0, -1]
        losses.append(-logits.double().log_softmax(-1)[document[position]].item())
    return losses


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 5, 8])
@pytest.mark.parametrize("name", KINDS)
def test_every_token_is_predicted_once_from_its_window(name, stride):
    model = KINDS[name](max_position_embeddings=CONTEXT)
    found = perplexity(model, documents(), stride, loop_counts=[2, 1], batch_size=3)
    for num_loops, measured in found.items():
        expected = [losses_one_by_one(model, document, stride, num_loops) for document in documents()]
        every = [loss for losses in expected for loss in losses]
        assert measured.tokens == len(every) == sum(max(0, length - 1) for length in LENGTHS)
        assert measured.loss == pytest.approx(sum(every) / len(every), abs=1e-5)
        assert measured.perplexity == pytest.approx(math.exp(measured.loss))
        assert [bucket.tokens for bucket in measured.documents] == [max(0, length - 1) for length in LENGTHS]
        for bucket, losses in zip(measured.documents, expected, strict=True):
            mean = sum(losses) / len(losses) if losses else math.nan
            assert bucket.loss == pytest.approx(mean, abs=1e-5, nan_ok=True)
        assert list(measured.positions) == [1, 16, 32]
        for start, end in ((1, 16), (16, 32), (32, 64)):
            of_bucket = [loss for losses in expected for loss in losses[start - 1 : end - 1]]
            assert measured.positions[start].tokens == len(of_bucket)
            assert measured.positions[start].loss == pytest.approx(sum(of_bucket) / len(of_bucket), abs=1e-5)


def test_neither_order_nor_batches_matter():
    model = asymloop(max_position_embeddings=CONTEXT).double()
    forward, backward = perplexity(model, documents(), batch_size=1)[3], perplexity(model, documents()[::-1])[3]
    assert forward.loss == pytest.approx(backward.loss, abs=1e-12)
    assert [b.tokens for b in forward.documents] == [b.tokens for b in backward.documents[::-1]]


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = asymloop()
    torch.nn.init.zeros_(model.lm_head.weight)
    (measured,) = perplexity(model, documents()).values()
    assert measured.perplexity == pytest.approx(SIZES["vocab_size"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 0}, "stride=0 is not allowed: it must be a whole number from 1 to the model's context of 8"),
        ({"stride": 9}, "stride=9 is not allowed"),
        ({"stride": 2.0}, "stride=2.0 is not allowed"),
        ({"batch_size": 0}, "batch_size=0 is not allowed: it must be a whole number of at least 1"),
        ({"documents": []}, "documents: 0 were read, and none has two tokens"),
        ({"documents": [[5], []]}, "documents: 2 were read, and none has two tokens"),
        ({"loop_counts": [2, 2]}, r"num_loops=\[2, 2\] is not allowed: it must be positive integers, each once"),
        ({"loop_counts": [0]}, r"num_loops=\[0\] is not allowed"),
        ({"documents": [[1, 2], [3, SIZES["vocab_size"]]]}, "a token of document 1 is not in the model's vocabulary"),
        ({"documents": [[-100, 2]]}, "a token of document 0 is not in the model's vocabulary"),
    ],
)
def test_what_is_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(asymloop(max_position_embeddings=CONTEXT), **{"documents": documents(), **options})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(make_documents(), 400)
    asymloop(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_command(checkpoint, tmp_path, capsys):
    texts = make_documents(count=3, sentences=2)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    output = tmp_path / "out.json"
    command = ["perplexity", str(checkpoint), "--documents", str(tmp_path / "texts.jsonl"), "--num-loops", "1,3"]
    assert main([*command, "--output", str(output)]) == 0
    printed, written = capsys.readouterr().out, json.loads(output.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ended = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    model = type(asymloop()).from_pretrained(checkpoint)
    for count, measured in perplexity(model, ended, loop_counts=[1, 3]).items():
        assert written[str(count)]["loss"] == pytest.approx(measured.loss)
        assert f"{measured.perplexity:.2f}" in printed
        assert len(written[str(count)]["documents"]) == 3
    assert f"{measured.tokens:,} tokens of 3 documents" in printed

    assert main([*command, "--output", str(output)]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert main(["perplexity", str(checkpoint), "--documents", str(tmp_path / "nothing")]) == 2
    assert "neither an existing local path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoint_of", "options", "message"),
    [
        ("looped", ["--device", "abacus"], "device='abacus' is not allowed: this machine has no such device"),
        ("looped", ["--num-loops", "2,2"], "num_loops=[2, 2] is not allowed"),
        ("llama", [], "model_type='llama' is not allowed: it must be one of asymloop, fullloop"),
        ("nothing", [], "is neither a folder nor a hub name with a readable config.json"),
        ("no tokenizer", [], "is not allowed: it has no tokenizer"),
        ("large tokenizer", [], "vocab_size=97 is not allowed: the tokenizer has 400 tokens"),
    ],
)
def test_what_the_command_does_not_allow(checkpoint, tmp_path, capsys, checkpoint_of, options, message):
    folder = checkpoint if checkpoint_of == "looped" else tmp_path / "checkpoint"
    if checkpoint_of == "llama":
        LlamaForCausalLM(LlamaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=1)).save_pretrained(folder)
    if checkpoint_of in ("no tokenizer", "large tokenizer"):
        asymloop().save_pretrained(folder)
    if checkpoint_of in ("llama", "large tokenizer"):
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    write_corpus(tmp_path / "texts.jsonl", count=2)
    command = ["perplexity", str(folder), "--documents", str(tmp_path / "texts.jsonl"), *options]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_a_corpus_is_read_where_training_holds_out(checkpoint, tmp_path, capsys):
    from asymloop_hf.corpus import load_corpus

    lines = [json.dumps({"text": text}) for text in make_documents(count=200, sentences=1)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    held_out = load_corpus(str(tmp_path / "texts.jsonl"))["held_out"]
    assert main(["perplexity", str(checkpoint), "--corpus", str(tmp_path / "texts.jsonl")]) == 0
    assert f"tokens of {len(held_out)} documents" in capsys.readouterr().out
    assert 0 < len(held_out) < 20
