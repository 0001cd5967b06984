"""`asymloop demo`, whole and interrupted, on a small corpus and tiny models."""

import json
from dataclasses import replace

import pytest
import torch
from small_corpus import write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer

from asymloop_hf import cli, demo, training_run
from asymloop_hf.corpus import load_corpus
from asymloop_hf.layerwise_table import read_table
from asymloop_hf.model_variants import parse_variant

STAGES = [
    "text",
    "tokenizer",
    "timing",
    "train asymloop",
    "train fullloop",
    "plot",
    "score asymloop",
    "score fullloop",
]


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch, tmp_path):
    """A corpus of 500 short documents behind every name, models of 32 channels, one thread."""
    corpus = write_corpus(tmp_path / "documents.jsonl")
    monkeypatch.setattr(demo, "load_corpus", lambda name: load_corpus(corpus))
    small = replace(
        demo.SIZES["tiny"], hidden_size=32, intermediate_size=64, num_stack_layers=1, vocab_size=400, block_size=64
    )
    monkeypatch.setitem(demo.SIZES, "tiny", small)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def demo_command(output, *options) -> int:
    return cli.main(["demo", "--size", "tiny", "--output", str(output), *options])


def read_results(output) -> dict:
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


def test_the_whole_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "choose_steps", lambda *args: 6)
    output = tmp_path / "run"
    assert demo_command(output) == 0
    assert sorted(path.name for path in output.iterdir()) == ["asymloop", "fullloop", "loss.png", "results.json"]
    results = read_results(output)
    assert results["stages_done"] == STAGES
    assert results["timing"]["chosen_steps"] == 6

    asymloop, fullloop = results["models"]["asymloop"], results["models"]["fullloop"]
    for same in ("parameters", "effective_depth", "steps", "tokens"):
        assert asymloop[same] == fullloop[same]
    assert asymloop["tokens"] == 6 * 8 * 64
    printed = capsys.readouterr().out
    for name, measured in results["models"].items():
        assert [step for step, _ in measured["train_losses"]] == [1, 2, 3, 4, 5, 6]
        assert measured["held_out_losses"][-1] == [6, measured["held_out_loss"]]
        assert 0 <= measured["zero_shot"]["acc"] <= 1 and measured["zero_shot"]["questions"] >= 4
        assert len(measured["continuations"]) == 3
        assert f"{measured['held_out_loss']:.3f}" in printed
        assert {row.step for row in read_table(output / name)} == {1}
        assert cli.main(["spectra", str(output / name)]) == 0
        assert (output / name / "spectra.png").exists() and capsys.readouterr().out.count("self_attn") == 8
        assert AutoModelForCausalLM.from_pretrained(output / name).num_parameters() == measured["parameters"]
        assert len(AutoTokenizer.from_pretrained(output / name)) == results["vocab_size"]


def test_both_models_see_the_same_batches(monkeypatch):
    batches = []
    collate = training_run.default_data_collator

    def noting_collator(rows):
        batches.append([row["input_ids"] for row in rows])
        return collate(rows)

    monkeypatch.setattr(training_run, "default_data_collator", noting_collator)
    size = demo.SIZES["tiny"]
    documents = demo.load_corpus("documents")
    tokenizer = demo.train_tokenizer(documents["train"]["text"], size.vocab_size)
    blocks = {split: demo.pack(rows, tokenizer, size.block_size) for split, rows in documents.items()}
    for name in demo.MODELS.values():
        demo.train_model(parse_variant(name).config(size, tokenizer), size, blocks, steps=5, seed=0)
    half = len(batches) // 2
    assert half > 5 and batches[:half] == batches[half:]
    assert batches[0] != batches[1]


def test_interrupted_after_the_first_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "train_tokenizer", interrupt)
    assert demo_command(tmp_path / "run", "--steps", "2") == 130
    results = read_results(tmp_path / "run")
    assert results["stages_done"] == ["text"] and results["documents"]["train"] > 400
    assert capsys.readouterr().err.count("\nasymloop: interrupted; the finished stages (text) are kept in ") == 1


def test_interrupted_before_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_corpus", interrupt)
    assert demo_command(tmp_path / "run") == 130
    assert list((tmp_path / "run").iterdir()) == []
    assert "nothing is kept" in capsys.readouterr().err


def test_interrupted_while_the_second_model_is_saved(tmp_path, monkeypatch):
    from asymloop_hf import FullLoopForCausalLM

    def half_a_save(self, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{", encoding="utf-8")
        interrupt()

    monkeypatch.setattr(FullLoopForCausalLM, "save_pretrained", half_a_save)
    assert demo_command(tmp_path / "run", "--steps", "2") == 130
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["asymloop", "results.json"]
    assert read_results(tmp_path / "run")["stages_done"] == ["text", "tokenizer", "train asymloop"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "asymloop")


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "results.json").write_text("of another run", encoding="utf-8")
    assert demo_command(folder) == 2
    assert f"asymloop: error: output={str(folder)!r} holds another run (results.json)" in capsys.readouterr().err
    assert [path.read_text(encoding="utf-8") for path in folder.iterdir()] == ["of another run"]


def test_an_output_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    assert demo_command(tmp_path / "run") == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value", [("minutes", "0"), ("minutes", "nan"), ("steps", "0"), ("steps", "-3"), ("seed", "-1")]
)
def test_settings_out_of_range(tmp_path, capsys, option, value):
    assert demo_command(tmp_path / "run", f"--{option}", value) == 2
    assert f"asymloop: error: {option}={value}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_size(tmp_path):
    with pytest.raises(ValueError, match="size='huge': it must be one of tiny, small, medium"):
        demo.run_demo(tmp_path / "run", size="huge")


def test_steps_fit_the_time():
    size, seconds = demo.SIZES["small"], {"asymloop": 0.4, "fullloop": 0.5}
    steps = demo.choose_steps(300, seconds, size)
    assert 0 < steps * 0.9 < 300
    assert demo.choose_steps(600, seconds, size) > 2 * steps
    with pytest.raises(ValueError, match="the 10 seconds left .* allow more minutes"):
        demo.choose_steps(10, seconds, size)


def test_a_demo_that_has_no_time_can_be_repeated(tmp_path, capsys):
    output = tmp_path / "run"
    for _ in range(2):
        assert demo_command(output, "--minutes", "0.0001") == 2
        assert "minutes: collecting the text took all of them" in capsys.readouterr().err
        assert list(output.iterdir()) == []


def test_an_output_below_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert demo_command(tmp_path / "file" / "run") == 2
    assert "asymloop: error: " in capsys.readouterr().err
