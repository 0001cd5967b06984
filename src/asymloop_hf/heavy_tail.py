"""How heavy the tail of a weight matrix' spectrum is: the Hill estimate of its power-law exponent."""

import torch

FLAT = 1e-5  # a tail whose eigenvalues agree to five digits is flat


def heavy_tail_alpha(weight: torch.Tensor) -> torch.Tensor:
    """
    The power-law exponent of the upper half of a matrix' spectrum. With the eigenvalues of `W^T W` in ascending order,
    `lambda_1 .. lambda_N`, `N = min(rows, columns)` and `i = N // 2`, it is

        alpha = 1 + (N - i) / sum_{k > i} (ln lambda_k - ln lambda_i)

    the maximum-likelihood exponent of the density `lambda^-alpha` of the eigenvalues above the median (Hill, 1975,
    "A simple general approach to inference about the tail of a distribution"). Trained layers have a heavier tail, a
    smaller alpha, than those that have learnt little (Martin and Mahoney, 2021, "Implicit self-regularization in deep
    neural networks"). Its scale does not matter. The standard error is `(alpha - 1) / sqrt(N - i)`.

    Computed in float64 whatever the dtype of `weight`, which costs twice the time of float32: squaring the singular
    values leaves float32 no digits of those below 1e-4 of the largest, and gradients have many.

    Args:
        weight: `(rows, columns)`, or `(batch, rows, columns)` for matrices of equal shape, such as fused experts.

    Returns:
        Float64, `()` or `(batch,)`. `nan` where there is no tail to fit: the median eigenvalue is zero up to rounding
        (a zero or a constant matrix, a rank of half of `N` or less), the eigenvalues above it are all equal (to five
        digits: an orthogonal matrix), or `N` is 1.

    Raises:
        `ValueError`: `weight` has another number of dimensions, no entries, is not of a floating-point dtype, or has
            an entry that is not finite.
    """
    if weight.ndim not in (2, 3) or weight.numel() == 0:
        raise ValueError(f"weight of shape {tuple(weight.shape)}: it must be a matrix, or a batch of them, not empty")
    if not weight.is_floating_point():
        raise ValueError(f"weight of dtype {weight.dtype}: it must be of a floating-point dtype")
    if not weight.isfinite().all():
        raise ValueError("weight has entries that are not finite")
    return tail_exponent(spectrum(weight))


def spectrum(weight: torch.Tensor) -> torch.Tensor:
    """
    The `N = min(rows, columns)` largest eigenvalues of `W^T W`, ascending, from the smaller of the two Gram matrices.

    Args:
        weight: `(..., rows, columns)`.

    Returns:
        Float64, `(..., N)`. Those that are zero up to rounding (`max(rows, columns)` times the machine epsilon of the
        largest) are zero.
    """
    wide = weight.detach().to(torch.float64)
    if wide.shape[-2] > wide.shape[-1]:
        wide = wide.mT
    eigenvalues = torch.linalg.eigvalsh(wide @ wide.mT)
    rounding = eigenvalues[..., -1:] * wide.shape[-1] * torch.finfo(torch.float64).eps
    return eigenvalues.where(eigenvalues > rounding, 0.0)


def tail_exponent(eigenvalues: torch.Tensor) -> torch.Tensor:
    """
    The Hill estimate of `heavy_tail_alpha` from ascending eigenvalues `(..., N)`; `nan` where there is no tail to fit.
    """
    count = eigenvalues.shape[-1]
    start = count // 2
    if start == 0:
        return eigenvalues.new_full(eigenvalues.shape[:-1], torch.nan)
    median = eigenvalues[..., start - 1]
    excess = (eigenvalues[..., start:].log() - median.log().unsqueeze(-1)).mean(-1)
    return (1 + 1 / excess).where((median > 0) & (excess > FLAT), torch.nan)
