"""Supervised fine-tuning with TRL's `SFTTrainer`, for one epoch on a few documents."""

import pytest
import torch
from chat_tokenizer import chat_tokenizer, fields_for
from conftest import KINDS
from datasets import Dataset
from small_corpus import make_documents

trl = pytest.importorskip("trl")

DOCUMENTS = make_documents(48, sentences=1)
TEXTS = Dataset.from_dict({"text": DOCUMENTS})
CHATS = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": text[:20]}] for text in DOCUMENTS],
        "completion": [[{"role": "assistant", "content": text[20:]}] for text in DOCUMENTS],
    }
)
every_model = pytest.mark.parametrize("name", KINDS)
two_models = pytest.mark.parametrize("name", ["asymloop", "full loop"])


def make_trainer(name, folder, dataset=TEXTS, peft_config=None, **options):
    tokenizer = chat_tokenizer()
    defaults = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 6,
        "learning_rate": 2e-2,
        "max_length": 64,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = trl.SFTConfig(folder, **{**defaults, **options})
    model = KINDS[name](**fields_for(tokenizer))
    return trl.SFTTrainer(
        model, args=arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=peft_config
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"packing": True}], ids=["one document a row", "packed"])
@every_model
def test_the_loss_falls_in_one_epoch(name, options, tmp_path):
    history = losses(make_trainer(name, tmp_path, **options))
    assert history[-1] < history[0] - 0.5


@two_models
def test_packed_documents_do_not_see_each_other(name, tmp_path):
    """The loss on all documents is the same in rows of their own and in rows that they share."""
    options = {"learning_rate": 0.0, "per_device_train_batch_size": len(DOCUMENTS)}
    alone, packed = make_trainer(name, tmp_path, **options), make_trainer(name, tmp_path, packing=True, **options)
    assert len(packed.train_dataset) < len(alone.train_dataset)
    packed.model.load_state_dict(alone.model.state_dict())
    assert losses(packed) == pytest.approx(losses(alone), rel=1e-5)


@two_models
def test_chats_of_prompt_and_completion(name, tmp_path):
    history = losses(make_trainer(name, tmp_path, CHATS))
    assert history[-1] < history[0] - 0.5


@two_models
def test_an_adapter_is_tuned(name, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"])
    trainer = make_trainer(name, tmp_path, peft_config=config, gradient_checkpointing=True, bf16=True)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    history = losses(trainer)
    assert history[-1] < history[0]
    for name, weight in trainer.model.named_parameters():
        if not weight.requires_grad:
            assert torch.equal(weight, before[name])


def test_what_has_no_experts_has_no_load_balancing_loss(tmp_path):
    """TRL turns that loss on wherever the configuration has a factor for it other than 0."""
    dense, sparse = make_trainer("asymloop", tmp_path), make_trainer("asymloop, olmoe", tmp_path)
    assert not dense.aux_loss_enabled and not dense.model.config.output_router_logits
    assert sparse.aux_loss_enabled and sparse.router_aux_loss_coef == 0.01
