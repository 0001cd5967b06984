"""Finetune a checkpoint on a jsonl file of {"prompt": ..., "completion": ...}, with the loss on the completion only.

    python examples/finetune.py --checkpoint asymloop-60m --data answers.jsonl --output_dir answers \
        --num_train_epochs 3 --learning_rate 1e-4 --lr_scheduler_type cosine

A tenth of the lines is held out. Their loss before and after is printed and kept in `before_after.json` in the output
folder, with zero-shot accuracies where lm-eval's tasks are named: `--tasks piqa,arc_easy --data_dir eval_data`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from asymloop_hf.checkpoints import load_checkpoint
from asymloop_hf.command_options import errors_in_a_line
from asymloop_hf.evaluation import evaluate, scores
from asymloop_hf.perplexity import perplexity_of
from asymloop_hf.token_weighted_loss import token_losses, token_weighted_loss


@dataclass
class FinetuneArguments:
    checkpoint: str = field(metadata={"help": "A folder that save_pretrained has written, with its tokenizer."})
    data: str = field(metadata={"help": 'A jsonl file with {"prompt": ..., "completion": ...} on each line.'})
    held_out: float = field(default=0.1, metadata={"help": "The share of the lines to evaluate on, at least one."})
    tasks: str | None = field(default=None, metadata={"help": "Tasks of lm-eval to score before and after: piqa,sciq"})
    data_dir: Path | None = field(
        default=None,
        metadata={"help": "<dataset>/<config>/<split>.parquet: the tasks, without a network."},
    )
    limit: int | None = field(default=None, metadata={"help": "Questions of each task; by default all."})


def read_examples(path: str) -> list[dict]:
    """The lines of a jsonl file; a ValueError names the first that is not a prompt with a completion."""
    examples = []
    if not os.path.isfile(path):
        raise FileNotFoundError(f"data={path!r} is not a file")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise ValueError(f"data={path!r}, line {number}: not a JSON object in UTF-8 ({error})") from None
            if not isinstance(example, dict):
                raise ValueError(f"data={path!r}, line {number}: {type(example).__name__}, where an object must be")
            for key in ("prompt", "completion"):
                if not isinstance(example.get(key), str) or not example[key]:
                    value = example.get(key)
                    raise ValueError(f"data={path!r}, line {number}: {key}={value!r} must be a text that is not empty")
            examples.append({"line": number, "prompt": example["prompt"], "completion": example["completion"]})
    if not examples:
        raise ValueError(f"data={path!r} has no lines")
    return examples


def encode(example: dict, tokenizer, max_length: int) -> dict:
    """Token ids of prompt, completion and end, with the labels of the prompt masked."""
    prompt = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
    completion = tokenizer(example["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    length = len(prompt) + len(completion)
    if length > max_length:
        raise ValueError(f"data, line {example['line']}: {length} tokens, where the model reads at most {max_length}")
    return {
        "input_ids": prompt + completion,
        "attention_mask": [1] * length,
        "labels": [-100] * len(prompt) + completion,
    }


def split(examples: list[dict], held_out: float, seed: int) -> tuple[list[dict], list[dict]]:
    """The examples to train on, and a share of them to evaluate on; at least one each."""
    if not 0 < held_out < 1 or len(examples) < 2:
        raise ValueError(
            f"held_out={held_out} of {len(examples)} examples is not allowed: it must be above 0 and below 1, "
            "and there must be two examples or more"
        )
    count = min(max(1, round(held_out * len(examples))), len(examples) - 1)
    parts = Dataset.from_list(examples).train_test_split(test_size=count, seed=seed)
    return parts["train"].to_list(), parts["test"].to_list()


def measure(trainer: Trainer, checkpoint: str, args: FinetuneArguments) -> dict[str, float]:
    """The loss on what is held out and, where tasks are named, the accuracy of the checkpoint in each of them."""
    loss = trainer.evaluate()["eval_loss"]
    values = {"held-out loss": loss, "held-out perplexity": perplexity_of(loss)}
    if args.tasks is not None and trainer.is_world_process_zero():
        (results,) = evaluate(checkpoint, args.tasks.split(","), args.data_dir, args.limit).values()
        values |= {f"{name} acc": task["acc"] for name, task in scores(results).items() if "acc" in task}
    return values


def format_table(before: dict[str, float], after: dict[str, float]) -> str:
    lines = [f"{'':<28}{'before':>10}{'after':>10}"]
    lines += [f"{name:<28}{before[name]:>10.3f}{after[name]:>10.3f}" for name in before]
    return "\n".join(lines)


def main():
    args, training = HfArgumentParser((FinetuneArguments, TrainingArguments)).parse_args_into_dataclasses()
    if os.path.isdir(training.output_dir) and os.listdir(training.output_dir):
        raise FileExistsError(f"output_dir={training.output_dir!r} holds another run: choose a new or an empty folder")
    if training.resume_from_checkpoint is not None:
        raise ValueError("resume_from_checkpoint is not allowed: fine-tuning starts anew, in a new folder")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"limit={args.limit} is not allowed: it must be a positive integer")
    examples = read_examples(args.data)
    train, held_out = split(examples, args.held_out, training.seed)
    if args.tasks is None and (args.data_dir is not None or args.limit is not None):
        raise ValueError(f"data_dir={args.data_dir} and limit={args.limit} are for tasks, and tasks=None")
    model, tokenizer = load_checkpoint(args.checkpoint)

    def encoded(rows: list[dict]) -> Dataset:
        return Dataset.from_list([encode(row, tokenizer, model.config.max_position_embeddings) for row in rows])

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded(train),
        eval_dataset=encoded(held_out),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        compute_metrics=token_weighted_loss,
        preprocess_logits_for_metrics=token_losses,
    )
    before = measure(trainer, args.checkpoint, args)
    trainer.train()
    trainer.save_model()
    after = measure(trainer, training.output_dir, args)
    if trainer.is_world_process_zero():
        print(format_table(before, after))
        results = json.dumps({"before": before, "after": after}, indent=2) + "\n"
        Path(training.output_dir, "before_after.json").write_text(results, encoding="utf-8")


if __name__ == "__main__":
    with errors_in_a_line("finetune.py"):
        main()
