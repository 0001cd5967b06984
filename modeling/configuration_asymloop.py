"""The configuration of AsymLoop: an encoder that runs once, a weight-tied decoder that loops over its key/values."""

import copy
import math
from dataclasses import field, fields

from .backbones import BACKBONES, EXPERT_ALIGNMENT
from .configuration_fullloop import FullLoopConfig
from .configuration_looped import LoopedConfig, is_positive_int, make_servable, require

# The Llama shapes of the layerwise-rate experiments: hidden and intermediate size, heads, layers of both stacks.
PRESETS = {
    "60m": (768, 1512, 12, 6),
    "130m": (768, 2048, 12, 12),
    "350m": (1024, 2736, 16, 24),
    "1b": (2048, 5461, 32, 24),
}
# A preset with experts: a token passes as many parameters as in the dense preset, up to rounding, and the routers.
SPARSE_PRESET = {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
STACKS = ("encoder", "decoder")


class AsymLoopConfig(LoopedConfig):
    """
    Configuration of an AsymLoop model.

    Args:
        num_encoder_layers (`int`, *optional*, defaults to 6):
            Layers of the causal encoder, which runs once and whose key/values are the global KV.
        num_decoder_layers (`int`, *optional*, defaults to 6):
            Layers of the weight-tied decoder.
        num_loops (`int`, *optional*, defaults to 3):
            How often the decoder runs.
        global_kv_layers (`list[int]`, *optional*):
            The encoder layer that each decoder layer reads. `None` stands for `floor(j * Le / Ld)`.
        decoder_init (`str`, *optional*, defaults to `"encoder"`):
            The first decoder state: `"encoder"`, the encoder's output, or `"embedding"`, the token embeddings.
        input_injection (`str`, *optional*, defaults to `"embedding"`):
            `"none"`; `"state"` adds the first state again before each later loop; `"embedding"` adds the token
            embeddings before each later loop, and before the first one too where the state starts from the encoder.
        local_window (`int`, *optional*):
            How far back local attention reads: `None` for everything, 1 for the position itself only.
        moe_stacks (`list[str]`, *optional*, defaults to `["encoder", "decoder"]`):
            The stacks whose MLPs are sparse where there are experts.

    The other fields are those of [`LoopedConfig`].

    Example:

    ```python
    >>> from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM

    >>> config = AsymLoopConfig.preset("60m", num_loops=5)
    >>> config.num_hidden_layers  # visits: 3 encoder layers + 5 loops of 3 decoder layers
    18
    >>> model = AsymLoopForCausalLM(config)
    ```
    """

    model_type = "asymloop"
    _layer_counts = ("num_encoder_layers", "num_decoder_layers")
    _input_injections = ("none", "state", "embedding")
    _fields_of_the_other = ("num_layers",)
    _untied_embedding_std = 0.3
    _derived = ("num_hidden_layers", "layer_types", "sliding_window", "global_kv_map")

    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    num_loops: int = 3
    global_kv_layers: list[int] | None = None
    decoder_init: str = "encoder"
    local_window: int | None = None
    moe_stacks: list[str] = field(default_factory=lambda: list(STACKS))

    def _num_visits(self) -> int:
        return self.num_encoder_layers + self.num_loops * self.num_decoder_layers

    @property
    def layer_types(self) -> list[str]:
        """The kind of each cache slot, in visit order. A window of 1 needs no local slot, so it leaves them empty."""
        windowed = self.local_window is not None and self.local_window > 1
        local = "sliding_attention" if windowed else "full_attention"
        return ["full_attention"] * self.num_encoder_layers + [local] * self.num_loops * self.num_decoder_layers

    @property
    def sliding_window(self) -> int | None:
        """`local_window` under the name that Transformers' caches and masks read."""
        return self.local_window

    @sliding_window.setter
    def sliding_window(self, value: int | None) -> None:
        self.local_window = value

    @property
    def global_kv_map(self) -> list[int]:
        """The encoder layer that each decoder layer reads, with the default filled in."""
        if self.global_kv_layers is not None:
            return self.global_kv_layers
        return [j * self.num_encoder_layers // self.num_decoder_layers for j in range(self.num_decoder_layers)]

    def is_sparse(self, stack: str) -> bool:
        """Whether the MLPs of a stack, `"encoder"` or `"decoder"`, have experts."""
        return self.num_experts > 0 and stack in self.moe_stacks

    def _stacks(self) -> dict[str, bool]:
        return {f"{stack}.": self.is_sparse(stack) for stack in STACKS}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        require(
            self.local_window is None or is_positive_int(self.local_window),
            "local_window",
            self.local_window,
            "None or a positive integer",
        )
        inits = ("encoder", "embedding")
        require(self.decoder_init in inits, "decoder_init", self.decoder_init, f"one of {inits}")
        self._check_global_kv_layers()
        self._check_moe_stacks()

    def _check_global_kv_layers(self) -> None:
        layers = self.global_kv_layers
        allowed = (
            f"None or a list of {self.num_decoder_layers} encoder layers, one for each decoder layer, "
            f"each from 0 to {self.num_encoder_layers - 1}"
        )
        require(layers is None or isinstance(layers, (list, tuple)), "global_kv_layers", layers, allowed)
        if layers is not None:
            in_range = [type(i) is int and 0 <= i < self.num_encoder_layers for i in layers]
            require(len(layers) == self.num_decoder_layers and all(in_range), "global_kv_layers", layers, allowed)

    def _check_moe_stacks(self) -> None:
        stacks, allowed = self.moe_stacks, f"a list of one or both of {STACKS}"
        require(isinstance(stacks, (list, tuple)) and len(stacks) > 0, "moe_stacks", stacks, allowed)
        is_known = all(stack in STACKS for stack in stacks) and len(set(stacks)) == len(stacks)
        require(is_known, "moe_stacks", stacks, allowed)

    @classmethod
    def preset(cls, size: str, backbone: str = "llama", **overrides) -> "AsymLoopConfig":
        """
        The configuration of a named size (`"60m"`, `"130m"`, `"350m"`, `"1b"`): half of the layers encode, half loop.

        With experts, as `"olmoe"` has them and `num_experts=8` gives them to `"llama"`, a size tells what a token
        passes: each of its `num_experts_per_tok` experts has that part of the dense MLP's size, rounded up to 8.

        Args:
            size: the name, as in the experiments with layerwise learning rates.
            backbone: the kind of the layers.
            overrides: any field of the configuration, in place of the preset's value.

        Raises:
            `ValueError`: an unknown size.
        """
        require(size in tuple(PRESETS), "size", size, f"one of {tuple(PRESETS)}")
        require(backbone in tuple(BACKBONES), "backbone", backbone, f"one of {tuple(BACKBONES)}")
        hidden_size, intermediate_size, num_attention_heads, num_layers = PRESETS[size]
        overrides = {cls.attribute_map.get(name, name): value for name, value in overrides.items()}
        if overrides.get("num_experts", BACKBONES[backbone].needs_experts):
            overrides = {**SPARSE_PRESET, **overrides}
            num_active = overrides["num_experts_per_tok"]
            require(is_positive_int(num_active), "num_experts_per_tok", num_active, "a positive integer")
            intermediate_size = math.ceil(intermediate_size / num_active / EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT
        return cls(
            **{
                "backbone": backbone,
                "hidden_size": hidden_size,
                "intermediate_size": intermediate_size,
                "num_attention_heads": num_attention_heads,
                "num_encoder_layers": num_layers // 2,
                "num_decoder_layers": num_layers // 2,
                **overrides,
            }
        )

    def matched_full_loop(self) -> FullLoopConfig:
        """
        The Full Loop with the same parameters, `L = Le + Ld` layers, and the same effective depth,
        `Rf = (Le + R * Ld) / (Le + Ld)` loops.

        Raises:
            `ValueError`: no whole number of loops gives the same depth, or one stack is sparse and the other dense.
        """
        require(
            self.is_sparse("encoder") == self.is_sparse("decoder"),
            "moe_stacks",
            self.moe_stacks,
            f"{list(STACKS)}: the layers of a Full Loop are all alike",
        )
        num_layers = self.num_encoder_layers + self.num_decoder_layers
        num_loops, rest = divmod(self.num_hidden_layers, num_layers)
        require(
            rest == 0,
            "num_loops",
            self.num_loops,
            f"such that the effective depth {self.num_hidden_layers} is a multiple of the {num_layers} layers "
            "(an odd number where encoder and decoder have the same number of layers)",
        )
        shared = {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(LoopedConfig)}
        injection = "none" if self.input_injection == "none" else "embedding"
        shared |= {"num_layers": num_layers, "num_loops": num_loops, "input_injection": injection}
        return FullLoopConfig(**{name: value for name, value in shared.items() if name not in NOT_SHARED})


# What describes one saved model, not its shape.
NOT_SHARED = ("architectures", "transformers_version")

AsymLoopConfig.register_for_auto_class()
make_servable("AsymLoopForCausalLM")
