"""Recipes: the settings of a run in a YAML file, each of which the command line can replace."""

import ast
import json
from argparse import ArgumentParser
from pathlib import Path

import yaml

from .modeling import AsymLoopConfig, FullLoopConfig

RECIPE_SUFFIXES = (".yaml", ".yml")


def read_recipe(path: str) -> dict:
    """
    The settings of a recipe.

    Raises:
        `ValueError`: the file is missing, not YAML, or not a mapping of names to values.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"recipe={path!r} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"recipe={path!r} holds {type(settings).__name__}, where a mapping of names to values must be"
        )
    return settings


def expand_recipe(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """
    The same command line with the recipe that it begins with, if it does, as options before the others, which replace
    them: `recipe.yaml --seed 1` becomes `--tokens 1000 --seed 0 --seed 1`.

    Raises:
        `ValueError`: the recipe cannot be read, or the parser has no option of the name of one of its settings.
    """
    if not arguments or not arguments[0].endswith(RECIPE_SUFFIXES):
        return arguments
    path, *others = arguments
    options = []
    known = {action.dest for action in parser._actions}
    for name, value in read_recipe(path).items():
        if name not in known:
            raise ValueError(f"recipe={path!r}: {name}={value!r} is not a setting; --help lists them")
        options += [f"--{name}", *_texts(value)]
    return options + others


def parse_overrides(text: str) -> dict:
    """`num_loops=5,local_window=None,decoder_init=embedding` as a dictionary; the values are Python literals."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        nodes = {item.arg: item.value for item in call.keywords}
        values = {name: v.id if isinstance(v, ast.Name) else ast.literal_eval(v) for name, v in nodes.items()}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"config_overrides={text!r} is not of the form name=value,name=value") from error
    known = AsymLoopConfig().to_dict()
    if unknown := [ast.unparse(node) for node in call.args] + [name for name in values if name not in known]:
        raise ValueError(f"config_overrides={text!r}: AsymLoopConfig has no field {unknown[0]!r}")
    return values


def model_config(
    model: str, preset: str, config_overrides: str, block_size: int, **fields
) -> AsymLoopConfig | FullLoopConfig:
    """
    The configuration that the settings of a run describe.

    Args:
        model: `"asymloop"`, or `"fullloop"` for the one that matches it.
        fields: of the configuration besides, such as the tokenizer's special tokens.
    """
    overrides = parse_overrides(config_overrides)
    config = AsymLoopConfig.preset(preset, **{"max_position_embeddings": block_size} | overrides | fields)
    return config.matched_full_loop() if model == "fullloop" else config


def _texts(value) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]
