"""The configuration of Full Loop, the baseline: one weight-tied stack that loops as a whole."""

from .configuration_looped import LoopedConfig, make_servable


class FullLoopConfig(LoopedConfig):
    """
    Configuration of a Full Loop model: all `num_layers` layers run `num_loops` times. With one loop it is a Llama, or
    what the backbone is.

    Args:
        num_layers (`int`, *optional*, defaults to 12):
            Layers with weights of their own.
        num_loops (`int`, *optional*, defaults to 2):
            How often the whole stack runs.
        input_injection (`str`, *optional*, defaults to `"embedding"`):
            `"embedding"` adds the token embeddings to the state before each later loop, `"none"` adds nothing.

    The other fields are those of [`LoopedConfig`].
    """

    model_type = "fullloop"
    _layer_counts = ("num_layers",)
    _input_injections = ("none", "embedding")
    _fields_of_the_other = (
        *("num_encoder_layers", "num_decoder_layers", "global_kv_layers", "decoder_init", "local_window"),
        "moe_stacks",
    )

    num_layers: int = 12

    def _num_visits(self) -> int:
        return self.num_layers * self.num_loops


FullLoopConfig.register_for_auto_class()
make_servable("FullLoopForCausalLM")
