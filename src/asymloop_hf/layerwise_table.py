"""The table of every layer's alpha and learning rate: from Trainer's logs to a csv file beside a checkpoint."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

TABLE = "layerwise_lr.csv"


class Row(NamedTuple):
    """
    One update of one layer.

    Args:
        step: optimizer steps before the update.
        layer: the name of the weight.
        alpha: the estimate, `nan` where there is none.
        rate: the learning rate that the update leads to, at the base rate of its step.
        base_rate: of the schedule at this step.
    """

    step: int
    layer: str
    alpha: float
    rate: float
    base_rate: float


def log_entry(step: int, epoch: float, base_rate: float, alphas: dict, factors: dict) -> dict:
    """What Trainer's `log_history` keeps of one update of all layers."""
    return {
        "step": step,
        "epoch": epoch,
        "learning_rate": base_rate,
        **{f"alpha/{layer}": alpha for layer, alpha in alphas.items()},
        **{f"rate/{layer}": base_rate * factor for layer, factor in factors.items()},
    }


def rows(log_history: list[dict]) -> list[Row]:
    """The rows of the updates in Trainer's `log_history`, oldest first, then by layer."""
    return [
        Row(entry["step"], layer, entry[f"alpha/{layer}"], entry[f"rate/{layer}"], entry["learning_rate"])
        for entry in log_history
        for layer in sorted((key[6:] for key in entry if key.startswith("alpha/")), key=_numbers_as_numbers)
    ]


def _numbers_as_numbers(name: str) -> list:
    """Layer 2 before layer 10; a checkpoint does not keep the order that the layers have in the model."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def write_table(table: list[Row], folder) -> None:
    """Write `layerwise_lr.csv` in a folder."""
    with open(Path(folder) / TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(table)


def read_table(folder) -> list[Row]:
    """
    The rows of `layerwise_lr.csv` in a folder.

    Raises:
        `FileNotFoundError`: the folder has no such file.
        `ValueError`: the file is not such a table, or has no row.
    """
    path = Path(folder) / TABLE
    with open(path, encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    columns = ", ".join(Row._fields)
    if tuple(header) != Row._fields or not lines:
        raise ValueError(f"{path} is not a table with the columns {columns} and a row for each layer and update")
    try:
        return [Row(int(step), layer, *map(float, numbers)) for step, layer, *numbers in lines]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a row that is not of the columns {columns}: {error}") from None
