"""`asymloop eval`: lm-evaluation-harness' own numbers, at every loop count from one reading of each text."""

import json
import shutil

import lm_eval
import pytest
import torch
from conftest import KINDS, SIZES, tokens
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from small_corpus import make_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from asymloop_hf.cli import main
from asymloop_hf.evaluation import (
    COMMONSENSE,
    COMMONSENSE_DATA,
    evaluate,
    format_scores,
    local_tasks,
    scores,
    task_manager,
)
from asymloop_hf.loop_counts_lm import LoopCountsLM
from asymloop_hf.loop_logits import logits_by_loops
from asymloop_hf.tokenizer import train_tokenizer

every_model = pytest.mark.parametrize("name", KINDS)


@torch.no_grad()
@every_model
def test_one_forward_pass_has_the_logits_of_every_loop_count(name):
    model, input_ids = KINDS[name](), tokens(2, 9)
    counts = [3, 1, 2, 5]
    for count, logits in zip(counts, logits_by_loops(model, input_ids, counts), strict=True):
        torch.testing.assert_close(logits, model(input_ids, num_loops=count).logits)


# A few questions in the columns of each dataset.
WORDS = ["river", "stone", "meadow", "winter"]


def question(i: int) -> dict[str, dict]:
    text, answers = f"The otter {i} swims to the", [f"{word} {i}" for word in WORDS]
    letters = ["A", "B", "C", "D"]
    multiple_choice = {"choices": {"text": answers, "label": letters}, "answerKey": letters[i % 4]}
    return {
        "openbookqa": {"id": str(i), "question_stem": text, **multiple_choice},
        "arc_challenge": {"id": str(i), "question": text, **multiple_choice},
        "arc_easy": {"id": str(i), "question": text + " small", **multiple_choice},
        "winogrande": {
            "sentence": f"The {WORDS[i % 4]} was cold, so the _ froze.",
            "option1": "river",
            "option2": "stone",
            "answer": str(i % 2 + 1),
        },
        "hellaswag": {
            "activity_label": "Swimming",
            "ctx_a": text,
            "ctx_b": "and then",
            "endings": answers,
            "label": str(i % 4),
        },
        "social_iqa": {
            "context": text + " river.",
            "question": "Why?",
            **{f"answer{letter}": answer for letter, answer in zip("ABC", answers, strict=False)},
            "label": str(i % 3 + 1),
        },
        "piqa": {"goal": text, "sol1": answers[0], "sol2": answers[1], "label": i % 2},
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for task, (dataset, split, _) in COMMONSENSE_DATA.items():
        (folder / dataset).mkdir(parents=True)
        Dataset.from_list([question(i)[task] for i in range(6)]).to_parquet(folder / dataset / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One of each kind, and a Llama."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer(make_documents(50), 300)
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    for name, make in KINDS.items():
        make(**fields).save_pretrained(folder / name)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **fields}, num_hidden_layers=2)).save_pretrained(
        folder / "llama"
    )
    for name in (*KINDS, "llama"):
        tokenizer.save_pretrained(folder / name)
    return folder


def plain(checkpoint, data_dir, **fields) -> dict:
    """The numbers of lm-evaluation-harness by itself."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **fields)
    spec = local_tasks(list(COMMONSENSE_DATA), data_dir)
    lm = HFLM(pretrained=model, tokenizer=str(checkpoint), backend="causal", batch_size=4, device="cpu")
    return simple_evaluate(model=lm, tasks=[spec], task_manager=task_manager(), num_fewshot=0, log_samples=False)


@every_model
def test_every_loop_count_has_the_numbers_of_plain_lm_eval(name, checkpoints, data_dir):
    path = checkpoints / name
    by_count = evaluate(str(path), data_dir=data_dir, loop_counts=[1, 4], batch_size=5, device="cpu")
    assert list(by_count) == [1, 4]
    for count, results in by_count.items():
        derived = {"num_loops": count}
        assert scores(results) == scores(plain(path, data_dir, **derived))
    means = scores(by_count[4])
    accuracies = [means[task]["acc"] for task in COMMONSENSE_DATA]
    assert means["mean"]["acc"] == pytest.approx(sum(accuracies) / 7)
    with_norm = [means[task]["acc_norm"] for task in COMMONSENSE_DATA if task not in ("winogrande", "social_iqa")]
    assert means["mean"]["acc_norm"] == pytest.approx(sum(with_norm) / 5)


@pytest.fixture
def other_tasks(tmp_path):
    """Tasks that are not multiple-choice: one that lets the model generate, one that takes the loss of whole texts."""
    Dataset.from_list([{"text": f"{word} {word} and {WORDS[0]}."} for word in WORDS]).to_parquet(
        tmp_path / "a.parquet"
    )
    common = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "a.parquet")}}}
    common |= {"test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}"}
    generation = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    says = {"output_type": "generate_until", "generation_kwargs": generation, "metric_list": metrics}
    reads = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "metric_list": [{"metric": "word_perplexity"}]}
    for name, fields in {"says": says, "reads": reads}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(common | {"task": name} | fields))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.parametrize(("name", "batch_size"), [("asymloop, window of 3", "auto"), ("full loop", 3)])
def test_generated_and_whole_texts_are_those_of_each_loop_count(name, checkpoints, other_tasks, batch_size):
    tokenizer, counts = AutoTokenizer.from_pretrained(checkpoints / name), [1, 4]

    def answers(lm) -> tuple[list, float]:
        found = simple_evaluate(model=lm, tasks=["says", "reads"], task_manager=other_tasks, bootstrap_iters=0)
        said = [sample["filtered_resps"] for sample in found["samples"]["says"]]
        return said, found["results"]["reads"]["word_perplexity,none"]

    model = AutoModelForCausalLM.from_pretrained(checkpoints / name).eval()
    lm = LoopCountsLM(model, tokenizer, counts, batch_size, max_batch_size=8, device="cpu")
    for count in counts:
        lm.num_loops = count
        derived = AutoModelForCausalLM.from_pretrained(checkpoints / name, num_loops=count).eval()
        alone = HFLM(pretrained=derived, tokenizer=tokenizer, backend="causal", batch_size=3, device="cpu")
        (said, perplexity), (said_alone, perplexity_alone) = answers(lm), answers(alone)
        assert said == said_alone and perplexity == pytest.approx(perplexity_alone, rel=1e-4)


def test_a_task_without_accuracies_shows_its_own_metrics():
    row = {"alias": "wikitext", "word_perplexity,none": 31.25, "word_perplexity_stderr,none": "N/A"}
    results = {
        "results": {"wikitext": row, "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.01, "f1,none": 1.0}},
        "n-samples": {"wikitext": {}, "piqa": {}},
    }
    assert scores(results) == {
        "wikitext": {"word_perplexity": 31.25, "word_perplexity_stderr": "N/A"},
        "piqa": {"acc": 0.5, "acc_stderr": 0.01},
        "mean": {"acc": 0.5},
    }
    rows = [line.split() for line in format_scores({1: results, 2: results}).splitlines()]
    assert ["wikitext", "word_perplexity", "31.25", "31.25"] in rows
    assert ["piqa", "acc", *["50.0", "±", "1.0"] * 2] in rows


def test_a_model_without_loops(checkpoints, data_dir):
    results = evaluate(str(checkpoints / "llama"), ["piqa", "hellaswag"], data_dir, limit=4, device="cpu")
    assert list(results) == [None]
    assert results[None]["n-samples"]["piqa"]["effective"] == 4
    assert set(scores(results[None])) == {"piqa", "hellaswag", "mean"}


def test_the_group_is_known_to_lm_eval():
    assert COMMONSENSE in task_manager().all_groups


def test_the_command_prints_a_table_and_writes_the_results(checkpoints, data_dir, tmp_path, capsys):
    command = ["eval", str(checkpoints / "asymloop"), "--data-dir", str(data_dir), "--device", "cpu"]
    command += ["--tasks", "piqa,arc_easy", "--num-loops", "1,3", "--output", str(tmp_path / "results.json")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["accuracy", "in", "%", "1", "loop", "3", "loops"] for line in lines)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["3"]["scores"]["piqa"]["acc"] == written["3"]["lm_eval"]["results"]["piqa"]["acc,none"]
    assert main(command) == 2
    assert "results.json' is not allowed: the file exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "piqa, pika"], "tasks=['pika'] is not allowed: lm-eval has no such tasks"),
        (["--data-dir", "nowhere"], "data_dir='nowhere' lacks the task 'openbookqa': there is no file"),
        (["--tasks", "lambada_openai", "--data-dir", "."], "tasks='lambada_openai' is not allowed with data_dir"),
        (["--num-loops", "2,2"], "num_loops=[2, 2] is not allowed"),
        (["--output", "nowhere/results.json"], "output='nowhere/results.json' is not allowed: its folder must exist"),
    ],
)
def test_what_cannot_be_is_said(options, message, checkpoints, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(checkpoints / "asymloop"), *options]) == 2
    assert message in capsys.readouterr().err


def test_data_of_something_else_are_named(checkpoints, data_dir, tmp_path):
    files = {name: tmp_path / folder / f"{split}.parquet" for name, (folder, split, _) in COMMONSENSE_DATA.items()}
    for file in files.values():
        file.parent.mkdir(parents=True)
    whole = (data_dir / files["piqa"].relative_to(tmp_path)).read_bytes()
    files["piqa"].write_bytes(whole[: len(whole) // 2])
    Dataset.from_dict({"goal": ["a"], "label": [0]}).to_parquet(files["hellaswag"])
    with pytest.raises(ValueError, match=r"validation.parquet' of the task 'piqa' is not a whole parquet file"):
        evaluate(str(checkpoints / "asymloop"), ["piqa"], tmp_path)
    with pytest.raises(
        ValueError, match="'hellaswag' lacks the columns activity_label, ctx_a, ctx_b, endings; it has goal"
    ):
        evaluate(str(checkpoints / "asymloop"), ["hellaswag"], tmp_path)


def test_a_hub_that_does_not_answer(checkpoints, monkeypatch):
    def offline(**options):
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr(lm_eval, "simple_evaluate", offline)
    with pytest.raises(
        ConnectionError, match="Couldn't reach 'baber/piqa' on the Hub. Without a network, data_dir has"
    ):
        evaluate(str(checkpoints / "asymloop"), ["piqa"], device="cpu")


def test_weights_that_are_cut_off_or_missing(checkpoints, data_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints / "asymloop", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match=r"broken' is not allowed: its weights cannot be read \(Error while deserializing"
    ):
        evaluate(str(broken), ["piqa"], data_dir)
    weights.unlink()
    with pytest.raises(ValueError, match="broken' is not allowed: its weights cannot be read .*no file named"):
        evaluate(str(broken), ["piqa"], data_dir)


def test_a_context_that_is_too_short_for_an_answer(checkpoints, data_dir, tmp_path):
    shutil.copytree(checkpoints / "asymloop", tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 3}))
    with pytest.raises(ValueError, match="max_position_embeddings=3 is too short: an answer of .* has [0-9]+ tokens"):
        evaluate(str(tmp_path / "short"), ["piqa"], data_dir, batch_size=2, device="cpu")


def test_loops_of_a_llama_and_a_tokenizer_that_does_not_fit_are_refused(checkpoints, data_dir, tmp_path):
    with pytest.raises(ValueError, match=r"num_loops=\[2\] is not allowed: 'llama' has no loops"):
        evaluate(str(checkpoints / "llama"), ["piqa"], data_dir, loop_counts=[2])
    KINDS["asymloop"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer"):
        evaluate(str(tmp_path), ["piqa"], data_dir)
    train_tokenizer(make_documents(50), 300).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vocab_size=97 is not allowed: the tokenizer has .* tokens"):
        evaluate(str(tmp_path), ["piqa"], data_dir)
