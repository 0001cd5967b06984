"""Heavy-tail-guided layerwise learning rates for Trainer: layers with a light tail learn faster."""

import logging
import math
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .callback_order import go_ahead_of_reporters
from .layer_groups import layer_groups
from .layerwise_table import log_entry, rows, write_table
from .modeling.configuration_looped import is_number, is_positive_int, require
from .muon_adamw import MuonAdamW
from .shared_spectra import shared_alphas

logger = logging.getLogger(__name__)

SOURCES = ("weight", "gradient", "momentum")
MAPS = {"linear": lambda alpha: alpha, "sqrt": math.sqrt, "log2": math.log2}
SCOPES = ("model", "stack")
STACKS = ("encoder", "decoder")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": MuonAdamW}
TRAINER_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


class HeavyTailLRCallback(TrainerCallback):
    """
    Gives each weight matrix its own learning rate, guided by the spectrum: the larger [`heavy_tail_alpha`] (a light
    tail, a layer that has learnt little), the larger the rate. Over the matrices of the model

        rate = base * (1 + (max_ratio - 1) * (m(alpha) - min m(alpha)) / (max m(alpha) - min m(alpha)))

    where `base` is what Trainer's schedule says, whatever the schedule, and `m` the `map`. Embeddings and head have
    `max_ratio * base` from the first step on, norms, biases and matrices without an estimate `base`, and so have the
    other matrices until the first update. Used as

        llr = HeavyTailLRCallback()
        Trainer(model=model, args=args, optimizer_cls_and_kwargs=llr.optimizer(args), callbacks=[llr], ...)

    Trainer's checkpoint holds all that resuming needs. Alpha and rate of every layer go to Trainer's logs with the
    first log after each update, and are kept in `layerwise_lr.csv` in the checkpoint and in the output folder.
    `docs/layerwise_lr.md` has the method, the published settings and what is measured.

    Args:
        max_ratio: the largest rate over the base rate.
        every: optimizer steps between updates; the first is after so many.
        ramp: optimizer steps in which the rates go linearly from the old to the new; 0 changes them at once.
        until: the share of the run with updates; afterwards the factors stay.
        source: of the spectrum: `"weight"`, `"gradient"` or `"momentum"` (the optimizer's first moment).
        map: `"linear"`, `"sqrt"` or `"log2"`, applied to alpha.
        scope: over which matrices the smallest and the largest alpha are taken: `"model"`, or `"stack"` for those of
            encoder and decoder apart.
        reverse: give the largest rate to the heaviest tail.

    Raises:
        `ValueError`: a value out of range; the message names the field, the value and what is allowed.
    """

    def __init__(
        self,
        max_ratio: float = 5.0,
        every: int = 100,
        ramp: int = 50,
        until: float = 0.2,
        source: str = "weight",
        map: str = "linear",
        scope: str = "model",
        reverse: bool = False,
    ):
        require(is_number(max_ratio) and max_ratio >= 1, "max_ratio", max_ratio, "a number of at least 1")
        require(is_positive_int(every), "every", every, "a positive integer")
        steps = is_positive_int(ramp) or (ramp == 0 and ramp is not False)
        require(steps and ramp <= every, "ramp", ramp, f"an integer from 0 to every={every}")
        require(is_number(until) and 0 <= until <= 1, "until", until, "a number from 0 to 1")
        for field, value, allowed in (
            ("source", source, SOURCES),
            ("map", map, tuple(MAPS)),
            ("scope", scope, SCOPES),
        ):
            require(value in allowed, field, value, f"one of {allowed}")
        require(isinstance(reverse, bool), "reverse", reverse, "True or False")
        self.max_ratio, self.every, self.ramp, self.until = max_ratio, every, ramp, until
        self.source, self.map, self.scope, self.reverse = source, map, scope, reverse
        self._attached_to = None
        self._unreported = {}

    def optimizer(self, args: TrainingArguments, name: str = "adamw") -> tuple:
        """
        The optimizer, as Trainer's `optimizer_cls_and_kwargs`: it is made with the model when training starts, with
        the settings and the weight decay that Trainer would give it.

        Args:
            args: those of the Trainer; `optim` must be one of PyTorch's AdamW.
            name: `"adamw"`, or `"muon"` for Muon on the two-dimensional weights except embeddings and head, and AdamW
                on the rest.

        Raises:
            `ValueError`: `name` or `args.optim` is another one, gradients in fp16 are the source of the spectrum, or
                DeepSpeed is used.
        """
        require(name in OPTIMIZERS, "name", name, f"one of {tuple(OPTIMIZERS)}")
        require(args.optim in TRAINER_OPTIMIZERS, "optim", args.optim.value, f"one of {TRAINER_OPTIMIZERS}")
        require(
            not (args.fp16 and self.source == "gradient"),
            "source",
            self.source,
            "'weight' or 'momentum' with fp16=True, whose loss scaling lets gradients overflow",
        )
        require(args.deepspeed_plugin is None, "deepspeed", args.deepspeed, "None: DeepSpeed flattens the parameters")
        _, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        # Trainer calls what it takes for a class without arguments, and the result with the model and these settings.
        return lambda: self._make_optimizer, {"name": name, "weight_decay": args.weight_decay, "settings": settings}

    def _make_optimizer(self, model, name: str, weight_decay: float, settings: dict) -> torch.optim.Optimizer:
        groups = layer_groups(model, weight_decay, self.max_ratio)
        if self.scope == "stack":
            found = {_stack(group["name"]) for group in groups if group["kind"] == "matrix"}
            allowed = f"'model' for {type(model).__name__}, which has no encoder and decoder"
            require(found.issuperset(STACKS), "scope", self.scope, allowed)
        for group in groups if name == "muon" else ():
            group["muon"] = group["kind"] in ("matrix", "small matrix") and group["params"][0].ndim == 2
        optimizer = OPTIMIZERS[name](groups, **settings)
        optimizer.register_step_pre_hook(self._apply_factors)
        optimizer.register_step_post_hook(_restore_base_rates)
        return optimizer

    def _apply_factors(self, optimizer, *_) -> None:
        """Each group's own rate while a step lasts: between steps, schedule and checkpoint see the base rate."""
        for group in optimizer.param_groups:
            if group["lr"] and optimizer is not self._attached_to:
                raise ValueError("callbacks=[...] must have the HeavyTailLRCallback that made the optimizer")
            group["base_lr"] = group["lr"]
            group["lr"] *= group["factor"]

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        groups = optimizer.param_groups
        require(
            all("factor" in group for group in groups),
            "optimizer",
            type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "the one of this callback: Trainer(optimizer_cls_and_kwargs=llr.optimizer(args), callbacks=[llr])",
        )
        for group in groups:
            if group["kind"] == "embeddings":  # a checkpoint may be of another `max_ratio`
                group["factor"] = float(self.max_ratio)
            elif group["kind"] == "matrix" and state.global_step == 0:  # a ramp that `train` began when last called
                group["ramp_from"] = group["ramp_to"]
        self._attached_to = getattr(optimizer, "optimizer", optimizer)
        go_ahead_of_reporters(self)
        if not self._updates_at(self.every, state.max_steps):
            settings = f"every={self.every} and until={self.until} of {state.max_steps} steps"
            logger.warning(f"{settings}: there is no update of the layers' rates")

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        matrices = {group["name"]: group for group in optimizer.param_groups if group["kind"] == "matrix"}
        if self._updates_at(state.global_step, state.max_steps):
            self._update(matrices, optimizer, state)
        for group in matrices.values():
            group["factor"] = self._ramped(group, state.global_step)

    def _updates_at(self, step: int, max_steps: int) -> bool:
        return step > 0 and step % self.every == 0 and step / max_steps <= self.until

    def _ramped(self, group: dict, step: int) -> float:
        steps = step - group["ramp_start"] + 1
        if 0 < steps < self.ramp:
            return group["ramp_from"] + (group["ramp_to"] - group["ramp_from"]) * steps / self.ramp
        return group["ramp_to"]

    def _update(self, matrices: dict, optimizer, state) -> None:
        observed = {name: self._observed(group["params"][0], optimizer) for name, group in matrices.items()}
        alphas = shared_alphas(observed)
        factors = self._factors(alphas)
        step, base_rate = state.global_step, optimizer.param_groups[0]["lr"]
        for name, group in matrices.items():
            ramp = {"ramp_from": group["factor"], "ramp_to": factors[name], "ramp_start": step}
            group.update(alpha=alphas[name], **ramp)
        entry = log_entry(step, state.epoch, base_rate, alphas, factors)
        state.log_history.append(entry)
        self._unreported = {key: value for key, value in entry.items() if key.startswith(("alpha/", "rate/"))}

    def _observed(self, weight, optimizer) -> torch.Tensor | None:
        """What the spectrum of a weight is taken of; `None` for a weight that has had no gradient."""
        if self.source == "weight":
            return weight
        if self.source == "gradient":
            return weight.grad
        moments = optimizer.state.get(weight, {})
        return moments.get("momentum_buffer", moments.get("exp_avg"))

    def _factors(self, alphas: dict[str, float]) -> dict[str, float]:
        scopes = {name: _stack(name) if self.scope == "stack" else None for name in alphas}
        factors = {}
        for scope in set(scopes.values()):
            ranked = {name: alpha for name, alpha in alphas.items() if scopes[name] == scope}
            factors |= rate_factors(ranked, self.max_ratio, self.map, self.reverse)
        return factors

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logs.update(self._unreported)
            self._unreported = {}

    def on_save(self, args, state, control, **kwargs):
        self._write_table(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", state)

    def on_train_end(self, args, state, control, **kwargs):
        self._write_table(Path(args.output_dir), state)

    def _write_table(self, folder: Path, state) -> None:
        if state.is_world_process_zero and folder.is_dir() and (table := rows(state.log_history)):
            write_table(table, folder)


def rate_factors(alphas: dict[str, float], max_ratio: float, map: str = "linear", reverse: bool = False) -> dict:
    """
    Each layer's rate over the base rate, from 1 to `max_ratio`, linear in its mapped alpha as
    `HeavyTailLRCallback` says. It is 1 where alpha is `nan`, and for all where all are equal.
    """
    positions = {name: MAPS[map](alpha) for name, alpha in alphas.items() if not math.isnan(alpha)}
    low, high = min(positions.values(), default=0.0), max(positions.values(), default=0.0)
    if low == high:
        return dict.fromkeys(alphas, 1.0)
    shares = {name: (position - low) / (high - low) for name, position in positions.items()}
    if reverse:
        shares = {name: 1 - share for name, share in shares.items()}
    return {name: 1 + (max_ratio - 1) * shares.get(name, 0.0) for name in alphas}


def _stack(name: str) -> str | None:
    return next((part for part in name.split(".") if part in STACKS), None)


def _restore_base_rates(optimizer, *_) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.pop("base_lr")
