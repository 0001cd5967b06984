"""Answering: the text-generation pipeline, chat templates, and `transformers serve` with an OpenAI client."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from chat_tokenizer import chat_tokenizer, fields_for
from conftest import KINDS
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

GREEDY = {"max_new_tokens": 12, "do_sample": False}
TEXTS = ["The otter", "Every summer the heron follows the river"]
CHAT = [{"role": "user", "content": "Where is the otter?"}]


def save(name, folder) -> str:
    """A checkpoint with a tokenizer in `folder`."""
    tokenizer = chat_tokenizer()
    KINDS[name](**fields_for(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def generate(model, tokenizer, inputs, **options) -> str:
    """The new text, by `generate` itself."""
    generated = model.generate(**inputs, **GREEDY, **options)
    return tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def answer(model, tokenizer, **options) -> str:
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return generate(model, tokenizer, inputs, **options)


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("options", [{}, {"num_loops": 1}, {"num_loops": 5}], ids=str)
def test_the_pipeline_continues_a_text(path, options):
    model, tokenizer = load(path)
    generator = pipeline("text-generation", path)
    expected = generate(model, tokenizer, tokenizer(TEXTS[0], return_tensors="pt"), **options)
    assert generator(TEXTS[0], **GREEDY, **options)[0]["generated_text"] == TEXTS[0] + expected


def test_the_pipeline_continues_a_batch_of_texts_of_different_lengths(path):
    model, tokenizer = load(path)
    tokenizer.padding_side = "left"
    generator = pipeline("text-generation", model, tokenizer=tokenizer)
    outputs = generator(TEXTS, batch_size=2, return_full_text=False, **GREEDY)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output[0]["generated_text"] == generate(model, tokenizer, tokenizer(text, return_tensors="pt"))


def test_the_pipeline_answers_a_chat(path):
    reply = pipeline("text-generation", path)(CHAT, **GREEDY)[0]["generated_text"]
    assert reply == [*CHAT, {"role": "assistant", "content": answer(*load(path))}]


def test_a_chat_template_is_saved_with_the_tokenizer(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save("asymloop", tmp_path))
    chat = [*CHAT, {"role": "assistant", "content": "In the river."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "user: Where is the otter?<|endoftext|>\nassistant: In the river.<|endoftext|>\nassistant:"
    )


@contextmanager
def transformers_serve(folder):
    """The address of `transformers serve`, run with an empty home of its own, and without this package."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "import sys; sys.modules['asymloop_hf'] = None; from transformers.cli.transformers import main; main()"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--trust-remote-code"]
    with open(folder / "log", "w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", start, "serve", *options],
            env={**os.environ, "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(240):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
            server.terminate()
            server.wait(timeout=60)
            assert "Finished server process" in (folder / "log").read_text()
        finally:
            server.kill()
            server.wait()


def test_transformers_serve_answers_an_openai_client(tmp_path):
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    paths = [save(name, tmp_path / name) for name in ("asymloop", "full loop")]
    (tmp_path / "server").mkdir()
    with transformers_serve(tmp_path / "server") as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        for path in paths:
            request = {"model": path, "messages": CHAT, "temperature": 0, "max_tokens": GREEDY["max_new_tokens"]}
            expected = answer(*load(path))
            assert client.chat.completions.create(**request).choices[0].message.content == expected
            chunks = list(client.chat.completions.create(**request, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
            assert len(chunks) > 3
