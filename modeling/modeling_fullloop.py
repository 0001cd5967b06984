"""Full Loop, the baseline: Llama, or another backbone, whose whole stack runs several times with the same weights."""

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .backbones import BACKBONES, new_layer
from .configuration_fullloop import FullLoopConfig
from .configuration_looped import is_positive_int, require
from .modeling_looped import (
    CACHE_NAME,
    LoopedCausalLM,
    LoopedPreTrainedModel,
    check_num_slots,
    check_padding,
    check_position_ids,
    embed,
    next_position_ids,
    one_cache,
    register_auto_classes,
    takes_old_cache_name,
)


class LoopSlots:
    """The cache view of one loop: layer `l` fills slot `loop * num_layers + l`."""

    def __init__(self, cache: Cache, first_slot: int):
        self.cache = cache
        self.first_slot = first_slot

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(key_states, value_states, self.first_slot + layer_idx, *args, **kwargs)


class FullLoopPreTrainedModel(LoopedPreTrainedModel):
    config: FullLoopConfig
    config_class = FullLoopConfig
    _no_split_modules = [backbone.layer.__name__ for backbone in BACKBONES.values()]
    _supports_flash_attn = True
    _supports_flex_attn = True
    _auto_map = {
        "AutoConfig": "configuration_fullloop.FullLoopConfig",
        "AutoModel": "modeling_fullloop.FullLoopModel",
        "AutoModelForCausalLM": "modeling_fullloop.FullLoopForCausalLM",
        "AutoModelForSequenceClassification": "modeling_fullloop.FullLoopForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_fullloop.FullLoopForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_fullloop.FullLoopForQuestionAnswering",
    }


class FullLoopModel(FullLoopPreTrainedModel):
    def __init__(self, config: FullLoopConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        backbone = BACKBONES[config.backbone]
        is_sparse = config.num_experts > 0
        self.layers = nn.ModuleList(
            [new_layer(backbone.layer, config, layer_idx, is_sparse) for layer_idx in range(config.num_layers)]
        )
        self.norm = backbone.norm(config)
        self.rotary_emb = backbone.rotary(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_old_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        """
        Args (those of `LlamaModel`, and):
            num_loops: loops to run, more or fewer than `config.num_loops`.
            past_key_values: another name of `cache`, for Transformers before 5.24.

        Raises:
            `ValueError`: `num_loops` is not a positive integer, or the cache was made for other layers or loops.
        """
        cache = one_cache(cache, past_key_values)
        num_loops = self.config.num_loops if num_loops is None else num_loops
        require(is_positive_int(num_loops), "num_loops", num_loops, "a positive integer")
        check_num_slots(cache, len(self.layers) * num_loops)
        inputs_embeds = embed(self, input_ids, inputs_embeds)
        if position_ids is None:
            position_ids = next_position_ids(inputs_embeds, cache)
        check_position_ids(position_ids, inputs_embeds)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() != 4:
            check_padding(attention_mask, inputs_embeds, cache)
        # The mask comes before a cache of our own: Transformers finds packed documents only where there is none.
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, cache, position_ids)
        if use_cache and cache is None:
            cache = DynamicCache()
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)

        hidden_states = inputs_embeds
        for loop in range(num_loops):
            if loop > 0 and self.config.input_injection == "embedding":
                hidden_states = hidden_states + inputs_embeds
            slots = None if cache is None else LoopSlots(cache, loop * len(self.layers))
            for layer in self.layers:
                hidden_states = layer(
                    hidden_states,
                    attention_mask=causal_mask,
                    position_ids=position_ids,
                    position_embeddings=position_embeddings,
                    use_cache=use_cache,
                    **{CACHE_NAME: slots},
                    **kwargs,
                )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache})


class FullLoopForCausalLM(LoopedCausalLM, FullLoopPreTrainedModel, GenerationMixin): ...


class FullLoopForSequenceClassification(GenericForSequenceClassification, FullLoopPreTrainedModel): ...


class FullLoopForTokenClassification(GenericForTokenClassification, FullLoopPreTrainedModel): ...


class FullLoopForQuestionAnswering(GenericForQuestionAnswering, FullLoopPreTrainedModel): ...


register_auto_classes(FullLoopPreTrainedModel, FullLoopModel, vars())
