"""What recipes take by arithmetic: no run is behind these numbers.

    python examples/gpu_hours.py examples/recipes/{60m,130m,350m,1b}.yaml --gpus A100,H100 --mfu 0.4

hours = tokens x 3 x forward FLOPs per token / (FLOP/s of the GPU at its best x MFU) / 3600
"""

import argparse
from pathlib import Path

from asymloop_hf.budget import budget
from asymloop_hf.recipe import model_config, read_recipe
from asymloop_hf.throughput import PEAK_FLOPS

DEFAULTS = {"model": "asymloop", "preset": "60m", "config_overrides": "", "block_size": 1024}  # of pretrain.py


def costs(recipe: dict) -> tuple[int, int]:
    """Parameters of the model that a recipe trains, and FLOPs of its training."""
    settings = DEFAULTS | {name: recipe[name] for name in DEFAULTS if name in recipe}
    model = budget(model_config(**settings), settings["block_size"])
    return model.parameters, recipe["tokens"] * 3 * model.flops_per_token


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--gpus", default="A100,H100", help=f"names of {', '.join(PEAK_FLOPS)}")
    parser.add_argument("--mfu", type=float, default=0.4, help="the share of its peak that a GPU is assumed to do")
    args = parser.parse_args()
    gpus = args.gpus.split(",")
    if unknown := [name for name in gpus if name not in PEAK_FLOPS]:
        parser.error(f"argument --gpus: {unknown[0]!r} is not one of the names {', '.join(PEAK_FLOPS)}")
    if not 0 < args.mfu <= 1:
        parser.error(f"argument --mfu: {args.mfu} is not above 0 and at most 1")

    print(f"{'recipe':<8}{'parameters':>15}{'tokens':>16}{'FLOPs':>11}" + "".join(f"{g + ' hours':>14}" for g in gpus))
    for path in args.recipes:
        recipe = read_recipe(path)
        if type(recipe.get("tokens")) is not int:
            parser.error(f"{path}: tokens={recipe.get('tokens')!r} is not allowed: it must be a whole number")
        parameters, flops = costs(recipe)
        hours = "".join(f"{flops / (PEAK_FLOPS[name] * args.mfu) / 3600:>14,.1f}" for name in gpus)
        print(f"{Path(path).stem:<8}{parameters:>15,}{recipe['tokens']:>16,}{flops:>11.2e}{hours}")


if __name__ == "__main__":
    main()
