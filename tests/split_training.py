"""One of two processes that train an AsymLoop together, in torchrun's environment: `python split_training.py FOLDER`.

`FOLDER/model` is the model. Leaves the losses of each way of splitting the work in `FOLDER/rank{RANK}.json`.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import tokens
from distributed_training import has_fsdp2, use_fsdp2
from layerwise_runs import make_trainer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asymloop_hf.pipeline_stages import pipeline_stages

BATCH, LENGTH, STEPS, RATE = 4, 12, 3, 0.05


def batches() -> list[torch.LongTensor]:
    return [tokens(BATCH, LENGTH, seed) for seed in range(STEPS)]


def trainer_losses(model, folder: Path, is_sharded: bool = False, **options) -> list[float]:
    """The losses that a Trainer logs; in two processes each has half of every batch, and maybe of every weight."""
    trainer = make_trainer(model, folder, max_steps=STEPS, max_grad_norm=0.0, **options)
    trainer.train()
    assert is_sharded == any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses(model) -> list[float]:
    """Of plain gradient descent, where every process has the whole batch."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=RATE)
    losses = []
    for batch in batches():
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipeline_losses(model, rank: int) -> list[float] | None:
    """The same in two stages and two microbatches; the second stage knows the losses."""
    stage = pipeline_stages(model.train())[rank]
    pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(
        pipeline, 2, lambda logits, labels: model.loss_function(logits, labels, vocab_size=logits.shape[-1])
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    means = []
    for batch in batches():
        losses = []
        inputs, options = ((batch,), {}) if rank == 0 else ((), {"target": batch, "losses": losses})
        schedule.step(*inputs, **options)
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack(losses).mean().item() if losses else None)
    return means


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(folder / "model", **options)

    split = {
        "tensor parallel": losses(load(tp_plan="auto")),
        "pipeline": pipeline_losses(load(), rank),
        "DDP": trainer_losses(load(), folder / "ddp", per_device_train_batch_size=BATCH // 2, ddp_backend="gloo"),
    }
    if has_fsdp2():
        layers = {type(layer).__name__ for layer in [*load().model.encoder.layers, *load().model.decoder.layers]}
        options = {"per_device_train_batch_size": BATCH // 2, "ddp_backend": "gloo", **use_fsdp2(*layers)}
        split["FSDP2"] = trainer_losses(load(), folder / "fsdp2", is_sharded=True, **options)
    (folder / f"rank{rank}.json").write_text(json.dumps(split))


if __name__ == "__main__":
    main()
