"""What examples/pretrain.py promises: exact resume in every way that data can come, recipes, throughput, errors."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import asymloop_config
from datasets import Dataset, IterableDataset
from distributed_training import has_fsdp2
from filelock import Timeout
from layerwise_runs import llama, make_trainer
from pretraining_runs import BATCH, BLOCK, EXAMPLES, STEPS, WAYS, Killed, load_example, pretrain
from safetensors.torch import load_file
from small_corpus import make_documents, write_corpus
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from asymloop_hf import AsymLoopConfig, throughput
from asymloop_hf.budget import budget
from asymloop_hf.corpus import load_corpus
from asymloop_hf.packing import pack
from asymloop_hf.recipe import read_recipe
from asymloop_hf.throughput import ThroughputCallback, peak_flops
from asymloop_hf.token_folder import load_tokens, lock_of, save_tokens
from asymloop_hf.token_stream import TokenStream, share_of
from asymloop_hf.tokenizer import train_tokenizer

RECIPES = {path.stem: path for path in (EXAMPLES / "recipes").glob("*.yaml")}
ABOUT = {"corpus": "documents.jsonl", "block_size": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(make_documents(100), 300)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_corpus(tmp_path / "documents.jsonl", count=60)
    return tmp_path


def stream(documents: list[str]):
    return Dataset.from_dict({"text": documents}).to_iterable_dataset()


def rows(blocks) -> list[list[int]]:
    return [block["input_ids"] for block in blocks]


# Two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of the runs that two processes made, and what each of them saw."""
    folder = tmp_path_factory.mktemp("two")
    write_corpus(folder / "documents.jsonl", count=60)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", port]
    config = ["--config_file", str(EXAMPLES / "accelerate" / ("fsdp2.yaml" if has_fsdp2() else "ddp.yaml"))]
    script = Path(__file__).with_name("pretraining_runs.py")
    command = [*launch, *config, str(script), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=600)
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", [*WAYS, "FSDP2"])
def test_a_killed_run_goes_on_to_the_same_weights(two, way):
    if way == "FSDP2" and not has_fsdp2():
        pytest.skip("this release of accelerate has no FSDP2")
    for rank in two[1]:
        found = rank[way]
        weights, losses, (before, after) = found["weights"], found["losses"], found["seen by both"]
        assert all(weights["resumed"][name].equal(weight) for name, weight in weights["whole"].items())
        assert losses["resumed"] == losses["whole"] and len(losses["whole"]) == STEPS
        done = len(found["seen"]) * 4 // STEPS  # the checkpoint is that of the fourth step, in which there was a kill
        assert before == found["seen"][: len(before)] and after == found["seen"][done:]


@pytest.mark.parametrize("way", WAYS)
def test_no_block_is_seen_twice(two, way):
    seen = [tuple(block) for rank in two[1] for block in rank[way]["seen"]]
    accumulation = WAYS[way].get("global_batch_size", 2 * BATCH) // (2 * BATCH)
    assert len(seen) == len(set(seen)) == 2 * STEPS * BATCH * accumulation


def test_each_process_streams_its_own_documents(two, tokenizer):
    """Each rank trains on the beginning of the blocks that its half of the documents gives."""
    folder, ranks = two
    tokenizer = AutoTokenizer.from_pretrained(folder / "streamed, whole")
    texts = [row["text"] for row in load_corpus(str(folder / "documents.jsonl"), streaming=True, held_out=2)["train"]]
    assert len(texts) == 58
    for rank, found in enumerate(ranks):
        own = rows(pack(stream(texts[rank::2]), tokenizer, 32))
        assert found["streamed"]["seen"] == own[: STEPS * BATCH]


def test_tokens_on_disk_are_those_in_memory(two):
    for rank in two[1]:
        assert rank["on disk"]["losses"] == rank["in memory"]["losses"]


def test_fsdp2_has_the_losses_of_ddp(two):
    if not has_fsdp2():
        pytest.skip("this release of accelerate has no FSDP2")
    for rank in two[1]:
        for sharded, whole in zip(*(rank[way]["losses"]["whole"] for way in ("FSDP2", "streamed")), strict=True):
            assert sharded == pytest.approx(whole, rel=1e-4)


def test_another_number_of_processes_is_another_run(two):
    with pytest.raises(FileExistsError, match=r"differs in processes \(2 there, 1 here\)"):
        pretrain(two[0], output_dir=two[0] / "streamed, whole", streaming=True)


# Streams


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["one file", "files", "row groups"])
def test_shares_are_disjoint_and_complete(tmp_path, kind, world_size):
    texts = make_documents(90)
    if kind == "row groups":
        path = tmp_path / "documents.parquet"
        Dataset.from_dict({"text": texts}).to_parquet(path, batch_size=10)
    else:
        path = tmp_path / "documents"
        path.mkdir()
        size = 90 if kind == "one file" else 30
        for start in range(0, 90, size):
            lines = [json.dumps({"text": text}) for text in texts[start : start + size]]
            (path / f"{start}.jsonl").write_text("\n".join(lines))
    documents = load_corpus(str(path), streaming=True, held_out=5)["train"]
    shares = [[row["text"] for row in share_of(documents, rank, world_size)] for rank in range(world_size)]
    assert Counter(text for share in shares for text in share) == Counter(texts[5:])
    assert all(shares)
    assert (
        kind != "row groups" or max(map(len, shares)) - min(map(len, shares)) <= 15
    )  # a row group and what is held out


def test_a_stream_goes_on_at_any_block(tokenizer):
    def new():
        return TokenStream(pack(stream(make_documents(1100, sentences=2)), tokenizer, 64), "documents")

    def read(blocks, count):
        return rows(islice(blocks, count))

    whole = read(new(), 500)
    for stop in (0, 1, 250, 499):
        first = new()
        read(first, stop)
        second = new()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert read(second, 500 - stop) == whole[stop:]


def test_a_download_that_breaks_off_goes_on(folder, monkeypatch):
    """The network fails in the sixth step; the same command then ends like a run without a failure."""
    failing_blocks = set()

    def download(block, index):
        if index in failing_blocks:
            raise ConnectionError("the hub does not answer")
        return block

    def downloaded(documents, *args):
        blocks = pack(documents, *args)
        return blocks.map(download, with_indices=True) if isinstance(documents, IterableDataset) else blocks

    monkeypatch.setattr("asymloop_hf.packing.pack", downloaded)
    whole, failing = ({"output_dir": folder / name, "streaming": True} for name in ("whole", "failing"))
    seen = pretrain(folder, **whole)
    failing_blocks.add(10)
    with pytest.raises(RuntimeError, match="after 10 blocks .*hub does not answer.*same command goes on"):
        pretrain(folder, **failing)
    failing_blocks.clear()
    assert pretrain(folder, **failing) == seen[8:]
    first, second = (load_file(folder / name / "model.safetensors") for name in ("whole", "failing"))
    assert all(second[name].equal(weight) for name, weight in first.items())


def test_a_stream_that_is_too_short_is_said(folder):
    with pytest.raises(ValueError, match="is too short: this process has read all of its [0-9]+ blocks"):
        pretrain(folder, output_dir=folder / "run", streaming=True, max_steps=1000, save_steps=100)
    assert (folder / "run" / "checkpoint-100").exists()


def test_workers_would_lose_what_they_have_read(folder):
    with pytest.raises(ValueError, match="dataloader_num_workers=2 is not allowed for a stream: it must be 0"):
        pretrain(folder, output_dir=folder / "run", streaming=True, dataloader_num_workers=2)


# Checkpoints


def test_a_checkpoint_that_was_never_finished_is_passed_over(folder):
    for streaming, last_file in ((True, "stream_0.json"), (False, "trainer_state.json")):
        run = {"output_dir": folder / f"streaming {streaming}", "streaming": streaming}
        seen = pretrain(folder, **run)
        (run["output_dir"] / "checkpoint-6" / last_file).unlink()
        assert pretrain(folder, **run) == seen[4 * BATCH :]


def test_a_kill_after_a_checkpoint_loses_nothing(folder, monkeypatch, caplog):
    """Trainer deletes the checkpoint before as soon as it has written one."""
    run = {"output_dir": folder / "run", "streaming": True, "save_total_limit": 1}
    whole = pretrain(folder, **run | {"output_dir": folder / "whole"})

    def killed(handler, args, state, control):
        if state.global_step == 4:
            raise Killed
        return control

    with monkeypatch.context() as patch:
        patch.setattr(CallbackHandler, "on_save", killed)
        assert pretrain(folder, **run) == whole[: 4 * BATCH]
    assert [path.name for path in (folder / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    assert pretrain(folder, **run) == whole[4 * BATCH :]
    (folder / "run" / "checkpoint-6" / "stream_0.json").unlink()
    assert pretrain(folder, **run) == whole
    assert "has no checkpoint that is whole: the run starts again" in caplog.text


def test_another_run_in_the_folder(folder):
    run = {"output_dir": folder / "run", "max_steps": 2}
    with pytest.raises(ValueError, match="Invalid learning rate: -1.0"):
        pretrain(folder, **run, learning_rate=-1.0, layerwise_lr=False)
    pretrain(folder, **run)  # what failed before its first checkpoint does not claim the folder
    for name, value in {"max_grad_norm": 0.5, "adam_beta2": 0.9, "learning_rate": 0.5, "block_size": 16}.items():
        with pytest.raises(FileExistsError, match=f"holds another run, which differs in {name}"):
            pretrain(folder, **run | {name: value})
    write_corpus(folder / "documents.jsonl", count=59)
    with pytest.raises(FileExistsError, match="holds a run on other data: corpus has changed since"):
        pretrain(folder, **run)
    (folder / "other").mkdir()
    (folder / "other" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="holds 'thesis.txt', and no run: choose another folder"):
        pretrain(folder, output_dir=folder / "other")
    with pytest.raises(FileExistsError, match="thesis.txt' is a file"):
        pretrain(folder, output_dir=folder / "other" / "thesis.txt")


@pytest.mark.parametrize("processes", [1, 2])
def test_every_held_out_token_counts_the_same(request, folder, processes):
    """However the blocks are put into batches, and whatever fills up the last one."""
    if processes == 2:
        folder = request.getfixturevalue("two")[0]
        run = folder / "in memory, whole"
    else:
        run = folder / "run"
        pretrain(folder, output_dir=run, per_device_eval_batch_size=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run).eval(), AutoTokenizer.from_pretrained(run)
    documents = load_corpus(str(folder / "documents.jsonl"), streaming=False, held_out=2)["held_out"]
    total, count = 0.0, 0
    for block in pack(documents, tokenizer, BLOCK).with_format("torch"):
        inputs = {name: block[name][None] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            losses = cross_entropy(model(**inputs).logits[0, :-1], block["labels"][1:], reduction="none")
        total += losses.double().sum().item()
        count += int((block["labels"][1:] != -100).sum())
    assert json.loads((run / "eval_results.json").read_text())["eval_loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_finished_run_trains_no_more(folder):
    run = {"output_dir": folder / "run", "streaming": True}
    pretrain(folder, **run)
    weights = load_file(folder / "run" / "model.safetensors")
    (folder / "run" / "model.safetensors").unlink()
    assert pretrain(folder, **run) == []
    again = load_file(folder / "run" / "model.safetensors")
    assert all(again[name].equal(weight) for name, weight in weights.items())
    assert not (folder / "run" / "checkpoint-7").exists()


# Tokens on disk


@pytest.mark.parametrize("streaming", [True, False])
def test_tokens_are_made_once(folder, streaming):
    """The second run has the folder alone, no corpus; a stream's holds the tokens that the first run needed."""
    first = pretrain(folder, output_dir=folder / "first", tokens_dir=folder / "tokens", streaming=streaming)
    (folder / "documents.jsonl").unlink()
    second = pretrain(folder, output_dir=folder / "second", tokens_dir=folder / "tokens", streaming=streaming)
    assert first == second
    about = json.loads((folder / "tokens" / "about.json").read_text())
    assert (about["blocks"]["train"] == STEPS * BATCH) == streaming
    assert not list(folder.glob(".writing-*"))


def test_tokens_come_back_as_they_were(tmp_path, tokenizer):
    blocks = pack(Dataset.from_dict({"text": make_documents(20)}), tokenizer, 32)
    streamed = pack(stream(make_documents(20)), tokenizer, 32)
    for name, train in (("whole", blocks), ("streamed", streamed)):
        save_tokens(tmp_path / name, {"train": train, "held_out": blocks}, tokenizer, ABOUT)
        loaded, own = load_tokens(tmp_path / name, ABOUT, tokenizer)
        assert loaded["train"].to_dict() == loaded["held_out"].to_dict() == blocks.to_dict()
        assert own.get_vocab() == tokenizer.get_vocab()


def test_other_tokens_are_named(tmp_path, tokenizer):
    folder = tmp_path / "tokens"
    blocks = {"train": pack(stream(make_documents(20)), tokenizer, 32).take(8)}
    save_tokens(folder, blocks, tokenizer, ABOUT)
    other = train_tokenizer(make_documents(100), 310)
    for about, used, num_blocks, problem in (
        (ABOUT | {"corpus": "b.jsonl"}, None, 0, r"made with corpus='documents.jsonl', not 'b.jsonl'"),
        (ABOUT | {"block_size": 64}, None, 0, "made with block_size=32, not 64"),
        (ABOUT, other, 0, "made with another tokenizer, of 300 tokens, than .*, of 310"),
        (ABOUT, tokenizer, 9, "holds 8 blocks to train on, and the run needs 9"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_tokens(folder, about, used, num_blocks)
    (folder / "about.json").unlink()
    with pytest.raises(ValueError, match="has no tokens that can be read"):
        load_tokens(folder, ABOUT)


def test_two_runs_that_make_the_same_tokens(tmp_path, tokenizer):
    """One makes them, the other waits."""
    with lock_of(tmp_path / "tokens"):
        waits = lock_of(tmp_path / "tokens")
        waits.timeout = 0
        with pytest.raises(Timeout):
            waits.acquire()


def test_tokens_are_never_half_written(tmp_path, tokenizer):
    def fail(block, index):
        if index == 5:
            raise ConnectionError("the hub does not answer")
        return block

    blocks = pack(stream(make_documents(20)), tokenizer, 32)
    (tmp_path / ".writing-tokens").mkdir()  # left by a process that was killed
    with pytest.raises(RuntimeError, match="was not written: .*the hub does not answer"):
        save_tokens(tmp_path / "tokens", {"train": blocks.map(fail, with_indices=True)}, tokenizer, ABOUT)
    assert list(tmp_path.iterdir()) == []


# Throughput


class Clock:
    """Stands for `perf_counter`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_throughput_is_arithmetic(tmp_path, monkeypatch):
    """A step takes 2 seconds, an evaluation 30 and a save 100; the steps alone are counted."""
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    reported = []

    class Slow(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock.wait(2)

        def on_log(self, args, state, control, logs=None, **kwargs):
            reported.append(dict(logs))

    counted = ThroughputCallback(tokens_per_step=48, flops_per_token=1000, peak_flops=96000)
    options = {"max_steps": 8, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}
    trainer = make_trainer(llama(), tmp_path, callbacks=[Slow(), counted], **options)
    evaluate, save = trainer.evaluation_loop, trainer.save_model
    trainer.evaluation_loop = lambda *args, **kwargs: clock.wait(30) or evaluate(*args, **kwargs)
    trainer.save_model = lambda *args, **kwargs: clock.wait(100) or save(*args, **kwargs)
    trainer.callback_handler.callbacks.sort(key=lambda callback: callback is counted)  # last, as reporters come first
    trainer.train()
    for logs in (trainer.state.log_history, reported):
        measured = [entry for entry in logs if "loss" in entry]
        assert [entry["tokens_per_second"] for entry in measured] == pytest.approx([24] * 4)
        assert [entry["model_flops_utilization"] for entry in measured] == pytest.approx([0.25] * 4)


def test_without_a_known_peak_there_is_no_utilisation(tmp_path, caplog):
    trainer = make_trainer(llama(), tmp_path, callbacks=[ThroughputCallback(48, 1000, None)], max_steps=2)
    trainer.train()
    assert "peak_flops=None" in caplog.text and caplog.text.count("peak_flops") == 1
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("tokens_per_second" in entry and "model_flops_utilization" not in entry for entry in entries)


def test_known_peaks():
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("a GPU of tomorrow") is None


def test_the_script_counts_tokens_and_flops(folder, monkeypatch):
    """What it gives the callback: sequences of all accumulated batches, three times the forward FLOPs."""
    made = []
    monkeypatch.setattr(throughput, "ThroughputCallback", lambda *args: made.append(args) or ThroughputCallback(*args))
    pretrain(folder, output_dir=folder / "run", max_steps=1, global_batch_size=3 * BATCH, peak_flops=1e12)
    config = AsymLoopConfig.from_pretrained(folder / "run")
    assert made == [(3 * BATCH * 32, 3 * budget(config, 32).flops_per_token, 1e12)]


# Recipes


@pytest.mark.parametrize("name", ["60m", "130m", "350m", "1b"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_recipe_trains_on_its_tokens(name, devices):
    """Twenty tokens a parameter, to the last one, with the same batch on any number of devices."""
    example = load_example("pretrain")
    args, training = example.parse_arguments([str(RECIPES[name]), "--output_dir", "run", "--use_cpu", "True"])
    batch = training.per_device_train_batch_size
    split = SimpleNamespace(train_batch_size=batch, world_size=devices, max_steps=training.max_steps)
    step_tokens = example.set_steps(args, split)
    assert step_tokens == batch * split.gradient_accumulation_steps * devices * args.block_size
    assert step_tokens == args.global_batch_size * args.block_size
    assert split.max_steps * step_tokens == args.tokens
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AsymLoopConfig.preset(args.preset))
    assert args.tokens == pytest.approx(20 * model.num_parameters(), rel=1e-3)
    assert args.preset == name and args.block_size == 1024 and training.bf16


def test_the_published_settings_are_those_of_the_largest_recipe():
    recipe = read_recipe(str(RECIPES["1b"]))
    published = {"learning_rate": 5e-4, "layerwise_max_ratio": 5, "layerwise_every": 100, "block_size": 1024}
    assert recipe | published == recipe


def test_options_replace_a_recipe(tmp_path):
    parse = load_example("pretrain").parse_arguments
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: 130m\nlearning_rate: 2e-3\nreport_to: [none]\nlr_scheduler_kwargs: {a: 1}\n")
    args, training = parse([str(recipe), "--preset", "60m", "--use_cpu", "True"])
    assert (args.preset, training.learning_rate, training.lr_scheduler_kwargs) == ("60m", 2e-3, {"a": 1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("learning_rates: 1", "learning_rates=1 is not a setting"),
        ("- preset", "holds list, where a mapping of names"),
        ("preset: {", "cannot be read"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_recipe_with_a_mistake(tmp_path, text, problem):
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_example("pretrain").parse_arguments([str(recipe)])


def test_gpu_hours_are_arithmetic():
    """60m: 84,219,648 parameters; the FLOPs of `asymloop inspect 60m`, forward and backward."""
    assert load_example("gpu_hours").costs(read_recipe(str(RECIPES["60m"]))) == (
        84_219_648,
        1_684_275_200 * 3 * 255_442_944,
    )


def test_gpu_hours_are_those_of_the_model_of_the_recipe():
    recipe = {"model": "fullloop", "preset": "60m", "config_overrides": "num_loops=5,local_window=4", "tokens": 10}
    config = AsymLoopConfig.preset("60m", num_loops=5, local_window=4).matched_full_loop()
    expected = budget(config, 1024)
    assert load_example("gpu_hours").costs(recipe) == (expected.parameters, 30 * expected.flops_per_token)


# Settings that cannot be


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"global_batch_size": 3}, "global_batch_size=3 is not allowed: it must be a multiple of 2"),
        ({"peak_flops": -1}, "peak_flops=-1.0 is not allowed: it must be above 0"),
        ({"block_size": 0}, "block_size=0 is not allowed: it must be at least 1"),
        ({"resume_from_checkpoint": "a"}, "resume_from_checkpoint is not allowed"),
        ({"tokens": 10, "max_steps": -1}, "tokens=10 is not allowed: a step alone takes 64"),
        ({"streaming": True, "max_steps": -1}, "max_steps=-1 is not allowed for a stream"),
    ],
)
def test_settings_that_cannot_be(folder, options, problem):
    with pytest.raises(ValueError, match=problem):
        pretrain(folder, output_dir=folder / "run", **options)
    with pytest.raises(ValueError, match=problem):
        pretrain(folder, output_dir=folder / "run", tokens_dir=folder / "tokens", **options)
    assert not (folder / "run").exists() and not (folder / "tokens").exists()


def test_a_tokenizer_that_is_larger_than_the_model(folder, tokenizer):
    train_tokenizer(make_documents(100), 310).save_pretrained(folder / "tokenizer")
    with pytest.raises(ValueError, match="vocab_size=300 is not allowed: the tokenizer has 310 tokens"):
        pretrain(folder, output_dir=folder / "run", tokenizer=folder / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer='.*nowhere' is not allowed: it has no tokenizer"):
        pretrain(folder, output_dir=folder / "run", tokenizer=folder / "nowhere")
    assert not (folder / "run").exists()


def test_an_unknown_preset_is_named(folder, capsys):
    with pytest.raises(SystemExit):
        pretrain(folder, output_dir=folder / "run", preset="70m")
    assert "--preset: invalid choice: '70m' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config", [asymloop_config(), asymloop_config().matched_full_loop()], ids=lambda c: c.model_type
)
def test_fsdp2_finds_the_layers_by_itself(config):
    model = AutoModelForCausalLM.from_config(config)
    layers = {type(layer).__name__ for layer in model.modules() if "Layer" in type(layer).__name__}
    assert model._no_split_modules == layers
