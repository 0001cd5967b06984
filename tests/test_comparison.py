"""`asymloop compare`: matched runs that are done once, resumed exactly, and reported as they are."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64decode
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from datasets import IterableDataset, load_from_disk
from filelock import FileLock
from small_corpus import make_documents, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from asymloop_hf import cli, comparison, comparison_data, run_pool
from asymloop_hf.comparison import Comparison, choose_rates, compare, next_rate
from asymloop_hf.comparison_data import prepare_data
from asymloop_hf.comparison_report import report_page
from asymloop_hf.comparison_results import summarise
from asymloop_hf.comparison_run import do_run
from asymloop_hf.perplexity import perplexity

MODELS = ("full_loop", "asymloop+llr", "asymloop+window=2", "llama")
STEPS, BATCH, BLOCK = 5, 4, 32


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Models of 32 channels with a layer in each stack, and little held-out text."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 300, "block_size": BLOCK, "num_stack_layers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(comparison.SIZES, "tiny", replace(comparison.SIZES["tiny"], **shape))
        patch.setattr(comparison_data, "HELD_OUT_TOKENS", 400)
        patch.setattr(comparison_data, "HELD_OUT_BLOCKS", 4)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents.jsonl", count=80, sentences=8)


def a_comparison(output, corpus, **settings) -> Comparison:
    defaults = {
        "models": MODELS,
        "size": "tiny",
        "corpus": corpus,
        "tokens": STEPS * BATCH * BLOCK - 1,
        "seeds": 2,
        "batch_size": BATCH,
        "rates": (3e-3,),
        "tune": "baseline",
        "tuning_tokens": BATCH * BLOCK,
    }
    return Comparison(output=output, **{**defaults, **settings})


@pytest.fixture(scope="module")
def done(tmp_path_factory, corpus, small_and_quick) -> Path:
    """A finished comparison of four models with two seeds, done by two processes."""
    output = tmp_path_factory.mktemp("done") / "comparison"
    compare(a_comparison(output, corpus), processes=2)
    return output


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_run_is_there_and_nothing_else(done):
    assert sorted(path.name for path in done.iterdir() if path.name != ".lock") == [
        "compare.json",
        "data",
        "report.html",
        "results.json",
        "runs",
    ]
    runs = sorted(path.relative_to(done / "runs").as_posix() for path in done.glob("runs/*/*"))
    assert runs == sorted(f"{model}/rate-0.003-seed-{seed}" for model in MODELS for seed in (0, 1))
    for path in done.glob("runs/*/*"):
        assert sorted(file.name for file in path.iterdir()) == ["model", "result.json"]


def test_the_models_are_matched(done):
    models = read(done / "results.json")["models"]
    assert len({model["parameters"] for name, model in models.items() if name != "llama"}) == 1
    assert {model["effective_depth"] for model in models.values()} == {4}
    assert {model["tokens"] for model in models.values()} == {STEPS * BATCH * BLOCK}
    assert {model["steps"] for model in models.values()} == {STEPS}


def test_results_are_those_of_the_saved_models(done):
    documents = load_from_disk(str(done / "data" / "held_out_documents"))["input_ids"]
    for name, summary in read(done / "results.json")["models"].items():
        for seed, loss in zip(summary["seeds"], summary["losses"], strict=True):
            folder = done / "runs" / name / f"rate-0.003-seed-{seed}" / "model"
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
            (measured,) = perplexity(model, documents).values()
            assert loss == pytest.approx(measured.loss, abs=1e-6)
            assert summary["held_out_tokens"] == measured.tokens


def test_differences_are_taken_seed_by_seed(done):
    models = read(done / "results.json")["models"]
    baseline = models["full_loop"]["losses"]
    assert models["full_loop"]["compared_with"] is None and models["full_loop"]["differences"] == []
    for name in MODELS[1:]:
        assert models[name]["compared_with"] == "full_loop"
        expected = [[seed, models[name]["losses"][seed] - baseline[seed]] for seed in (0, 1)]
        assert models[name]["differences"] == expected


def test_the_table_has_means_and_spreads(done):
    results = read(done / "results.json")
    for name, summary in results["models"].items():
        (line,) = (line for line in results["table"].splitlines() if line.split()[0] == name)
        assert f"{mean(summary['losses']):.3f} ± {stdev(summary['losses']):.3f}" in line
        values = [math.exp(loss) for loss in summary["losses"]]
        assert f"{mean(values):.2f} ± {stdev(values):.2f}" in line


def test_models_are_compared_with_those_of_their_depth(done):
    runs = [read(path) for path in done.glob("runs/*/*/result.json")]
    for run in runs:
        if run["settings"]["model"] in ("llama", "asymloop+window=2"):
            run["training"]["effective_depth"] = 12
    models = summarise(MODELS, runs)["models"]
    compared = {name: summary["compared_with"] for name, summary in models.items()}
    assert compared == {
        "full_loop": None,
        "asymloop+llr": "full_loop",
        "asymloop+window=2": None,
        "llama": "asymloop+window=2",
    }


def test_the_report_is_one_file_with_every_model_and_plot(done):
    page = (done / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "<script" not in page and "@import" not in page
    plots = [b64decode(plot).decode() for plot in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Held-out loss",
        "Final perplexity",
        "Loss curves",
        "Loops at test time",
        "Position in the document",
        "Attention to the global KV",
        "Spectra",
        "Layerwise rates: asymloop+llr",
        "Budget",
    ]
    assert len(plots) == len(titles) - 2 and all("<svg" in plot and "http://localhost" not in plot for plot in plots)
    for name, summary in read(done / "results.json")["models"].items():
        assert page.count(f"<td>{name}</td>") >= 2
        assert f"{mean(summary['losses']):.3f} ± {stdev(summary['losses']):.3f}" in page


def test_loops_shares_alphas_and_rates_are_measured(done):
    models = read(done / "results.json")["models"]
    assert list(models["full_loop"]["loss_by_loops"]) == ["1", "2", "3", "4"]
    assert list(models["llama"]["loss_by_loops"]) == ["1"]
    assert list(models["asymloop+llr"]["loss_by_loops"]) == ["1", "2", "3", "4", "5", "6"]
    assert models["full_loop"]["attention_share"] is None
    shares = torch.tensor(models["asymloop+llr"]["attention_share"])
    assert shares.shape == (3, 1) and shares.min() > 0 and shares.max() < 1
    assert len(models["asymloop+llr"]["alphas"]) == 2 * 7 and len(models["llama"]["alphas"]) == 4 * 7
    assert models["asymloop+llr"]["layer_rates"] and not models["full_loop"]["layer_rates"]


def forbid_training(monkeypatch):
    def no_pool(*args, **kwargs):
        raise AssertionError("a run was started")

    monkeypatch.setattr(run_pool, "ProcessPoolExecutor", no_pool)


def test_the_same_command_again_trains_nothing(done, corpus, monkeypatch):
    before = read(done / "results.json")
    (done / "report.html").unlink()
    forbid_training(monkeypatch)
    after = compare(a_comparison(done, corpus), processes=1)
    assert after["table"] == before["table"] and (done / "report.html").exists()


def test_models_and_seeds_can_be_added(done, corpus, monkeypatch):
    forbid_training(monkeypatch)
    fewer = compare(a_comparison(done, corpus, models=MODELS[:2], seeds=1), processes=1)
    assert list(fewer["models"]) == list(MODELS[:2]) and fewer["models"]["full_loop"]["seeds"] == [0]
    with pytest.raises(AssertionError, match="a run was started"):
        compare(a_comparison(done, corpus, models=(*MODELS, "asymloop")), processes=1)
    with pytest.raises(AssertionError, match="a run was started"):
        compare(a_comparison(done, corpus, seeds=3), processes=1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokens": 2 * STEPS * BATCH * BLOCK}, "tokens"),
        ({"batch_size": 2}, "batch_size"),
        ({"rates": (1e-3,), "tuning_tokens": 7}, "tuning_tokens, rates"),
        ({"corpus": "installed-docs"}, "corpus"),
    ],
)
def test_another_comparison_in_the_folder(done, corpus, settings, named):
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    with pytest.raises(FileExistsError, match=f"holds another comparison, which differs in {named}: choose another"):
        compare(a_comparison(done, **{"corpus": corpus, **settings}), processes=1)
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_two_commands_in_one_folder(done, corpus):
    with FileLock(done / ".lock"), pytest.raises(FileExistsError, match="is in use by another comparison"):
        compare(a_comparison(done, corpus), processes=1)


def test_a_folder_with_something_else(tmp_path, corpus):
    (tmp_path / "thesis.txt").write_text("all of it", encoding="utf-8")
    with pytest.raises(FileExistsError, match="holds something else"):
        compare(a_comparison(tmp_path, corpus), processes=1)
    with pytest.raises(FileExistsError, match="is a file"):
        compare(a_comparison(tmp_path / "thesis.txt", corpus), processes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


class InterruptAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("model", MODELS)
def test_an_interrupted_run_goes_on_to_the_same_result(done, corpus, tmp_path, model):
    (tmp_path / "data").symlink_to(done / "data")
    run = a_comparison(tmp_path, corpus).run(model, 3e-3, seed=1)
    with pytest.raises(KeyboardInterrupt):
        do_run(run, tmp_path, [InterruptAt(4)])
    checkpoints = sorted((tmp_path / run.folder / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["checkpoint-3"]
    half = checkpoints[0].with_name("checkpoint-4")  # a checkpoint that was not written to its end
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")

    resumed, whole = do_run(run, tmp_path), read(done / run.folder / "result.json")
    for found in (resumed, whole):
        found["training"].pop("seconds_per_step")
    assert resumed == whole
    assert sorted(path.name for path in (tmp_path / run.folder).iterdir()) == ["model", "result.json"]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda pid: os.killpg(pid, signal.SIGINT), 130),  # Ctrl-C at the terminal
        (lambda pid: os.kill(pid, signal.SIGKILL), -signal.SIGKILL),
    ],
    ids=["interrupted", "killed"],
)
def test_a_command_that_is_ended_leaves_no_process_behind(corpus, tmp_path, end, status):
    output = tmp_path / "output"
    options = ["--corpus", corpus, "--models", "full_loop,asymloop", "--seeds", "1", "--rates", "3e-3"]
    options += ["--batch-size", "1", "--tokens", "3000", "--processes", "1", "--output", str(output)]
    with subprocess.Popen(
        [sys.executable, "-m", "asymloop_hf.cli", "compare", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test runner may ignore it
    ) as process:
        while process.poll() is None and not list(output.glob("runs/*/*/checkpoints/*/trainer_state.json")):
            time.sleep(0.05)
        end(process.pid)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors[-2000:]
    assert status != 130 or f"finished runs are kept in {output}; the same command goes on" in errors
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_a_run_that_diverges_is_reported_as_it_is(done, corpus, tmp_path):
    (tmp_path / "data").symlink_to(done / "data")
    diverged = do_run(a_comparison(tmp_path, corpus).run("full_loop", 1e30, seed=1), tmp_path)
    assert not math.isfinite(diverged["training"]["held_out_loss"])
    runs = [read(path) for path in done.glob("runs/*/rate-0.003-seed-0/result.json")]
    for with_others in ([*runs, diverged], [diverged]):
        results = read(done / "results.json") | summarise(MODELS, with_others)
        assert re.search(r"^full_loop .* nan", results["table"], re.MULTILINE)
        assert report_page(results).count("<section>") >= 6


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (BrokenProcessPool(), ChildProcessError, "was killed, perhaps as memory ran out.*the same command goes on"),
        (ValueError("nothing fits"), ValueError, "^runs/full_loop/rate-0.003-seed-0: nothing fits"),
    ],
)
def test_a_run_that_fails_is_named(tmp_path, corpus, monkeypatch, failure, error, message):
    class Pool:
        def __init__(self, *args):
            self.shutdown = lambda **options: None

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

        def submit(self, *args):
            future = Future()
            future.set_exception(failure)
            return future

    monkeypatch.setattr(run_pool, "ProcessPoolExecutor", Pool)
    run = a_comparison(tmp_path, corpus).run("full_loop", 3e-3, seed=0)
    with pytest.raises(error, match=message):
        list(run_pool.do_runs([run], tmp_path, 1, "Training"))


def test_the_best_rate_is_bracketed(done, corpus, monkeypatch):
    """With losses that are best at 0.001, the search goes on below the rates that were given, and stops there."""
    asked = []

    def do_runs(plan, output, processes, title):
        asked.extend((run.model, run.training.learning_rate) for run in plan)
        assert all(not run.measured and run.training.steps == 1 for run in plan)
        assert len({run.training.seed for run in plan} & {0, 1}) == 0
        yield [
            {
                "settings": {"model": run.model, "training": {"learning_rate": run.training.learning_rate}},
                "training": {"held_out_loss": abs(math.log(run.training.learning_rate / 1e-3))},
            }
            for run in plan
        ]

    monkeypatch.setattr(comparison, "do_runs", do_runs)
    rates, tuning = choose_rates(a_comparison(done, corpus, rates=(4e-3, 8e-3)), processes=1)
    assert rates == dict.fromkeys(MODELS, 1e-3)
    assert [rate for rate, _ in tuning["full_loop"]] == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    assert {model for model, _ in asked} == {"full_loop"}

    asked.clear()
    models = (*MODELS, "asymloop", "asymloop+decoder_init=embedding")
    rates, tuning = choose_rates(a_comparison(done, corpus, rates=(1e-3, 5e-4, 2e-3), models=models, tune="kind"), 1)
    assert list(tuning) == ["full_loop", "asymloop+llr", "asymloop+window=2", "llama"]  # the first of each kind
    assert rates == dict.fromkeys(models, 1e-3) and len(asked) == 4 * 3


def test_a_rate_that_diverges_is_not_the_best():
    assert next_rate({1e-3: 5.0, 2e-3: 4.0, 4e-3: math.nan}) is None
    assert next_rate({1e-3: 5.0, 2e-3: 4.0}) == 4e-3
    assert next_rate({1e-3: math.nan, 2e-3: math.nan}) == 5e-4
    assert next_rate({2.0**i: -i for i in range(8)}) is None  # enough is enough


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, "size='huge' is not allowed: it must be one of tiny, small, medium, 60m"),
        ({"models": ("full_loop", "universal")}, "'universal' is not allowed"),
        ({"models": ("full_loop", "full_loop")}, "models='full_loop,full_loop' is not allowed: it must be different"),
        ({"models": ()}, "models=''"),
        ({"models": ("asymloop+num_loops=0",)}, "num_loops=0"),
        ({"tokens": 0}, "tokens=0 is not allowed: it must be a whole number of at least 1"),
        ({"seeds": 101}, "seeds=101 is not allowed: it must be a whole number from 1 to 100"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rates": ()}, "rates="),
        ({"rates": (1e-3, -1.0)}, "rates="),
        ({"tune": "all"}, "tune='all' is not allowed: it must be one of baseline, kind"),
        ({"tuning_tokens": 10**9}, "tuning_tokens=1000000000 is not allowed"),
    ],
)
def test_settings_that_are_not_allowed(tmp_path, corpus, settings, message):
    with pytest.raises(ValueError, match=message):
        a_comparison(tmp_path, corpus, **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "many"], "'many' is not allowed: it must be such as 3000000, 500K, 3M or 10B"),
        (["--rates", "fast"], "'fast' is not allowed: it must be numbers such as 1e-3,2e-3"),
        (["--processes", "0"], "processes=0 is not allowed"),
        (["--corpus", "no/such/place"], "no/such/place"),
    ],
)
def test_options_that_are_not_allowed(tmp_path, capsys, options, message):
    try:
        status = cli.main(["compare", "--output", str(tmp_path / "output"), *options])
    except SystemExit as refused:
        status = refused.code
    assert status == 2 and message in capsys.readouterr().err


def test_numbers_of_tokens():
    texts = {"3000000": 3_000_000, "3_000_000": 3_000_000, "500K": 500_000, "3M": 3_000_000, "1.5B": 1_500_000_000}
    assert {text: comparison.tokens(text) for text in texts} == texts


def test_a_corpus_with_too_few_tokens(tmp_path, corpus, monkeypatch):
    with pytest.raises(ValueError, match=r"tokens=.* are not allowed with corpus=.*: it has .* tokens to train on"):
        compare(a_comparison(tmp_path / "output", corpus, tokens=10**6), processes=1)
    assert not (tmp_path / "output" / "data").exists() and not list(tmp_path.glob("output/.writing*"))
    corrected = a_comparison(tmp_path / "output", corpus)
    (tmp_path / "output" / ".writing-data").mkdir()  # of a command that was killed
    forbid_training(monkeypatch)
    with pytest.raises(AssertionError, match="a run was started"):  # what had no data yet does not claim the folder
        compare(corrected, processes=1)
    assert read(tmp_path / "output" / "compare.json") == corrected.fixed()
    assert not list(tmp_path.glob("output/.writing*"))


def test_a_download_that_stops_leaves_nothing_half_written(tmp_path, corpus, monkeypatch):
    whole = comparison_data.load_corpus(corpus)

    def stops():
        yield from whole["train"].select(range(30))
        raise ConnectionError("the hub has gone away")

    broken = {"train": IterableDataset.from_generator(stops), "held_out": whole["held_out"]}
    size = comparison.SIZES["tiny"]
    monkeypatch.setattr(comparison_data, "load_corpus", lambda name: broken)
    with pytest.raises(ConnectionError, match="gone away"):
        prepare_data(tmp_path, corpus, size, 8)
    assert list(tmp_path.iterdir()) == []

    streamed = {
        "train": IterableDataset.from_generator(lambda: ({"text": text} for text in make_documents(60))),
        "held_out": whole["held_out"],
    }
    monkeypatch.setattr(comparison_data, "load_corpus", lambda name: streamed)
    prepare_data(tmp_path, corpus, size, 8)
    assert len(load_from_disk(str(tmp_path / "data" / "train"))) == 8
