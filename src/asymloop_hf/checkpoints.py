"""A checkpoint as a model with its tokenizer, after a check that they belong together."""

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .tokenizer import load_tokenizer


def load_checkpoint(checkpoint: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A causal language model, ready to be evaluated in the dtype that it was saved in, and its tokenizer.

    Args:
        checkpoint: a folder or a name on the hub.
        device: where the model goes; by default it stays on the CPU.

    Raises:
        `ValueError`: there is no tokenizer, or it has more tokens than the model.
    """
    tokenizer = load_tokenizer(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"vocab_size={model.config.vocab_size} is not allowed: the tokenizer has {len(tokenizer)} tokens."
        )
    return model if device is None else model.to(device), tokenizer
