"""Tokens per second and model-FLOPs utilisation in Trainer's logs."""

import logging
from time import perf_counter

import torch
from transformers import TrainerCallback

from .callback_order import go_ahead_of_reporters

logger = logging.getLogger(__name__)

# Dense bfloat16 FLOP/s of one device, as its maker states them, by a part of its name; the first that fits counts.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str | None = None) -> float | None:
    """
    The bfloat16 FLOP/s of a device at its best; `None` for one that is not in the table.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it; by default that of the current GPU, if there is one.
    """
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), None)


class ThroughputCallback(TrainerCallback):
    """
    Adds to each of Trainer's logs that has a loss, for the steps since the last one:

    - `tokens_per_second`, over all devices;
    - `model_flops_utilization`, where the peak is known: `flops_per_token` times that rate, over `peak_flops`.

    What evaluating and saving take is left out of the time, waiting for data is not.

    Args:
        tokens_per_step: those of an optimizer step, over all devices.
        flops_per_token: what training on a token takes, for example three times [`budget`]'s forward pass.
        peak_flops: FLOP/s of all devices together at their best; `None` if unknown.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: float, peak_flops: float | None):
        self.tokens_per_step, self.flops_per_token, self.peak_flops = tokens_per_step, flops_per_token, peak_flops
        self._restart(step=0)

    def on_train_begin(self, args, state, control, **kwargs):
        go_ahead_of_reporters(self)
        if self.peak_flops is None:
            logger.warning("peak_flops=None: this device's are not known, so the logs have no model_flops_utilization")
        self._restart(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self._worked_until = perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        tokens = (state.global_step - self._since_step) * self.tokens_per_step
        rate = tokens / (perf_counter() - self._since)
        numbers = {"tokens_per_second": rate}
        if self.peak_flops is not None:
            numbers["model_flops_utilization"] = rate * self.flops_per_token / self.peak_flops
        for entry in (logs, state.log_history[-1]):
            entry.update(numbers)
        self._restart(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self._leave_out()

    def on_save(self, args, state, control, **kwargs):
        self._leave_out()

    def _restart(self, step: int) -> None:
        self._since_step = step
        self._since = self._worked_until = perf_counter()

    def _leave_out(self) -> None:
        """Count no time since the last step or log."""
        now = perf_counter()
        self._since += now - self._worked_until
        self._worked_until = now
