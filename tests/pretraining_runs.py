"""examples/pretrain.py in this process, watched; as a script, one of two processes.

`accelerate launch --config_file examples/accelerate/fsdp2.yaml ... pretraining_runs.py FOLDER` trains on
`FOLDER/documents.jsonl` in each way that data can come, to the end and with an interruption, and leaves what this
process saw in `FOLDER/rank{RANK}.pt`.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import disable_progress_bars
from distributed_training import has_fsdp2, use_fsdp2
from safetensors.torch import load_file
from transformers import Trainer, TrainerState
from transformers.utils import logging

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS, BATCH, BLOCK = 6, 2, 32
TINY = "num_encoder_layers=1,num_decoder_layers=1,hidden_size=32,intermediate_size=48,num_attention_heads=2"
SETTINGS = {
    "config_overrides": f"{TINY},vocab_size=300",
    "held_out": 2,
    "block_size": BLOCK,
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 1e-2,
    "layerwise_lr": True,
    "layerwise_every": 1,
    "logging_steps": 1,
    "save_steps": 2,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
DDP = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
WAYS = {
    "in memory": {},
    "on disk": {"tokens_dir": "tokens"},
    "streamed": {"streaming": True},
    "streamed, accumulating": {"streaming": True, "global_batch_size": 8},
}


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Killed(Exception):
    """Stands for what ends a process in the middle of its run."""


def pretrain(folder: Path, killed_at: int | None = None, **options) -> list[list[int]]:
    """Run the script in this process; the blocks that it trained on. It may be killed at one of its batches."""
    seen, step = [], Trainer.training_step

    def watched(trainer, model, inputs, *args):
        if len(seen) == BATCH * (killed_at or -1):
            raise Killed
        seen.extend(inputs["input_ids"].tolist())
        return step(trainer, model, inputs, *args)

    arguments = SETTINGS | {"corpus": folder / "documents.jsonl"} | options
    Trainer.training_step = watched
    try:
        load_example("pretrain").main(
            [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        )
    except Killed:
        pass
    finally:
        Trainer.training_step = step
    return seen


def losses(run: Path) -> list[dict]:
    """What was logged of the training steps, without what a clock says."""
    state = TrainerState.load_from_json(str(run / f"checkpoint-{STEPS}" / "trainer_state.json"))
    kept = ("step", "epoch", "loss", "learning_rate", "grad_norm")
    return [{name: entry[name] for name in kept} for entry in state.log_history if "loss" in entry]


def whole_and_resumed(folder: Path, name: str, **options) -> dict:
    """A run to the end, and one that is killed in its fifth step, after the checkpoint of the fourth, and resumed."""
    accumulation = options.get("global_batch_size", 2 * BATCH) // (2 * BATCH)
    options |= DDP
    if "tokens_dir" in options:
        options["tokens_dir"] = folder / options["tokens_dir"]
    runs = {kind: folder / f"{name}, {kind}" for kind in ("whole", "resumed")}
    found = {"seen": pretrain(folder, output_dir=runs["whole"], **options)}
    killed = pretrain(folder, killed_at=4 * accumulation, output_dir=runs["resumed"], **options)
    found["seen by both"] = killed, pretrain(folder, output_dir=runs["resumed"], **options)
    dist.barrier()
    found["weights"] = {kind: load_file(run / "model.safetensors") for kind, run in runs.items()}
    found["losses"] = {kind: losses(run) for kind, run in runs.items()}
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    fsdp = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("ACCELERATE_", "FSDP_"))}
    found = {name: whole_and_resumed(folder, name, **options) for name, options in WAYS.items()}
    if has_fsdp2():
        os.environ |= fsdp
        use_fsdp2()
        found["FSDP2"] = whole_and_resumed(folder, "FSDP2", streaming=True)
    torch.save(found, folder / f"rank{PartialState().process_index}.pt")


if __name__ == "__main__":
    main()
