"""Training: gradient checkpointing, Trainer, the generic heads, initialisation."""

import copy

import pytest
import torch
from conftest import BACKBONES, asymloop, asymloop_config, fullloop, fullloop_config, tokens
from datasets import Dataset
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

MAKERS = {
    "asymloop": asymloop,
    "asymloop, window of 3": lambda: asymloop(local_window=3),
    "full loop": fullloop,
    "olmo": lambda: asymloop(**BACKBONES["olmo"]),
    "olmo2": lambda: asymloop(**BACKBONES["olmo2"]),
    "olmoe": lambda: asymloop(**BACKBONES["olmoe"]),
    "full loop, mixtral": lambda: fullloop(**BACKBONES["mixtral"]),
}


def gradients(model, input_ids):
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_gradient_checkpointing_gives_the_same_gradients(name, use_reentrant, float64):
    model, input_ids = MAKERS[name]().train(), tokens(2, 9)
    expected = gradients(model, input_ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for gradient, expected_gradient in zip(gradients(model, input_ids), expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_gradient_checkpointing_recomputes_each_visit_once():
    model, input_ids = asymloop().train(), tokens(2, 9)
    calls = []
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    model.gradient_checkpointing_enable()
    model(input_ids, labels=input_ids).loss.backward()
    assert len(calls) == 2 * model.config.num_hidden_layers


def documents() -> Dataset:
    rows = [tokens(1, 12, seed)[0].tolist() for seed in range(8)]
    position_ids = [list(range(5)) + list(range(7))] * 8
    return Dataset.from_dict({"input_ids": rows, "labels": rows, "position_ids": position_ids})


def make_trainer(model, folder, **options) -> Trainer:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
        logging_steps=1,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=documents(), eval_dataset=documents())


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
@pytest.mark.parametrize("name", MAKERS)
def test_trainer_learns(name, options, tmp_path):
    trainer = make_trainer(MAKERS[name](), tmp_path, **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("name", MAKERS)
def test_trainer_resumes_where_it_stopped(name, tmp_path):
    trainer = make_trainer(MAKERS[name](), tmp_path)
    trainer.train()
    torch.manual_seed(1)
    resumed = make_trainer(MAKERS[name](), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(trainer) and len(losses(trainer)) == 4
    for weight, expected in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(weight, expected)


def documents_of_many_lengths() -> Dataset:
    """Padded rows with 2 to 9 labels, so that a mean over rows is not a mean over tokens."""
    input_ids = tokens(8, 9)
    mask = torch.arange(9) < torch.arange(2, 10)[:, None]
    labels = input_ids.masked_fill(~mask, -100)
    columns = {"input_ids": input_ids * mask, "attention_mask": mask.long(), "labels": labels}
    return Dataset.from_dict({name: column.tolist() for name, column in columns.items()})


@pytest.mark.parametrize("name", MAKERS)
def test_gradient_accumulation_is_one_big_batch(name, tmp_path):
    options = {"max_steps": 3, "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no", "logging_steps": 1}
    options |= {"learning_rate": 0.05, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    model, trainers = MAKERS[name](), []
    for size in (8, 2):
        arguments = TrainingArguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, **options
        )
        dataset = documents_of_many_lengths()
        trainers.append(Trainer(model=copy.deepcopy(model), args=arguments, train_dataset=dataset))
        trainers[-1].train()
    big, accumulated = trainers
    assert losses(accumulated) == pytest.approx(losses(big), rel=1e-5)
    assert losses(big)[-1] < losses(big)[0]
    for weight, expected in zip(accumulated.model.parameters(), big.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_loaded_in_bfloat16_learns(name, tmp_path):
    MAKERS[name]().save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    trainer = make_trainer(model, tmp_path, bf16=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_a_classifier_can_be_trained(make_config, tmp_path):
    model = AutoModelForSequenceClassification.from_config(make_config(num_labels=3))
    rows = Dataset.from_dict({"input_ids": tokens(6, 9).tolist(), "label": [0, 1, 2] * 2})
    arguments = TrainingArguments(
        tmp_path, max_steps=20, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.eval()
    predictions = model(tokens(6, 9)).logits.argmax(-1)
    assert predictions.tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_stays_close_to_float32(name, dtype):
    model, input_ids = MAKERS[name](), tokens(2, 9)
    with sdpa_kernel(SDPBackend.MATH):
        expected = model(input_ids).logits.softmax(-1)
        logits = model.to(dtype)(input_ids).logits
    assert logits.dtype == dtype
    assert (logits.float().softmax(-1) - expected).abs().max() < 0.1


def test_attention_dropout_acts_in_training_only():
    model, input_ids = asymloop(attention_dropout=0.5), tokens(1, 9)
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)
    model.train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"asymloop": 0.3, "fullloop": 1.0}),
        ({"embedding_initializer_range": 0.1}, 0.1),
        ({"tie_word_embeddings": True}, 0.02),
        ({"tie_word_embeddings": True, "embedding_initializer_range": 0.05}, 0.05),
    ],
)
@pytest.mark.parametrize("make", [asymloop, fullloop])
def test_the_embeddings_start_at_their_own_scale(make, fields, expected):
    model = make(vocab_size=2000, initializer_range=0.02, pad_token_id=None, **fields)
    weight = model.get_input_embeddings().weight
    expected = expected if isinstance(expected, float) else expected[model.config.model_type]
    torch.testing.assert_close(weight.std(), torch.tensor(expected), rtol=0.05, atol=0)
    if not model.config.tie_word_embeddings:
        torch.testing.assert_close(model.lm_head.weight.std(), torch.tensor(0.02), rtol=0.05, atol=0)


def test_exactly_one_kind_of_input():
    for model in (asymloop(), fullloop()):
        for inputs in ({}, {"input_ids": tokens(1, 2), "inputs_embeds": torch.zeros(1, 2, 32)}):
            with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given"):
                model(**inputs)
