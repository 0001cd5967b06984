"""AsymLoop as a pipeline of two stages: one device encodes a batch while the other loops over the batch before."""

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from .modeling import AsymLoopForCausalLM
from .modeling.cache_asymloop import DecoderInput
from .modeling.configuration_looped import require
from .modeling.joint_mask import joint_masks
from .modeling.modeling_looped import next_position_ids


class EncoderStage(nn.Module):
    """Embeddings and encoder; its modules are the model's own, so its weights are too."""

    def __init__(self, model: AsymLoopForCausalLM):
        super().__init__()
        self.config = model.config
        self.embed_tokens = model.model.embed_tokens
        self.encoder = model.model.encoder
        self.rotary_emb = model.model.rotary_emb

    def forward(
        self, input_ids: torch.LongTensor, position_ids: torch.LongTensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns:
            The encoder's states and the token embeddings, both of shape `(batch, length, hidden_size)`, and the global
            keys and values of shape `(batch, num_encoder_layers, num_key_value_heads, length, head_dim)`.
        """
        inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = next_position_ids(inputs_embeds, None)
        states, global_kv = self.encoder(
            inputs_embeds,
            None,
            attention_mask=create_causal_mask(self.config, inputs_embeds, None, None, position_ids),
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(inputs_embeds, position_ids),
        )
        keys, values = (torch.stack(layers, dim=1) for layers in zip(*global_kv, strict=True))
        return states, inputs_embeds, keys, values


class DecoderStage(nn.Module):
    """Decoder, final norm and head; its modules are the model's own, so its weights are too."""

    def __init__(self, model: AsymLoopForCausalLM):
        super().__init__()
        self.config = model.config
        self.decoder = model.model.decoder
        self.norm = model.model.norm
        self.rotary_emb = model.model.rotary_emb
        self.lm_head = model.lm_head

    def forward(
        self,
        states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Logits of shape `(batch, length, vocab_size)` from what [`EncoderStage`] returns."""
        if position_ids is None:
            position_ids = next_position_ids(inputs_embeds, None)
        states = states if self.config.decoder_init == "encoder" else inputs_embeds
        _, joint_mask = joint_masks(self.config, inputs_embeds, None, position_ids, None, inputs_embeds.shape[1])
        hidden_states, _ = self.decoder(
            DecoderInput(states, inputs_embeds, position_ids),
            list(zip(keys.unbind(1), values.unbind(1), strict=True)),
            self.config.num_loops,
            None,
            joint_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(inputs_embeds, position_ids),
        )
        return self.lm_head(self.norm(hidden_states))


def pipeline_stages(model: AsymLoopForCausalLM) -> tuple[EncoderStage, DecoderStage]:
    """
    The two stages of a model, for `torch.distributed.pipelining`; `docs/compatibility.md` has an example. Packed
    documents are given as `position_ids` to both stages; there is no padding mask and no load-balancing loss.

    Raises:
        `ValueError`: another kind of model, head and embeddings are shared, or the model returns router logits.
    """
    is_asymloop = isinstance(model, AsymLoopForCausalLM)
    require(
        is_asymloop, "model", type(model).__name__, "an AsymLoopForCausalLM, whose encoder and decoder are the stages"
    )
    config = model.config
    require(not config.tie_word_embeddings, "tie_word_embeddings", True, "False, as the two are on different stages")
    wanted = config.output_router_logits
    require(not wanted, "output_router_logits", wanted, "False: the stages do not pass on the load-balancing loss")
    return EncoderStage(model), DecoderStage(model)
