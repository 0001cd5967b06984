"""The three example scripts, run as a user runs them, on a small corpus and tiny models."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_corpus import write_corpus

from asymloop_hf import AsymLoopConfig
from asymloop_hf.layerwise_table import read_table
from asymloop_hf.recipe import parse_overrides

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = "num_encoder_layers=1,num_decoder_layers=1,hidden_size=32,intermediate_size=64,num_attention_heads=2"
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_example(name, **options) -> subprocess.CompletedProcess:
    arguments = [part for key, value in options.items() for part in (f"--{key}", *str(value).split("|"))]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretrain(folder, corpus, **options) -> subprocess.CompletedProcess:
    settings = {
        "corpus": corpus,
        "config_overrides": f"{TINY},vocab_size=400",
        "block_size": 64,
        "output_dir": folder,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 3e-3,
        "report_to": "none",
    }
    return run_example("pretrain", **settings | options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents.jsonl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, corpus) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "asymloop"
    result = pretrain(folder, corpus)
    assert result.returncode == 0, result.stderr
    return folder


def test_pretrain_resumes_to_the_same_weights(checkpoint, corpus, tmp_path):
    interrupted = tmp_path / "interrupted"
    shutil.copytree(checkpoint, interrupted, ignore=shutil.ignore_patterns("checkpoint-6"))
    (interrupted / "model.safetensors").unlink()
    result = pretrain(interrupted, corpus)
    assert result.returncode == 0, result.stderr
    first_half = load_file(checkpoint / "checkpoint-3" / "model.safetensors")
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (checkpoint, interrupted))
    assert whole.keys() == resumed.keys() == first_half.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
    assert any(not whole[name].equal(first_half[name]) for name in whole)
    state = json.loads((interrupted / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 6


def test_pretrain_with_layerwise_rates(corpus, tmp_path):
    options = {"layerwise_lr": True, "layerwise_every": 1}
    result = pretrain(tmp_path / "run", corpus, **options)
    assert result.returncode == 0, result.stderr
    whole = load_file(tmp_path / "run" / "model.safetensors")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    (tmp_path / "run" / "model.safetensors").unlink()
    result = pretrain(tmp_path / "run", corpus, **options)
    assert result.returncode == 0, result.stderr
    resumed = load_file(tmp_path / "run" / "model.safetensors")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    table = read_table(tmp_path / "run")
    assert {row.step for row in table} == {1} and len({row.layer for row in table}) == 14
    assert max(row.rate / row.base_rate for row in table) == pytest.approx(5)


def test_pretrain_leaves_another_run_alone(checkpoint, corpus):
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    result = pretrain(checkpoint, corpus, model="fullloop")
    assert result.returncode != 0
    assert "holds another run, which differs in model" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}


def test_pretrain_the_matched_full_loop(corpus, tmp_path):
    result = pretrain(tmp_path / "run", corpus, model="fullloop", max_steps=1)
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_layers"], config["num_loops"]) == ("fullloop", 2, 2)


def test_finetune(checkpoint, tmp_path):
    examples = [{"prompt": f"Story {i}. The otter", "completion": " leaves the river."} for i in range(16)]
    data = tmp_path / "examples.jsonl"
    data.write_text("\n".join(map(json.dumps, examples)), encoding="utf-8")
    options = {"checkpoint": checkpoint, "data": data, "output_dir": tmp_path / "run", "report_to": "none"}
    result = run_example("finetune", **options, num_train_epochs=10, learning_rate=1e-2, save_strategy="no")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "run" / "before_after.json").read_text(encoding="utf-8"))
    assert found["after"]["held-out loss"] < found["before"]["held-out loss"] / 2
    for name, before in found["before"].items():
        assert f"{name:<28}{before:>10.3f}{found['after'][name]:>10.3f}" in result.stdout
    generated = run_example("generate", checkpoint=tmp_path / "run", prompt="Story 99. The otter", num_loops="3")
    assert "The otter leaves the river.\n" in generated.stdout, generated


def test_generate_with_other_numbers_of_loops(checkpoint):
    options = {"checkpoint": checkpoint, "prompt": "The heron", "max_new_tokens": 5}
    result = run_example("generate", **options, num_loops="1|3|5")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("---")] == [f"--- num_loops={n}" for n in (1, 3, 5)]
    assert sum(line.startswith("The heron") for line in lines) == 3


@pytest.mark.parametrize(
    "line, problem",
    [
        (b"not json", "not a JSON object in UTF-8"),
        (b'{"prompt": "\xff", "completion": "b"}', "not a JSON object in UTF-8"),
        (b'["a", "b"]', "list, where an object must be"),
        (b'{"prompt": "a"}', "completion=None must be a text"),
        (b'{"prompt": "a", "completion": ""}', "completion='' must be a text"),
        (b'{"prompt": 3, "completion": "b"}', "prompt=3 must be a text"),
    ],
)
def test_finetune_names_the_bad_line(tmp_path, line, problem):
    data = tmp_path / "examples.jsonl"
    data.write_bytes(b'{"prompt": "a", "completion": "b"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"line 2: {problem}"):
        load_example("finetune").read_examples(str(data))


def test_finetune_needs_lines(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="has no lines"):
        load_example("finetune").read_examples(str(tmp_path / "empty.jsonl"))


def finetune(monkeypatch, example=None, **options) -> None:
    """Run the script in this process."""
    command = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *command])
    (example or load_example("finetune")).main()


def test_finetune_scores_tasks_before_and_after(checkpoint, tmp_path, monkeypatch):
    """Without training nothing changes; the accuracies are those of `asymloop eval`."""
    example = load_example("finetune")
    asked = []

    def answer(checkpoint, tasks, data_dir, limit):
        asked.append((str(checkpoint), tasks, data_dir, limit))
        return {3: {"results": {"piqa": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "n-samples": {"piqa": 4}}}

    monkeypatch.setattr(example, "evaluate", answer)
    data = tmp_path / "examples.jsonl"
    data.write_text("\n".join([json.dumps({"prompt": "The otter", "completion": " leaves."})] * 2), encoding="utf-8")
    options = {"checkpoint": checkpoint, "data": data, "output_dir": tmp_path / "run", "report_to": "none"}
    finetune(monkeypatch, example, **options, tasks="piqa", data_dir=tmp_path, limit=4, learning_rate=0, use_cpu=True)
    found = json.loads((tmp_path / "run" / "before_after.json").read_text(encoding="utf-8"))
    assert found["before"] == found["after"] and found["after"]["piqa acc"] == 0.5
    assert asked == [(str(path), ["piqa"], tmp_path, 4) for path in (checkpoint, tmp_path / "run")]


def test_finetune_needs_a_tokenizer_that_fits(checkpoint, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    larger = tmp_path / "larger"
    shutil.copytree(checkpoint, larger, ignore=shutil.ignore_patterns("checkpoint-*"))
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens([f"<{number}>" for number in range(100)])
    tokenizer.save_pretrained(larger)
    data = tmp_path / "examples.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 2, encoding="utf-8")
    with pytest.raises(ValueError, match="vocab_size=400 is not allowed: the tokenizer has .* tokens"):
        finetune(monkeypatch, checkpoint=larger, data=data, output_dir=tmp_path / "run")


def test_finetune_holds_out_some_and_keeps_some():
    finetune = load_example("finetune")
    examples = [{"line": number, "prompt": "a", "completion": "b"} for number in range(40)]
    for share, count in ((0.1, 4), (0.001, 1), (0.999, 39)):
        train, held_out = finetune.split(examples, share, seed=0)
        assert len(held_out) == count
        assert sorted(row["line"] for row in train + held_out) == list(range(40))
    for share, rows in ((0.0, examples), (1.0, examples), (0.1, examples[:1])):
        with pytest.raises(ValueError, match=f"held_out={share} of {len(rows)} examples is not allowed"):
            finetune.split(rows, share, seed=0)


def test_finetune_masks_the_prompt(checkpoint):
    from transformers import AutoTokenizer

    finetune = load_example("finetune")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    example = {"line": 7, "prompt": "The otter", "completion": " leaves."}
    row = finetune.encode(example, tokenizer, max_length=64)
    learnt = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(learnt[:-1]) == " leaves." and learnt[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row["input_ids"][: -len(learnt)]) == "The otter"
    with pytest.raises(ValueError, match="line 7: .* tokens, where the model reads at most 4"):
        finetune.encode(example, tokenizer, max_length=4)


def test_overrides():
    assert parse_overrides("") == {}
    values = parse_overrides(
        "num_loops=5,rms_norm_eps=1e-5,decoder_init=embedding,local_window=None,global_kv_layers=[0,1]"
    )
    assert values == {
        "num_loops": 5,
        "rms_norm_eps": 1e-5,
        "decoder_init": "embedding",
        "local_window": None,
        "global_kv_layers": [0, 1],
    }
    assert AsymLoopConfig.preset("60m", **parse_overrides("num_loops=5")).num_loops == 5
    with pytest.raises(ValueError, match="no field 'num_loop'"):
        parse_overrides("num_loop=5")
    with pytest.raises(ValueError, match="no field 'save_pretrained'"):
        parse_overrides("save_pretrained=5")
    with pytest.raises(ValueError, match="no field 'decoder_init'"):
        parse_overrides("decoder_init")
    for malformed in ("num_loops=", "num_loops:5", "num_loops=f(3)"):
        with pytest.raises(ValueError, match="is not of the form"):
            parse_overrides(malformed)
