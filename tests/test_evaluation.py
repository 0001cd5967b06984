"""`asymloop eval`: lm-evaluation-harness' own numbers, at every loop count from one reading of each text."""

import json

import pytest
import torch
from conftest import KINDS, SIZES, tokens
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from small_corpus import make_documents
from transformers import AutoModelForCausalLM, LlamaConfig

from asymloop_hf.cli import main
from asymloop_hf.evaluation import COMMONSENSE, COMMONSENSE_DATA, evaluate, local_tasks, scores, task_manager
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
    for task, (dataset, split) in COMMONSENSE_DATA.items():
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
    assert any(line.split() == ["%", "1", "loop", "3", "loops"] for line in lines)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["3"]["scores"]["piqa"]["acc"] == written["3"]["lm_eval"]["results"]["piqa"]["acc,none"]
    assert main(command) == 2
    assert "results.json' is not allowed: the file exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "piqa,pika"], "tasks=['pika'] is not allowed: lm-eval has no such tasks"),
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


def test_loops_of_a_llama_and_a_tokenizer_that_does_not_fit_are_refused(checkpoints, data_dir, tmp_path):
    with pytest.raises(ValueError, match=r"num_loops=\[2\] is not allowed: 'llama' has no loops"):
        evaluate(str(checkpoints / "llama"), ["piqa"], data_dir, loop_counts=[2])
    KINDS["asymloop"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer"):
        evaluate(str(tmp_path), ["piqa"], data_dir)
    train_tokenizer(make_documents(50), 300).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vocab_size=97 is not allowed: the tokenizer has .* tokens"):
        evaluate(str(tmp_path), ["piqa"], data_dir)
