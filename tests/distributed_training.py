"""One of two processes that train together, in torchrun's environment: `python distributed_training.py MODE FOLDER`.

MODE is ddp or fsdp2. Trains, resumes from a checkpoint inside a ramp, and leaves what both runs ended with in
`FOLDER/rank{RANK}.pt`, with what this process says of a weight that is not finite.
"""

import sys
from pathlib import Path

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from layerwise_runs import group_states, llama, make_trainer
from transformers import Trainer

from asymloop_hf import shared_spectra
from asymloop_hf.layerwise_lr import HeavyTailLRCallback

SETTINGS = {"every": 2, "ramp": 2, "until": 1.0}
OPTIONS = {"per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 1, "ddp_backend": "gloo"}


def has_fsdp2() -> bool:
    return hasattr(FullyShardedDataParallelPlugin, "fsdp_version")


def use_fsdp2(*layers: str) -> dict:
    """Trainer's arguments for FSDP2. Accelerate does not shard on CPUs, which could: it is told that they are GPUs."""
    create = Trainer.create_accelerator_and_postprocess

    def create_for_fsdp(self):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(self)

    Trainer.create_accelerator_and_postprocess = create_for_fsdp
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": list(layers)}}


def run(folder: Path, options: dict, resume: Path | None = None) -> dict:
    trainer = make_trainer(llama(), folder, HeavyTailLRCallback(**SETTINGS), **OPTIONS, **options)
    spectra = []
    estimate = shared_spectra.heavy_tail_alpha
    shared_spectra.heavy_tail_alpha = lambda weight: spectra.append(weight.shape) or estimate(weight)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    shared_spectra.heavy_tail_alpha = estimate
    weights = {name.removeprefix("module."): weight.detach() for name, weight in trainer.model.named_parameters()}
    return {
        "sharded": any(hasattr(weight, "full_tensor") for weight in weights.values()),
        "complaint": complaint(weights),
        "weights": {name: getattr(weight, "full_tensor", lambda w=weight: w)() for name, weight in weights.items()},
        "groups": group_states(trainer.optimizer),
        "spectra": len(spectra),
    }


def complaint(weights: dict) -> str:
    """What is said of the second layer's first weight when it is not finite."""
    matrices = {name: weight for name, weight in weights.items() if weight.ndim == 2}
    matrices["model.layers.1.self_attn.q_proj.weight"] = weights["model.layers.1.self_attn.q_proj.weight"] / 0
    try:
        shared_spectra.shared_alphas(matrices)
    except ValueError as error:
        return str(error)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    options = use_fsdp2("LlamaDecoderLayer") if mode == "fsdp2" else {}
    whole = run(folder / "whole", options)
    resumed = run(folder / "resumed", options, folder / "whole" / "checkpoint-3")
    torch.save({"whole": whole, "resumed": resumed}, folder / f"rank{PartialState().process_index}.pt")


if __name__ == "__main__":
    main()
