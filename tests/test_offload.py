"""Models whose weights lie elsewhere: device maps, and weights that Accelerate's hooks fetch from memory or disk."""

import copy
import re

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from conftest import KINDS, tokens
from transformers import AutoModelForCausalLM

every_model = pytest.mark.parametrize("name", KINDS)


def some_on_disk(model) -> dict[str, str]:
    """A device map: the first layer of each stack and the norm on disk, all else in memory."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    for name, module in model.named_modules():
        if name.endswith("layers"):
            places |= {f"{name}.{i}": "disk" if i == 0 else "cpu" for i in range(len(module))}
    return places


def half_the_memory(model) -> dict[str, int]:
    return {"cpu": model.get_memory_footprint() // 2}


def from_pretrained(model, folder, **options):
    model.save_pretrained(folder / "checkpoint")
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint", offload_folder=folder / "offload", **options)


# How a model comes to lie elsewhere, and whether a part of it, or all, is fetched when it is needed.
WAYS = {
    "all in memory": (lambda model, folder: from_pretrained(model, folder, device_map={"": "cpu"}), "none"),
    "auto": (lambda model, folder: from_pretrained(model, folder, device_map="auto"), "none"),
    "auto, memory for half": (
        lambda model, folder: from_pretrained(model, folder, device_map="auto", max_memory=half_the_memory(model)),
        "some",
    ),
    "some on disk": (lambda model, folder: from_pretrained(model, folder, device_map=some_on_disk(model)), "some"),
    "dispatch_model": (
        lambda model, folder: dispatch_model(model, some_on_disk(model), main_device="cpu", offload_dir=folder),
        "some",
    ),
    "cpu_offload": (lambda model, folder: cpu_offload(model, execution_device="cpu"), "all"),
    "disk_offload": (lambda model, folder: disk_offload(model, folder, execution_device="cpu"), "all"),
}


@pytest.mark.parametrize("way", WAYS)
@every_model
def test_weights_elsewhere_compute_the_same(name, way, tmp_path):
    model = KINDS[name]()
    place, fetched = WAYS[way]
    placed = place(copy.deepcopy(model), tmp_path)
    is_elsewhere = [weight.is_meta for weight in placed.parameters()]
    assert {"none": not any(is_elsewhere), "some": any(is_elsewhere), "all": all(is_elsewhere)}[fetched]
    assert torch.equal(placed(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
    for num_loops in (1, 4):
        options = {"max_new_tokens": 5, "do_sample": False, "num_loops": num_loops}
        assert torch.equal(placed.generate(tokens(2, 9), **options), model.generate(tokens(2, 9), **options))


@pytest.mark.parametrize("way", ["some on disk", "disk_offload", "cpu_offload"])
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("asymloop")])
def test_weights_elsewhere_encode_once(name, way, tmp_path):
    model = KINDS[name]()
    placed = WAYS[way][0](copy.deepcopy(model), tmp_path)
    input_ids, expected = tokens(2, 9), model.encode(tokens(2, 9)[:, :-2])
    cache = placed.encode(input_ids[:, :-2])
    for num_loops in (1, 4):
        logits = placed(input_ids[:, -2:], cache=cache.fork(num_loops)).logits
        assert torch.equal(logits, model(input_ids[:, -2:], cache=expected.fork(num_loops)).logits)


@every_model
def test_layers_are_not_split(name, tmp_path):
    """A layer adds its input to its output: both have to be in one place."""
    model = KINDS[name]()
    placed = WAYS["auto, memory for half"][0](model, tmp_path)
    assert any(place == "disk" for place in placed.hf_device_map.values())
    assert not any(re.search(r"layers\.\d+\.", path) for path in placed.hf_device_map)
