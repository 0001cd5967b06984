"""`asymloop spectra`: the table, the figures, and what it says where there is nothing to show."""

import math

import pytest
import torch
from layerwise_runs import llama, make_trainer
from safetensors.torch import save_file

from asymloop_hf import spectra
from asymloop_hf.cli import main
from asymloop_hf.heavy_tail import heavy_tail_alpha, tail_exponent
from asymloop_hf.layerwise_lr import HeavyTailLRCallback
from asymloop_hf.layerwise_table import Row, read_table, write_table

ROWS = [
    Row(step, layer, alpha, rate, 0.01)
    for step in (100, 200)
    for layer, alpha, rate in (("layers.0.up_proj.weight", 2.0, 0.01), ("layers.1.up_proj.weight", 2.5, 0.05))
]
PNG = b"\x89PNG"


def is_png(path) -> bool:
    return path.read_bytes()[:4] == PNG


def last_lines(printed: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if ".weight" in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainer = make_trainer(llama(), folder, HeavyTailLRCallback(every=4, ramp=2, until=1.0), save_steps=6)
    trainer.train()
    return folder


def test_a_run_and_its_checkpoints(run, tmp_path, capsys):
    assert main(["spectra", str(run)]) == 0
    printed = last_lines(capsys.readouterr().out)
    assert len(printed) == 14
    for row in read_table(run)[-14:]:
        expected = [f"{row.alpha:.3f}", f"{row.rate:.3g}", f"{row.rate / row.base_rate:.2f}"]
        assert printed[row.layer] == expected
    assert is_png(run / "layerwise_lr.png") and is_png(run / "spectra.png")

    assert main(["spectra", str(run / "checkpoint-6"), "--output", str(tmp_path / "new" / "figures")]) == 0
    printed = capsys.readouterr().out
    assert "1 update, the last at step 4" in printed and "weights in " + str(run / "checkpoint-6") in printed
    assert {path.name for path in (tmp_path / "new" / "figures").iterdir()} == {"layerwise_lr.png", "spectra.png"}
    assert not (run / "checkpoint-6" / "spectra.png").exists()


def test_the_table_of_the_last_checkpoint_serves_a_run_that_did_not_end(run, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint-200"
    checkpoint.mkdir()
    (tmp_path / "checkpoint-100").mkdir()
    write_table(ROWS, checkpoint)
    assert main(["spectra", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert last_lines(printed)["layers.1.up_proj.weight"] == ["2.500", "0.05", "5.00"]
    assert "2 updates, the last at step 200, where the base rate was 0.01" in printed
    assert "has no safetensors file with these layers: their spectra are not drawn" in printed
    assert is_png(tmp_path / "layerwise_lr.png") and not (tmp_path / "spectra.png").exists()


def test_the_spectra_of_weights_in_several_files(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    files = spectra.find_weights(tmp_path)
    assert len(files) > 1
    layers = [f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 0)] + ["model.layers.7.mlp.up_proj.weight"]
    found = spectra.layer_spectra(files, layers)
    assert list(found) == layers[:2]
    for layer, eigenvalues in found.items():
        assert tail_exponent(eigenvalues) == heavy_tail_alpha(model.get_parameter(layer))


def test_weights_of_every_kind_are_drawn(tmp_path):
    weights = {"experts": torch.randn(3, 40, 50), "zero": torch.zeros(40, 40), "flat": torch.eye(40)}
    rank_two = torch.zeros(40, 40)
    rank_two[0, 0], rank_two[1, 1] = 1.0, 2.0
    save_file(weights | {"low rank": rank_two}, tmp_path / "model.safetensors")
    write_table([Row(1, name, math.nan, 0.0, 0.0) for name in [*weights, "low rank"]], tmp_path)
    assert main(["spectra", str(tmp_path)]) == 0
    assert is_png(tmp_path / "spectra.png") and is_png(tmp_path / "layerwise_lr.png")


def test_a_weight_that_is_not_finite_is_named(tmp_path, capsys):
    save_file({"layers.0.up_proj.weight": torch.full((40, 40), math.nan)}, tmp_path / "model.safetensors")
    write_table(ROWS, tmp_path)
    assert main(["spectra", str(tmp_path)]) == 2
    assert "layers.0.up_proj.weight in" in (error := capsys.readouterr().err) and "not finite" in error


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = [*ROWS, Row(300, 'a "name", with a comma', math.pi, 1e-300, 0.1 + 0.2)]
    write_table(table, tmp_path)
    assert read_table(tmp_path) == table


def test_where_there_is_nothing_to_show(tmp_path, capsys):
    assert main(["spectra", str(tmp_path / "missing")]) == 2
    assert "missing' is not a folder; a run's output folder or a checkpoint is needed" in capsys.readouterr().err
    assert main(["spectra", str(tmp_path)]) == 2
    assert "has no layerwise_lr.csv, and neither has its last checkpoint" in capsys.readouterr().err
    write_table(ROWS, tmp_path)
    (tmp_path / "file").touch()
    assert main(["spectra", str(tmp_path), "--output", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, problem",
    [
        ("", "is not a table with the columns step, layer, alpha, rate, base_rate"),
        ("step,loss\n1,2\n", "is not a table with the columns step, layer, alpha, rate, base_rate"),
        ("step,layer,alpha,rate,base_rate\n", "and a row for each layer and update"),
        ("step,layer,alpha,rate,base_rate\n1,a,2.0\n", "has a row that is not of the columns step, layer"),
        ("step,layer,alpha,rate,base_rate\n1,a,2.0,x,0.1\n", "has a row that is not of the columns .*'x'"),
    ],
)
def test_a_file_that_is_no_table(content, problem, tmp_path):
    (tmp_path / "layerwise_lr.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=problem):
        read_table(tmp_path)
