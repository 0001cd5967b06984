"""Pretrain an AsymLoop, or the Full Loop that matches it, from a configuration. The same command again resumes it.

    python examples/pretrain.py --preset 60m --output_dir asymloop-60m --max_steps 10000 --learning_rate 1e-3 \
        --lr_scheduler_type cosine --warmup_steps 1000 --per_device_train_batch_size 16 --bf16

With `--layerwise_lr` each layer's learning rate follows its spectrum; `asymloop spectra OUTPUT_DIR` shows them.

Without a network, a few minutes on two cores:

    python examples/pretrain.py --corpus installed-docs --block_size 256 --output_dir small --max_steps 200 \
        --learning_rate 2e-3 --config_overrides num_encoder_layers=2,num_decoder_layers=2,hidden_size=128,\
intermediate_size=344,num_attention_heads=4,vocab_size=4096
"""

import ast
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from asymloop_hf import AsymLoopConfig
from asymloop_hf.corpus import load_corpus
from asymloop_hf.layerwise_lr import HeavyTailLRCallback
from asymloop_hf.packing import pack
from asymloop_hf.tokenizer import train_tokenizer


@dataclass
class PretrainArguments:
    model: str = field(default="asymloop", metadata={"choices": ["asymloop", "fullloop"], "help": "What to train."})
    preset: str = field(default="60m", metadata={"help": "Size: 60m, 130m, 350m or 1b."})
    config_overrides: str = field(
        default="", metadata={"help": "Fields of AsymLoopConfig in place of the preset's: num_loops=5,hidden_size=128"}
    )
    corpus: str = field(
        default="HuggingFaceFW/fineweb-edu:sample-10BT",
        metadata={"help": "A dataset of the hub (streamed), a local path, or installed-docs, which needs no network."},
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens in a training sequence."})
    tokenizer: str | None = field(default=None, metadata={"help": "A tokenizer's name; by default one is trained."})
    layerwise_lr: bool = field(
        default=False, metadata={"help": "Heavy-tail-guided layerwise learning rates; learning_rate is the base rate."}
    )
    layerwise_max_ratio: float = field(default=5.0, metadata={"help": "The largest rate over the base rate."})
    layerwise_every: int = field(
        default=100, metadata={"help": "Steps between updates of the rates, in the first fifth of the run."}
    )


def parse_overrides(text: str) -> dict:
    """`num_loops=5,local_window=None,decoder_init=embedding` as a dictionary; the values are Python literals."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        nodes = {item.arg: item.value for item in call.keywords}
        values = {name: v.id if isinstance(v, ast.Name) else ast.literal_eval(v) for name, v in nodes.items()}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"config_overrides={text!r} is not of the form name=value,name=value") from error
    known = AsymLoopConfig().to_dict()
    if unknown := [ast.unparse(node) for node in call.args] + [name for name in values if name not in known]:
        raise ValueError(f"config_overrides={text!r}: AsymLoopConfig has no field {unknown[0]!r}")
    return values


def find_checkpoint(folder: Path, run: dict) -> str | None:
    """The last checkpoint of this same run, if there is one. A folder with anything else in it is an error."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    note = folder / "run.json"
    started = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    if different := [name for name in run if name not in started or started[name] != run[name]]:
        raise FileExistsError(f"output_dir={str(folder)!r} holds another run, which differs in {', '.join(different)}")
    return get_last_checkpoint(folder)


def main():
    args, training = HfArgumentParser((PretrainArguments, TrainingArguments)).parse_args_into_dataclasses()
    names = ("max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed")
    run = asdict(args) | {name: getattr(training, name) for name in names}
    folder = Path(training.output_dir)
    checkpoint = find_checkpoint(folder, run)
    config = AsymLoopConfig.preset(
        args.preset, **{"max_position_embeddings": args.block_size} | parse_overrides(args.config_overrides)
    )
    layerwise = {}
    if args.layerwise_lr:
        every = args.layerwise_every
        llr = HeavyTailLRCallback(max_ratio=args.layerwise_max_ratio, every=every, ramp=every // 2)
        layerwise = {"optimizer_cls_and_kwargs": llr.optimizer(training), "callbacks": [llr]}

    corpus = load_corpus(args.corpus)
    if checkpoint or args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint or args.tokenizer)
    else:
        tokenizer = train_tokenizer((row["text"] for row in corpus["train"]), config.vocab_size)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    if args.model == "fullloop":
        config = config.matched_full_loop()

    set_seed(training.seed)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=training,
        train_dataset=pack(corpus["train"], tokenizer, args.block_size),
        eval_dataset=pack(corpus["held_out"], tokenizer, args.block_size),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        **layerwise,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run, indent=2), encoding="utf-8")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
