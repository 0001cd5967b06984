"""A model's parameters in groups for an optimizer: each weight matrix alone, and together what shares a rate."""

import math

from torch import nn
from transformers import Trainer

SMALLEST_SIDE = 32  # a smaller matrix has fewer than 16 eigenvalues in its tail: a standard error of a quarter


def layer_groups(model: nn.Module, weight_decay: float, embedding_factor: float) -> list[dict]:
    """
    The parameter groups of a model for heavy-tail-guided learning rates. A group has the `factor` by which its rate
    differs from the base rate, and a `kind`:

    - `"matrix"`: one weight of two dimensions, or one batch of matrices such as fused experts `(experts, out, in)`,
      with both sides of a matrix at least 32. It also has what an update of its rate leaves: the last estimate `alpha`
      (`nan` before the first), and `ramp_from`, `ramp_to` and `ramp_start`, its factors and its step.
    - `"small matrix"`: any other weight of two or more dimensions, alone in its group at the base rate: too few
      eigenvalues for an estimate. LoRA adapters of rank below 32 are here, and convolutions.
    - `"embeddings"`: the weights of `nn.Embedding` and the head, at `embedding_factor`.
    - `"norms"` and `"biases"`: the weights of one dimension, at the base rate.

    Tied weights are in one group once; frozen parameters are in none. `name` is the parameter's name, or the kind.

    Args:
        model: before it is wrapped or sharded.
        weight_decay: of the parameters that `Trainer` decays; groups of the others have zero.
        embedding_factor: the factor of embeddings and head.

    Raises:
        `ValueError`: no trainable parameter is of the kind `"matrix"`.
    """
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    embeddings = _embeddings(model)
    groups = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "embeddings" if parameter in embeddings else _kind(name, parameter)
        alone = kind in ("matrix", "small matrix")
        group = groups.setdefault(
            name if alone else (kind, name in decayed),
            {
                "params": [],
                "name": name if alone else kind,
                "kind": kind,
                "weight_decay": weight_decay if name in decayed else 0.0,
                "factor": float(embedding_factor) if kind == "embeddings" else 1.0,
            },
        )
        group["params"].append(parameter)
        if kind == "matrix":
            group |= {"alpha": math.nan, "ramp_from": 1.0, "ramp_to": 1.0, "ramp_start": 0}
    if not any(group["kind"] == "matrix" for group in groups.values()):
        raise ValueError(
            f"model={type(model).__name__} has no trainable matrix with {SMALLEST_SIDE} rows and columns or more, "
            "embeddings and head apart: there is no spectrum to guide a learning rate"
        )
    return list(groups.values())


def _embeddings(model: nn.Module) -> set[nn.Parameter]:
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {module.weight for module in (*modules, head) if module is not None}


def _kind(name: str, parameter: nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "biases" if name.endswith("bias") else "norms"
    if parameter.ndim > 3 or min(parameter.shape[-2:]) < SMALLEST_SIDE:
        return "small matrix"
    return "matrix"
