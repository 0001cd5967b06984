"""Pretrain an AsymLoop, or the Full Loop that matches it. The same command again resumes it at the exact token.

    accelerate launch --config_file examples/accelerate/ddp.yaml --num_processes 8 \
        examples/pretrain.py examples/recipes/60m.yaml --output_dir asymloop-60m

A recipe is a file of settings; those on the command line replace them. Without a recipe, on one device:

    python examples/pretrain.py --preset 60m --output_dir asymloop-60m --max_steps 10000 --learning_rate 1e-3 \
        --lr_scheduler_type cosine --warmup_steps 1000 --per_device_train_batch_size 16 --bf16

Without a network, a few minutes on two cores:

    python examples/pretrain.py --corpus installed-docs --block_size 256 --output_dir small --max_steps 200 \
        --learning_rate 2e-3 --config_overrides num_encoder_layers=2,num_decoder_layers=2,hidden_size=128,\
intermediate_size=344,num_attention_heads=4,vocab_size=4096

docs/pretraining.md has more.
"""

import json
import logging
import math
import sys
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from asymloop_hf.budget import budget
from asymloop_hf.command_options import errors_in_a_line
from asymloop_hf.corpus import load_corpus
from asymloop_hf.layerwise_lr import HeavyTailLRCallback
from asymloop_hf.modeling.configuration_asymloop import PRESETS
from asymloop_hf.modeling.configuration_looped import require
from asymloop_hf.packing import pack
from asymloop_hf.recipe import expand_recipe, model_config
from asymloop_hf.throughput import ThroughputCallback, peak_flops
from asymloop_hf.token_folder import load_tokens, lock_of, save_tokens
from asymloop_hf.token_stream import StreamTrainer, TokenStream, position_file, share_of
from asymloop_hf.token_weighted_loss import token_losses, token_weighted_loss
from asymloop_hf.tokenizer import load_tokenizer, train_tokenizer
from asymloop_hf.training_run import whole_checkpoints
from asymloop_hf.whole_writes import write_whole

logger = logging.getLogger(__name__)
RUN = "run.json"
FINGERPRINT_BLOCKS = 100


@dataclass
class PretrainArguments:
    model: str = field(default="asymloop", metadata={"choices": ["asymloop", "fullloop"], "help": "What to train."})
    preset: str = field(default="60m", metadata={"choices": list(PRESETS), "help": "Its size."})
    config_overrides: str = field(
        default="", metadata={"help": "Fields of AsymLoopConfig in place of the preset's: num_loops=5,hidden_size=128"}
    )
    corpus: str = field(
        default="HuggingFaceFW/fineweb-edu:sample-10BT",
        metadata={"help": "A dataset of the hub, a local path, or installed-docs, which needs no network."},
    )
    streaming: bool | None = field(
        default=None, metadata={"help": "Read the corpus as it is needed; by default a dataset of the hub alone."}
    )
    held_out: int | None = field(
        default=None, metadata={"help": "Documents to evaluate on; by default 2 %, and 1,000 of a stream."}
    )
    tokens_dir: str | None = field(
        default=None,
        metadata={"help": "A folder to keep the tokens in, which later runs read. Made if it is not there."},
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens in a training sequence."})
    tokenizer: str | None = field(default=None, metadata={"help": "A tokenizer's name; by default one is trained."})
    tokens: int | None = field(default=None, metadata={"help": "Tokens to train on, which max_steps replaces."})
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Sequences in an optimizer step over all devices; sets gradient_accumulation_steps."},
    )
    peak_flops: float | None = field(
        default=None, metadata={"help": "FLOP/s of a device at its best, for the utilisation; known for some GPUs."}
    )
    layerwise_lr: bool = field(
        default=False, metadata={"help": "Heavy-tail-guided layerwise learning rates; learning_rate is the base rate."}
    )
    layerwise_max_ratio: float = field(default=5.0, metadata={"help": "The largest rate over the base rate."})
    layerwise_every: int = field(
        default=100, metadata={"help": "Steps between updates of the rates, in the first fifth of the run."}
    )

    def __post_init__(self):
        for name in ("block_size", "layerwise_every", "layerwise_max_ratio"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.peak_flops is None or self.peak_flops > 0, "peak_flops", self.peak_flops, "above 0")


def parse_arguments(arguments: list[str]) -> tuple[PretrainArguments, TrainingArguments]:
    """The settings of a command line, which may begin with a recipe."""
    parser = HfArgumentParser((PretrainArguments, TrainingArguments))
    return parser.parse_args_into_dataclasses(expand_recipe(arguments, parser))


def set_steps(args: PretrainArguments, training: TrainingArguments) -> int:
    """Set the gradient accumulation and the steps that the batch and the tokens ask for; the tokens of a step."""
    sequences = training.train_batch_size * training.world_size
    if args.global_batch_size is not None:
        training.gradient_accumulation_steps, rest = divmod(args.global_batch_size, sequences)
        if rest or args.global_batch_size < 1:
            raise ValueError(
                f"global_batch_size={args.global_batch_size} is not allowed: it must be a multiple of {sequences}, "
                "the sequences that all devices take at once"
            )
    step_tokens = sequences * training.gradient_accumulation_steps * args.block_size
    if args.tokens is not None and training.max_steps < 0:
        training.max_steps = args.tokens // step_tokens
        if training.max_steps < 1:
            raise ValueError(f"tokens={args.tokens} is not allowed: a step alone takes {step_tokens}")
    return step_tokens


def describe_run(args: PretrainArguments, training: TrainingArguments) -> dict:
    """All that must be the same when a run is resumed."""
    names = (
        *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
        *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("bf16", "fp16", "seed", "data_seed"),
    )
    own = {name: value for name, value in asdict(args).items() if name != "peak_flops"}
    return own | {name: getattr(training, name) for name in names} | {"processes": training.world_size}


def find_checkpoint(folder: Path, run: dict) -> str | None:
    """The last whole checkpoint of this same run, if there is one. A folder with anything else in it is an error."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"output_dir={str(folder)!r} is a file: choose a folder")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found <= {RUN, "runs"}:  # nothing yet but what a run notes of itself
        return None
    if RUN not in found:
        raise FileExistsError(f"output_dir={str(folder)!r} holds {min(found)!r}, and no run: choose another folder")
    started = json.loads((folder / RUN).read_text(encoding="utf-8"))
    different = [
        f"{name} ({started.get(name)!r} there, {value!r} here)"
        for name, value in run.items()
        if name not in started or started[name] != value
    ]
    if different:
        raise FileExistsError(f"output_dir={str(folder)!r} holds another run, which differs in {', '.join(different)}")
    readers = run["processes"] if started["streamed"] else 0
    whole = [
        path
        for path in whole_checkpoints(folder)
        if all(position_file(path, rank).exists() for rank in range(readers))  # written after the rest
    ]
    if not whole and any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        logger.warning("output_dir=%r has no checkpoint that is whole: the run starts again", str(folder))
    return str(whole[-1]) if whole else None


def fingerprint(blocks: Dataset) -> str:
    """Tells two datasets apart: of how many blocks there are, and the tokens of some of them."""
    some = blocks.select(range(0, len(blocks), math.ceil(len(blocks) / FINGERPRINT_BLOCKS)))["input_ids"]
    return f"{len(blocks)} blocks, {blake2b(repr(list(some)).encode(), digest_size=8).hexdigest()}"


def describe_data(blocks: dict) -> dict:
    """Of what is evaluated on, and of what is trained on unless it is streamed, the [`fingerprint`]."""
    return {split: fingerprint(rows) for split, rows in blocks.items() if isinstance(rows, Dataset)}


def check_data(folder: Path, data: dict) -> None:
    started = json.loads((folder / RUN).read_text(encoding="utf-8")).get("data")
    if started != data:
        raise FileExistsError(
            f"output_dir={str(folder)!r} holds a run on other data: corpus has changed since ({started} there, "
            f"{data} here)"
        )


def note_run(folder: Path, run: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RUN, json.dumps(run, indent=2))


def is_finished(checkpoint: str | None) -> bool:
    if checkpoint is None:
        return False
    state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    return state.global_step >= state.max_steps


def open_corpus(args: PretrainArguments, training: TrainingArguments) -> dict:
    corpus = load_corpus(args.corpus, streaming=args.streaming, held_out=args.held_out)
    if isinstance(corpus["train"], IterableDataset) and training.max_steps < 0:
        raise ValueError(f"max_steps={training.max_steps} is not allowed for a stream: give it, or tokens")
    return corpus


def load_data(args, training, checkpoint: str | None, vocab_size: int, num_blocks: int) -> tuple[dict, object]:
    """The blocks of each split, those to train on as a `TokenStream` where the corpus is streamed; the tokenizer."""
    name = checkpoint or args.tokenizer
    tokenizer = load_tokenizer(name, "tokenizer") if name else None
    about = {"corpus": args.corpus, "held_out": args.held_out, "block_size": args.block_size}

    if args.tokens_dir is not None:
        with training.main_process_first(desc="tokenising the corpus"), lock_of(args.tokens_dir):
            if not Path(args.tokens_dir).exists():
                corpus = open_corpus(args, training)
                used = tokenizer or train_tokenizer((row["text"] for row in corpus["train"]), vocab_size)
                blocks = {split: pack(documents, used, args.block_size) for split, documents in corpus.items()}
                if isinstance(blocks["train"], IterableDataset):
                    blocks["train"] = blocks["train"].take(num_blocks)
                save_tokens(args.tokens_dir, blocks, used, about)
        return load_tokens(args.tokens_dir, about, tokenizer, num_blocks)

    corpus = open_corpus(args, training)
    if tokenizer is None:
        is_first = training.process_index == 0
        trained = train_tokenizer((row["text"] for row in corpus["train"]), vocab_size) if is_first else None
        (tokenizer,) = broadcast_object_list([trained])
    if not isinstance(corpus["train"], IterableDataset):
        return {split: pack(documents, tokenizer, args.block_size) for split, documents in corpus.items()}, tokenizer
    own = share_of(corpus["train"], training.process_index, training.world_size)
    return {
        "train": TokenStream(pack(own, tokenizer, args.block_size), args.corpus),
        "held_out": pack(corpus["held_out"], tokenizer, args.block_size),
    }, tokenizer


def special_tokens(tokenizer, vocab_size: int) -> dict[str, int | None]:
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is not allowed: the tokenizer has {len(tokenizer)} tokens; "
            f"config_overrides can set vocab_size={len(tokenizer)}"
        )
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def main(arguments: list[str]):
    args, training = parse_arguments(arguments)
    if training.resume_from_checkpoint is not None:
        raise ValueError("resume_from_checkpoint is not allowed: the same command goes on by itself")
    step_tokens = set_steps(args, training)
    shape = (args.model, args.preset, args.config_overrides, args.block_size)
    vocab_size = model_config(*shape).vocab_size
    folder = Path(training.output_dir)
    run = describe_run(args, training)
    checkpoint = find_checkpoint(folder, run)
    finished = is_finished(checkpoint)

    num_blocks = max(args.tokens or 0, training.max_steps * step_tokens) // args.block_size
    blocks, tokenizer = load_data(args, training, checkpoint, vocab_size, num_blocks)
    is_streamed = isinstance(blocks["train"], TokenStream)
    config = model_config(*shape, **special_tokens(tokenizer, vocab_size))
    data = describe_data(blocks)
    if checkpoint is not None:
        check_data(folder, data)

    peak = args.peak_flops or peak_flops()
    num_devices = training.world_size * max(1, training.n_gpu)
    training_flops = 3 * budget(config, args.block_size).flops_per_token
    callbacks = [ThroughputCallback(step_tokens, training_flops, peak and peak * num_devices)]
    layerwise = {}
    if args.layerwise_lr:
        every = args.layerwise_every
        llr = HeavyTailLRCallback(max_ratio=args.layerwise_max_ratio, every=every, ramp=every // 2)
        layerwise = {"optimizer_cls_and_kwargs": llr.optimizer(training)}
        callbacks.append(llr)

    set_seed(training.seed)
    trainer = (StreamTrainer if is_streamed else Trainer)(
        model=AutoModelForCausalLM.from_pretrained(checkpoint)
        if finished
        else AutoModelForCausalLM.from_config(config),
        args=training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["held_out"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=token_weighted_loss,
        preprocess_logits_for_metrics=token_losses,
        callbacks=callbacks,
        **layerwise,
    )
    if training.process_index == 0:
        note_run(folder, run | {"streamed": is_streamed, "data": data})
        print(f"processes={training.world_size}, tokens of a step={step_tokens:,}, checkpoint={checkpoint}")
    if not finished:
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    with errors_in_a_line("pretrain.py"):
        main(sys.argv[1:])
