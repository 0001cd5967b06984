import json
import os
import subprocess
import sys
from itertools import chain, count

import pytest
from transformers import AutoTokenizer

from asymloop_hf.tokenizer import train_tokenizer

TEXTS = [f"The quick brown fox number {n} jumps over the lazy dog, again and again." for n in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


STRINGS = [
    "",
    " ",
    "  two  spaces, a\ttab,\n\na blank line\r\n and trailing space ",
    "don 't join ' s . no clean-up , please !",
    "naïve café – Привет, 世界 🙂‍↔️ \u0000\u200b\ufeff",
    "".join(map(chr, range(0x500))),
    "a text with <|endoftext|> and <|pad|> in it",
]


@pytest.mark.parametrize("text", STRINGS)
def test_every_string_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.unk_token is None
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_encoding_adds_no_special_tokens(tokenizer):
    tokens = tokenizer(["The fox", "The"])["input_ids"]
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(chain(*tokens))
    assert tokenizer("")["input_ids"] == []


def test_the_vocabulary_has_the_size_asked_for_and_shortens_text(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 400
    assert len(tokenizer(TEXTS[0])["input_ids"]) < len(TEXTS[0]) / 3


def test_few_words_make_a_smaller_vocabulary():
    assert 258 < len(train_tokenizer(["one two"] * 5, 10_000)) < 300


def test_the_smallest_vocabulary_is_the_bytes():
    assert len(train_tokenizer(TEXTS, 258)("é fox")["input_ids"]) == len("é fox".encode())


def test_auto_tokenizer_loads_what_was_saved(tokenizer, tmp_path):
    train_tokenizer(TEXTS, 400, model_max_length=128).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.eos_token, loaded.bos_token, loaded.pad_token) == ("<|endoftext|>", "<|endoftext|>", "<|pad|>")
    assert loaded.model_max_length == 128
    for text in STRINGS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text


def test_training_is_deterministic(tokenizer):
    code = (
        "import sys, json; from asymloop_hf.tokenizer import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), 400).backend_tokenizer.to_str())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(TEXTS),
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert json.loads(other) == json.loads(tokenizer.backend_tokenizer.to_str())


def test_an_endless_stream_is_read_up_to_max_characters():
    read = []

    def stream():
        for n in count():
            read.append(n)
            yield "ten chars "

    train_tokenizer(stream(), 260, max_characters=1_000)
    assert len(read) == 100


@pytest.mark.parametrize(
    "texts, options, message",
    [
        (TEXTS, {"vocab_size": 257}, "vocab_size=257 is too small; it must be at least 258"),
        ([], {"vocab_size": 400}, "texts has no text"),
        (["", ""], {"vocab_size": 400}, "texts has no text"),
        (TEXTS, {"vocab_size": 400, "max_characters": 0}, "max_characters=0 must be at least 1"),
    ],
)
def test_bad_arguments(texts, options, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, **options)
