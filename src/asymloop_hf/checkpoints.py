"""A checkpoint as a model with its tokenizer, after a check that they belong together."""

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .tokenizer import load_tokenizer


def checkpoint_config(checkpoint: str) -> PreTrainedConfig:
    """
    The configuration of a checkpoint.

    Raises:
        `FileNotFoundError`: it is neither a folder nor a name on the hub that has one.
    """
    try:
        return AutoConfig.from_pretrained(checkpoint)
    except OSError as error:
        raise FileNotFoundError(
            f"checkpoint={checkpoint!r} is neither a folder nor a hub name with a readable config.json: "
            + str(error).partition("\n")[0]
        ) from error


def load_checkpoint(checkpoint: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A causal language model, ready to be evaluated in the dtype that it was saved in, and its tokenizer.

    Args:
        checkpoint: a folder or a name on the hub.
        device: where the model goes; by default it stays on the CPU.

    Raises:
        `FileNotFoundError`: there is no such checkpoint.
        `ValueError`: it has no tokenizer, or one with more tokens than the model; its weights are missing or cut off;
            there is no such device.
    """
    _check_device(device)
    config = checkpoint_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size} is not allowed: the tokenizer has {len(tokenizer)} tokens.")
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint={checkpoint!r} is not allowed: its weights cannot be read ({error}).") from error
    return model if device is None else model.to(device), tokenizer


def _check_device(device: str | None) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} is not allowed: this machine has no such device ({reason}).") from error
