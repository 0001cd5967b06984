"""A small Llama and a Trainer that train with heavy-tail-guided rates, or without."""

import torch
from conftest import tokens
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**fields) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | HEADS | fields, pad_token_id=0))


def documents() -> Dataset:
    rows = [tokens(1, 12, seed)[0].tolist() for seed in range(64)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def arguments(folder, **options) -> TrainingArguments:
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 100,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(folder, **defaults | options)


def group_states(optimizer) -> list[dict]:
    """What the callback keeps in the optimizer's groups."""
    kept = (
        "name",
        "kind",
        "factor",
        "alpha",
        "ramp_from",
        "ramp_to",
        "ramp_start",
        "lr",
        "initial_lr",
        "weight_decay",
    )
    return [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]


def make_trainer(model, folder, llr=None, optimizer="adamw", callbacks=(), **options) -> Trainer:
    """A Trainer with the rates of a `HeavyTailLRCallback`; without one, with Trainer's own optimizer."""
    args = arguments(folder, **options)
    given = {} if llr is None else {"optimizer_cls_and_kwargs": llr.optimizer(args, optimizer)}
    own = [] if llr is None else [llr]
    return Trainer(
        model=model,
        args=args,
        train_dataset=documents(),
        eval_dataset=documents(),
        callbacks=[*callbacks, *own],
        **given,
    )
