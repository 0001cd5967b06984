"""Finetune a checkpoint on a jsonl file of {"prompt": ..., "completion": ...}, with the loss on the completion only.

    python examples/finetune.py --checkpoint asymloop-60m --data answers.jsonl --output_dir answers \
        --num_train_epochs 3 --learning_rate 1e-4 --lr_scheduler_type cosine
"""

import json
import os
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import asymloop_hf  # noqa: F401  registers the models with the Auto classes


@dataclass
class FinetuneArguments:
    checkpoint: str = field(metadata={"help": "A folder that save_pretrained has written, with its tokenizer."})
    data: str = field(metadata={"help": 'A jsonl file with {"prompt": ..., "completion": ...} on each line.'})


def read_examples(path: str) -> list[dict]:
    """The lines of a jsonl file; a ValueError names the first that is not a prompt with a completion."""
    examples = []
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


def main():
    args, training = HfArgumentParser((FinetuneArguments, TrainingArguments)).parse_args_into_dataclasses()
    if os.path.isdir(training.output_dir) and os.listdir(training.output_dir):
        raise FileExistsError(f"output_dir={training.output_dir!r} holds another run: choose a new or an empty folder")
    examples = read_examples(args.data)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint)
    max_length = model.config.max_position_embeddings

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Dataset.from_list([encode(example, tokenizer, max_length) for example in examples]),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
