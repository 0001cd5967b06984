"""Two processes that share the work of training have the losses of one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BACKBONES, asymloop, fullloop, tokens
from distributed_training import has_fsdp2
from split_training import BATCH, losses, trainer_losses

from asymloop_hf import AsymLoopForCausalLM
from asymloop_hf.pipeline_stages import pipeline_stages

MODELS = {
    "asymloop, window of 3": lambda: asymloop(initializer_range=0.1, local_window=3, vocab_size=98),
    "olmo2": lambda: asymloop(initializer_range=0.1, **BACKBONES["olmo2"]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The losses of one process, and what both of two leave."""
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    MODELS["asymloop, window of 3"]().save_pretrained(folder / "model")
    alone = {
        "plain": losses(AsymLoopForCausalLM.from_pretrained(folder / "model")),
        "Trainer": trainer_losses(
            AsymLoopForCausalLM.from_pretrained(folder / "model"),
            folder / "alone",
            per_device_train_batch_size=BATCH,
        ),
    }
    script = Path(__file__).with_name("split_training.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*torchrun, str(script), str(folder)], check=True, timeout=600)
    return alone, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("way", "as_one"),
    [("tensor parallel", "plain"), ("pipeline", "plain"), ("DDP", "Trainer"), ("FSDP2", "Trainer")],
)
def test_two_processes_have_the_losses_of_one(run, way, as_one):
    alone, ranks = run
    if way == "FSDP2" and not has_fsdp2():
        pytest.skip("this release of accelerate has no FSDP2")
    last = ranks[1][way]
    torch.testing.assert_close(last, alone[as_one], rtol=1e-4, atol=1e-4)
    assert last[-1] != last[0]
    if way != "pipeline":
        torch.testing.assert_close(ranks[0][way], last, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed documents"])
def test_two_stages_are_the_model(name, is_packed):
    model = MODELS[name]()
    input_ids = tokens(2, 12)
    positions = {"position_ids": torch.arange(12).remainder(5).expand(2, -1)} if is_packed else {}
    encoder, decoder = pipeline_stages(model)
    logits = decoder(*encoder(input_ids, **positions), **positions)
    torch.testing.assert_close(logits, model(input_ids, use_cache=False, **positions).logits, rtol=1e-6, atol=1e-6)


def test_what_a_pipeline_cannot_be_is_said():
    with pytest.raises(ValueError, match="tie_word_embeddings=True is not allowed: it must be False"):
        pipeline_stages(asymloop(tie_word_embeddings=True))
    with pytest.raises(ValueError, match="output_router_logits=True is not allowed: it must be False"):
        pipeline_stages(asymloop(**BACKBONES["olmoe"], output_router_logits=True))
    with pytest.raises(ValueError, match="model='FullLoopForCausalLM' is not allowed: it must be an AsymLoop"):
        pipeline_stages(fullloop())
    for model in (asymloop(), fullloop()):
        with pytest.raises(ValueError, match="pp_size=2 is not allowed: it must be 1"):
            model.maybe_distribute_model(model, SimpleNamespace(pp_size=2), None)
