import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers.models.llama import modeling_llama

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


def tokens(batch: int, length: int, seed: int = 0) -> torch.LongTensor:
    """Random tokens of shape `(batch, length)`, none of them the padding token."""
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def float64(monkeypatch):
    """
    Float64 throughout. Transformers computes RMSNorm and the eager softmax in float32 whatever the dtype of the model;
    here they keep it, so that a test can ask for 1e-9.
    """
    softmax = torch.nn.functional.softmax
    rms_norm = modeling_llama.LlamaRMSNorm.forward

    def softmax_in_own_dtype(x, dim=None, dtype=None):
        return softmax(x, dim=dim, dtype=x.dtype)

    def rms_norm_in_own_dtype(self, x):
        if x.dtype != torch.float64:
            return rms_norm(self, x)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.nn.functional, "softmax", softmax_in_own_dtype)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", rms_norm_in_own_dtype)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
