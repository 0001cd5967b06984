import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers.integrations import moe
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM, FullLoopConfig, FullLoopForCausalLM

# One thread: the models are tiny, and two test workers would fight over two cores.
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


# Fields for each backbone; "mixtral" is what a Llama with experts is called.
BACKBONES = {
    "llama": {},
    "olmo": {"backbone": "olmo", "clip_qkv": 0.8},
    "olmo2": {"backbone": "olmo2"},
    "olmoe": {"backbone": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
SPARSE = ("olmoe", "mixtral")


def asymloop_config(**overrides) -> AsymLoopConfig:
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_loops": 3}
    return AsymLoopConfig(**{**SIZES, **layers, **overrides})


def fullloop_config(**overrides) -> FullLoopConfig:
    return FullLoopConfig(**{**SIZES, "num_layers": 3, "num_loops": 2, **overrides})


def asymloop(attn_implementation="sdpa", **overrides) -> AsymLoopForCausalLM:
    config = asymloop_config(**overrides)
    config._attn_implementation = attn_implementation
    return AsymLoopForCausalLM(config).eval()


def fullloop(**overrides) -> FullLoopForCausalLM:
    return FullLoopForCausalLM(fullloop_config(**overrides)).eval()


# One of each kind.
KINDS = {
    "asymloop": asymloop,
    "asymloop, window of 3": lambda **fields: asymloop(**{"local_window": 3, **fields}),
    "asymloop, olmoe": lambda **fields: asymloop(**{**BACKBONES["olmoe"], **fields}),
    "full loop": fullloop,
}


def tokens(batch: int, length: int, seed: int = 0) -> torch.LongTensor:
    """Random tokens of shape `(batch, length)`, none of them the padding token."""
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def float64(monkeypatch):
    """
    Float64 throughout. Transformers computes norms, routing and the eager softmax in float32 whatever the dtype of the
    model; here they keep it, so that a test can ask for 1e-9. PyTorch's grouped product takes no float64, but that of
    Transformers does.
    """
    softmax = torch.nn.functional.softmax
    rms_norm = LlamaRMSNorm.forward
    layer_norm = OlmoLayerNorm.forward
    route = MixtralTopKRouter.forward

    def softmax_in_own_dtype(x, dim=None, dtype=None):
        return softmax(x, dim=dim, dtype=x.dtype)

    def rms_norm_in_own_dtype(self, x):
        if x.dtype != torch.float64:
            return rms_norm(self, x)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def layer_norm_in_own_dtype(self, x):
        if x.dtype != torch.float64:
            return layer_norm(self, x)
        return torch.nn.functional.layer_norm(x, self.normalized_shape, eps=1e-5)

    def route_in_own_dtype(self, x):
        if x.dtype != torch.float64:
            return route(self, x)
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.T
        values, indices = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), indices

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_in_own_dtype)
    for norm_class in (LlamaRMSNorm, Olmo2RMSNorm, OlmoeRMSNorm, MixtralRMSNorm):
        monkeypatch.setattr(norm_class, "forward", rms_norm_in_own_dtype)
    monkeypatch.setattr(OlmoLayerNorm, "forward", layer_norm_in_own_dtype)
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *tensors: False)
    monkeypatch.setattr(MixtralTopKRouter, "forward", route_in_own_dtype)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
