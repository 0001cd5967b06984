"""One run of Trainer on packed blocks: a new model from a configuration, trained, and evaluated on held-out blocks."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .layerwise_lr import HeavyTailLRCallback
from .layerwise_table import rows
from .perplexity import perplexity_of

HELD_OUT_POINTS = 5  # evaluations along a run
TRAIN_POINTS = 50  # training losses along a run
RATE_UPDATES = 5  # of the layers' learning rates, in the first fifth of a run


@dataclass(frozen=True)
class Training:
    """
    How a model is trained: AdamW, a tenth of the steps to warm up, then a cosine down to zero.

    Args:
        steps: of the optimizer.
        batch_size: sequences in a step.
        learning_rate: the largest of the schedule; with `layerwise_lr` the base rate.
        seed: of the weights and of the order of the data.
        layerwise_lr: whether each layer's rate follows its spectrum ([`HeavyTailLRCallback`]).
        max_ratio: the largest rate over the base rate, with `layerwise_lr`.
        num_checkpoints: that the run writes on its way, of which the last is kept.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    layerwise_lr: bool = False
    max_ratio: float = 5.0
    num_checkpoints: int = 0


class StepClock(TrainerCallback):
    """Notes how long each training step takes."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


class LossBar(ProgressCallback):
    """The Trainer's progress bar with the loss on it, instead of a printed line for every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in state.log_history[-1]:
            self.training_bar.set_postfix(loss=f"{state.log_history[-1]['loss']:.3f}")


def train(
    config: PreTrainedConfig,
    training: Training,
    blocks: dict[str, Dataset],
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[PreTrainedModel, dict]:
    """
    The trained model, and what there is to say of its training. A run that was interrupted goes on from the last whole
    checkpoint in `folder`, with the same result as if it had not been.

    Args:
        blocks: `"train"` and `"held_out"`, as from [`pack`].
        folder: for checkpoints.
        callbacks: of Trainer, for example for a progress bar.

    Returns:
        The model, and its `parameters`, `effective_depth`, `steps`, `tokens`, `seconds_per_step` (the median),
        `held_out_loss`, its `perplexity`, `train_losses` and `held_out_losses` (pairs of step and loss) and
        `layer_rates` (see [`rows`]).
    """
    set_seed(training.seed)
    model = AutoModelForCausalLM.from_config(config)
    clock = StepClock()
    args = _arguments(training, folder)
    layerwise = {}
    if training.layerwise_lr:
        every = math.ceil(training.steps / 5 / RATE_UPDATES)
        llr = HeavyTailLRCallback(training.max_ratio, every, ramp=every // 2)
        layerwise = {"optimizer_cls_and_kwargs": llr.optimizer(args)}
        callbacks = [*callbacks, llr]
    trainer = Trainer(
        model=model,
        args=args,
        data_collator=default_data_collator,
        train_dataset=blocks["train"],
        eval_dataset=blocks["held_out"],
        callbacks=[clock, *callbacks],
        **layerwise,
    )
    trainer.remove_callback(ProgressCallback)
    whole = whole_checkpoints(folder)
    trainer.train(resume_from_checkpoint=str(whole[-1]) if whole else None)
    trainer.evaluate()
    history = trainer.state.log_history
    held_out_losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return model, {
        "parameters": model.num_parameters(),
        "effective_depth": config.num_hidden_layers,
        "steps": training.steps,
        "tokens": training.steps * training.batch_size * len(blocks["train"][0]["input_ids"]),
        "seconds_per_step": median(clock.seconds) if clock.seconds else None,
        "held_out_loss": held_out_losses[training.steps],
        "perplexity": perplexity_of(held_out_losses[training.steps]),
        "train_losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "held_out_losses": [list(point) for point in held_out_losses.items()],
        "layer_rates": rows(history),
    }


def _arguments(training: Training, folder: Path) -> TrainingArguments:
    saves = {"save_strategy": "no"}
    if training.num_checkpoints:
        every = math.ceil(training.steps / training.num_checkpoints)
        saves = {"save_strategy": "steps", "save_steps": every, "save_total_limit": 1}
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=8,
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(training.steps / 10),
        weight_decay=0.1,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        logging_steps=math.ceil(training.steps / TRAIN_POINTS),
        eval_strategy="steps",
        eval_steps=math.ceil(training.steps / HELD_OUT_POINTS),
        prediction_loss_only=True,
        report_to="none",
        seed=training.seed,
        data_seed=training.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        **saves,
    )


def whole_checkpoints(folder: Path) -> list[Path]:
    """Trainer's checkpoints in a folder that were written to their end, oldest first; the last file is its state."""
    states = [file for file in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json") if _is_whole(file)]
    return sorted((file.parent for file in states), key=lambda checkpoint: int(checkpoint.name.split("-")[-1]))


def _is_whole(state: Path) -> bool:
    try:
        TrainerState.load_from_json(str(state))
    except ValueError:  # half a file
        return False
    return True
