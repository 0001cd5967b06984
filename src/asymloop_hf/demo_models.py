"""The two small models of the demo, and how each of them is trained."""

import math
import tempfile
import time
from dataclasses import dataclass
from statistics import median

import torch
from transformers import (
    AutoModelForCausalLM,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from . import AsymLoopConfig
from .layerwise_lr import HeavyTailLRCallback
from .layerwise_table import rows

HELD_OUT_POINTS = 5  # evaluations along a training run
RATE_UPDATES = 5  # of the layers' learning rates, in the first fifth of a training run


@dataclass(frozen=True)
class Size:
    """The shape of the demo's two models and of their training."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_stack_layers: int  # of the encoder and of the decoder
    vocab_size: int
    block_size: int
    batch_size: int
    learning_rate: float  # the base rate
    num_loops: int = 3

    @property
    def step_tokens(self) -> int:
        return self.block_size * self.batch_size

    def configs(self, tokenizer) -> dict:
        """The configurations of AsymLoop and of the Full Loop that matches it."""
        asymloop = AsymLoopConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_encoder_layers=self.num_stack_layers,
            num_decoder_layers=self.num_stack_layers,
            num_loops=self.num_loops,
            max_position_embeddings=self.block_size,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return {"asymloop": asymloop, "fullloop": asymloop.matched_full_loop()}


# Small batches: in a few minutes, many small updates teach more than few large ones (measured at the size `small`).
SIZES = {
    "tiny": Size(64, 176, 2, 1, vocab_size=1024, block_size=128, batch_size=8, learning_rate=3e-3),
    "small": Size(128, 344, 4, 2, vocab_size=4096, block_size=256, batch_size=2, learning_rate=3e-3),
    "medium": Size(256, 688, 4, 3, vocab_size=8192, block_size=512, batch_size=4, learning_rate=1e-3),
}


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


def train_model(config, size, blocks, steps, seed) -> dict:
    """Train a new model on `blocks["train"]` with the Trainer, and evaluate it on `blocks["held_out"]`.

    The result holds the `model`, the `layer_rates` of its training, and what `results.json` says of it.
    """
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    clock = StepClock()
    every = math.ceil(steps / 5 / RATE_UPDATES)
    llr = HeavyTailLRCallback(every=every, ramp=every // 2)
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=size.batch_size,
            per_device_eval_batch_size=8,
            learning_rate=size.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(steps / 10),
            weight_decay=0.1,
            logging_steps=math.ceil(steps / 50),
            eval_strategy="steps",
            eval_steps=math.ceil(steps / HELD_OUT_POINTS),
            prediction_loss_only=True,
            save_strategy="no",
            report_to="none",
            seed=seed,
            data_seed=seed,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=default_data_collator,
            train_dataset=blocks["train"],
            eval_dataset=blocks["held_out"],
            optimizer_cls_and_kwargs=llr.optimizer(args),
            callbacks=[clock, llr],
        )
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LossBar)
        trainer.train()
        trainer.evaluate()
    history = trainer.state.log_history
    held_out_losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return {
        "model": model,
        "layer_rates": rows(history),
        "parameters": model.num_parameters(),
        "effective_depth": config.num_hidden_layers,
        "steps": steps,
        "tokens": steps * size.step_tokens,
        "seconds_per_step": median(clock.seconds),
        "held_out_loss": held_out_losses[steps],
        "perplexity": math.exp(held_out_losses[steps]),
        "train_losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "held_out_losses": [list(point) for point in held_out_losses.items()],
    }
