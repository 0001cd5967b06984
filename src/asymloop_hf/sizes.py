"""Sizes to train and compare models at: small ones for a machine without a GPU, and the presets."""

from dataclasses import dataclass

from .modeling.configuration_asymloop import PRESETS


@dataclass(frozen=True)
class Size:
    """The shape of an AsymLoop and of the models that match it, and of their training."""

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

    def shared_fields(self, tokenizer=None) -> dict:
        """The fields of a configuration that matched models have in common, with the vocabulary of a tokenizer."""
        shape = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "max_position_embeddings": self.block_size,
        }
        if tokenizer is None:
            return shape
        token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return shape | token_ids | {"vocab_size": len(tokenizer)}


# Small batches: in a few minutes, many small updates teach more than few large ones (measured at the size `small`).
SIZES = {
    "tiny": Size(64, 176, 2, 2, vocab_size=1024, block_size=128, batch_size=8, learning_rate=3e-3),
    "small": Size(128, 344, 4, 2, vocab_size=4096, block_size=256, batch_size=2, learning_rate=3e-3),
    "medium": Size(256, 688, 4, 3, vocab_size=8192, block_size=512, batch_size=4, learning_rate=1e-3),
} | {
    name: Size(*shape, num_layers // 2, vocab_size=32000, block_size=1024, batch_size=32, learning_rate=1e-3)
    for name, (*shape, num_layers) in PRESETS.items()
}
