"""The code in the documentation runs as it is printed."""

import re
from pathlib import Path

import pytest

COMPATIBILITY = Path(__file__).parents[1] / "docs" / "compatibility.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_compatibility(tmp_path, monkeypatch):
    for package in ("peft", "torchao", "trl"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in PYTHON.findall(COMPATIBILITY.read_text(encoding="utf-8")):
        exec(compile(block, COMPATIBILITY.name, "exec"), names)
    assert names["reply"][-1]["role"] == "assistant"
    assert names["sft"].state.log_history[-1]["train_loss"] < 6
