"""Saving and loading: with the package, and without it from the files beside the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BACKBONES, asymloop, asymloop_config, fullloop, fullloop_config, tokens
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import asymloop_hf
from asymloop_hf import AsymLoopForCausalLM

MAKERS = {"asymloop": asymloop, "fullloop": fullloop}
HEADS = {
    AutoModel: "Model",
    AutoModelForCausalLM: "ForCausalLM",
    AutoModelForSequenceClassification: "ForSequenceClassification",
    AutoModelForTokenClassification: "ForTokenClassification",
    AutoModelForQuestionAnswering: "ForQuestionAnswering",
}


def run_without_the_package(code: str, folder: Path) -> str:
    """Run Python code in `folder` where `asymloop_hf` cannot be imported, and return what it prints."""
    blocked = "import sys; sys.modules['asymloop_hf'] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", blocked + code],
        capture_output=True,
        text=True,
        env={"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", MAKERS)
def test_round_trip(name, backbone, tied, tmp_path):
    model = MAKERS[name](tie_word_embeddings=tied, **BACKBONES[backbone])
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)
    torch.testing.assert_close(loaded(tokens(2, 7)).logits, model(tokens(2, 7)).logits)


@pytest.mark.parametrize("auto_class", HEADS)
@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_every_head_is_registered(make_config, auto_class, tmp_path):
    config = make_config(**BACKBONES["olmoe"])
    model = auto_class.from_config(config)
    assert type(model).__name__ == type(config).__name__.removesuffix("Config") + HEADS[auto_class]
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("auto_class", HEADS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_head_loads_without_the_package(name, auto_class, tmp_path):
    MAKERS[name]().save_pretrained(tmp_path / "checkpoint")
    code = f"""
import torch, transformers
model = transformers.{auto_class.__name__}.from_pretrained("checkpoint", trust_remote_code=True)
model(torch.tensor({tokens(2, 7).tolist()}))
print(type(model).__module__)
"""
    assert run_without_the_package(code, tmp_path).startswith("transformers_modules.")


@pytest.mark.parametrize("backbone", [name for name in BACKBONES if name != "llama"])
def test_every_backbone_loads_without_the_package(backbone, tmp_path):
    model = asymloop(**BACKBONES[backbone])
    model.save_pretrained(tmp_path / "checkpoint")
    code = f"""
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True).eval()
print(model.generate(torch.tensor({tokens(2, 7).tolist()}), max_new_tokens=5, do_sample=False).tolist())
"""
    expected = model.generate(tokens(2, 7), max_new_tokens=5, do_sample=False)
    assert json.loads(run_without_the_package(code, tmp_path).splitlines()[-1]) == expected.tolist()


def test_a_checkpoint_in_a_folder_of_any_name(tmp_path):
    asymloop().save_pretrained(tmp_path / "modèle-1.b")
    code = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("modèle-1.b", trust_remote_code=True)
print(tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""
    assert run_without_the_package(code, tmp_path).strip() == "(1, 3, 97)"


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_saved_again_without_the_package(name, tmp_path):
    model = MAKERS[name](num_loops=2)
    model.save_pretrained(tmp_path / "first")
    code = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("{first}", trust_remote_code=True).eval()
print(model.generate(torch.tensor({input_ids}), max_new_tokens=5, do_sample=False).tolist())
model.save_pretrained("{second}")
"""
    expected = model.generate(tokens(2, 7), max_new_tokens=5, do_sample=False)
    for first, second in (("first", "second"), ("second", "third")):
        code_here = code.format(first=first, second=second, input_ids=tokens(2, 7).tolist())
        assert json.loads(run_without_the_package(code_here, tmp_path).splitlines()[-1]) == expected.tolist()
    bundled = {file.name: file.read_text() for file in (tmp_path / "first").glob("*.py")}
    assert bundled == {file.name: file.read_text() for file in (tmp_path / "third").glob("*.py")}
    assert f"modeling_{name}.py" in bundled
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "third")
    assert type(loaded) is type(model)
    assert torch.equal(loaded(tokens(2, 7)).logits, model(tokens(2, 7)).logits)


def test_the_modeling_files_import_only_torch_and_transformers():
    folder = Path(asymloop_hf.modeling.__file__).parent
    for file in folder.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1].split(".")[0]
                assert module in {"", "torch", "transformers"} | set(sys.stdlib_module_names), (file.name, line)


def test_a_configuration_alone_can_be_saved_and_loaded(tmp_path):
    asymloop_config(num_loops=4).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_loops == 4


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_with_missing_or_extra_weights_is_refused_by_name(tmp_path):
    key = "model.decoder.layers.1.mlp.up_proj.weight"
    asymloop().save_pretrained(tmp_path / "missing")
    edit_weights(tmp_path / "missing", lambda weights: weights.pop(key))
    with pytest.raises(ValueError, match=rf"does not fit AsymLoopForCausalLM: missing weights \['{key}'\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "missing")

    asymloop().save_pretrained(tmp_path / "extra")
    edit_weights(tmp_path / "extra", lambda weights: weights.update({"model.layers.0.gate": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unexpected weights \['model.layers.0.gate'\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "extra")

    asymloop().save_pretrained(tmp_path / "headless")
    edit_weights(tmp_path / "headless", lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing weights \['lm_head.weight'\]"):
        AsymLoopForCausalLM.from_pretrained(tmp_path / "headless")

    asymloop().save_pretrained(tmp_path / "deeper")
    with pytest.raises(ValueError, match="missing weights.*model.encoder.layers.2"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "deeper", num_encoder_layers=3)


def test_another_head_on_a_language_model_is_no_error(tmp_path):
    model = asymloop()
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(classifier.model.norm.weight, model.model.norm.weight)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"lm_head.weight"}
    assert torch.equal(base.norm.weight, model.model.norm.weight)
