"""`torch.export`: one program for every batch size and length, and one that keeps a static cache."""

import pytest
import torch
from conftest import BACKBONES, asymloop, fullloop, tokens
from torch.export import Dim, export
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_loops": 2}
MODELS = {
    "asymloop": lambda: asymloop(**SMALL),
    "window of 3": lambda: asymloop(**SMALL, local_window=3),
    "mixtral": lambda: asymloop(**SMALL, **BACKBONES["mixtral"]),
    "full loop": lambda: fullloop(num_layers=1),
}


def padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    input_ids = tokens(batch, length)
    input_ids[0, : length // 2] = 0
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "strict", "inputs"),
    [
        *((name, False, "tokens") for name in MODELS),
        ("window of 3", True, "padded tokens"),
        ("full loop", True, "padded tokens"),
    ],
)
def test_a_forward_of_any_batch_and_length(name, strict, inputs):
    model, dynamic = MODELS[name](), {0: Dim("batch"), 1: Dim("length")}
    names = ("input_ids", "attention_mask") if inputs == "padded tokens" else ("input_ids",)
    example = {key: padded(2, 9)[key] for key in names}
    program = export(
        model,
        (),
        {**example, "use_cache": False},
        dynamic_shapes={**dict.fromkeys(names, dynamic), "use_cache": None},
        strict=strict,
    ).module()
    for batch, length in ((2, 9), (3, 2), (5, 60)):
        given = {key: padded(batch, length)[key] for key in names}
        exported, eager = (forward(**given, use_cache=False).logits for forward in (program, model))
        torch.testing.assert_close(exported, eager)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_static_cache_in_the_program(name):
    model, input_ids, positions = MODELS[name](), tokens(1, 9), torch.arange(9)
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=16,
        cache_config={"batch_size": 1, "max_cache_len": 16, "device": "cpu"},
    )
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=16)
    step = module.export(input_ids=input_ids[:, :1], cache_position=positions[:1], strict=False).module()
    logits = [step(input_ids=input_ids[:, i : i + 1], cache_position=positions[i : i + 1]) for i in range(9)]
    torch.testing.assert_close(torch.cat(logits, 1), model(input_ids).logits, rtol=1e-4, atol=1e-4)
