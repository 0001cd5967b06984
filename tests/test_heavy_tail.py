"""The Hill estimate against an independent implementation, known exponents and random matrices; degenerate input."""

import math

import numpy as np
import pytest
import torch

from asymloop_hf.heavy_tail import heavy_tail_alpha, spectrum


def hill(weight: np.ndarray) -> float:
    """The equation as it is written, term by term, from the singular values."""
    eigenvalues = sorted(np.linalg.svd(weight.astype(np.float64), compute_uv=False) ** 2)
    count = len(eigenvalues)
    i = count // 2
    threshold = math.log(eigenvalues[i - 1])  # lambda_i, counted from one
    total = 0.0
    for k in range(i, count + 1):
        total += math.log(eigenvalues[k - 1]) - threshold
    return 1 + (count - i) / total


def with_eigenvalues(eigenvalues: torch.Tensor, columns: int) -> torch.Tensor:
    """A random matrix of which `W W^T` has these eigenvalues."""
    left = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(eigenvalues), dtype=torch.float64))[0]
    return (left * eigenvalues.sqrt()) @ right.T


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (7, 12), (12, 7), (64, 64), (65, 40), (1, 2, 5), (4, 33, 20)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_equation(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    alpha = heavy_tail_alpha(weight)
    matrices = weight.reshape(-1, *shape[-2:]).to(torch.float64).numpy()
    expected = torch.tensor([hill(matrix) for matrix in matrices], dtype=torch.float64).reshape(shape[:-2])
    torch.testing.assert_close(alpha, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("exponent", [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0])
def test_a_pareto_spectrum_is_recovered(exponent):
    count = 1000
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    eigenvalues = (1 - quantiles) ** (-1 / (exponent - 1))  # the density is proportional to lambda^-exponent
    alpha = heavy_tail_alpha(with_eigenvalues(eigenvalues, 1200)).item()
    assert alpha == pytest.approx(exponent, rel=0.05)


@pytest.mark.parametrize("exponent", [1.5, 3.0, 6.0])
def test_a_pareto_sample_is_recovered(exponent):
    uniform = torch.rand(3, 800, dtype=torch.float64)
    alphas = heavy_tail_alpha(torch.diag_embed(uniform ** (-0.5 / (exponent - 1))))
    assert alphas.mean().item() == pytest.approx(exponent, rel=0.05)


@pytest.mark.parametrize("rows, columns", [(300, 600), (250, 1000), (200, 2000)])
def test_noise_has_the_light_tail_of_the_marchenko_pastur_law(rows, columns):
    ratio = rows / columns
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    grid = np.linspace(low, high, 200_001)[1:-1]
    density = np.sqrt((high - grid) * (grid - low)) / grid
    below = np.cumsum(density) / density.sum()
    tail = below >= 0.5
    median = grid[tail][0]
    excess = (np.log(grid[tail] / median) * density[tail]).sum() / density[tail].sum()
    alpha = heavy_tail_alpha(torch.randn(rows, columns)).item()
    assert alpha == pytest.approx(1 + 1 / excess, rel=0.05)
    assert alpha > 2.5


def test_scale_and_orientation_do_not_matter():
    weight = torch.randn(40, 70)
    alpha = heavy_tail_alpha(weight)
    for same in (weight.T, weight * 1e-18, weight * 1e18, weight.flip(0)):
        torch.testing.assert_close(heavy_tail_alpha(same), alpha, rtol=1e-5, atol=0)


def test_the_spectrum_of_a_low_rank_matrix_is_zero_where_it_is_only_rounding():
    weight = torch.randn(30, 12, dtype=torch.float64) @ torch.randn(12, 50, dtype=torch.float64)
    eigenvalues = spectrum(weight)
    assert (eigenvalues[:18] == 0).all() and (eigenvalues[18:] > 0).all()
    expected = torch.linalg.svdvals(weight).square().flip(0)
    torch.testing.assert_close(eigenvalues[18:], expected[18:], rtol=1e-9, atol=0)


DEGENERATE = {
    "zero": torch.zeros(8, 12),
    "constant": torch.full((8, 12), 0.3),
    "a rank of half": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) @ torch.eye(4, 12),
    "identity": torch.eye(16),
    "orthogonal": torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0],
    "a row": torch.randn(1, 12, generator=torch.Generator().manual_seed(0)),
    "one entry": torch.ones(1, 1),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_without_a_tail_there_is_no_estimate(name):
    weight = DEGENERATE[name]
    assert heavy_tail_alpha(weight).isnan()
    batch = heavy_tail_alpha(torch.stack([weight, torch.randn_like(weight)]))
    assert batch[0].isnan()
    assert batch[1].isnan() == (min(weight.shape) == 1)


def test_a_rank_above_half_has_an_estimate():
    weight = torch.randn(8, 5, dtype=torch.float64) @ torch.randn(5, 12, dtype=torch.float64)
    assert heavy_tail_alpha(weight).item() == pytest.approx(hill(weight.numpy()), rel=1e-9)


@pytest.mark.parametrize(
    "weight, problem",
    [
        (torch.ones(5), r"weight of shape \(5,\): it must be a matrix"),
        (torch.ones(2, 2, 2, 2), r"weight of shape \(2, 2, 2, 2\): it must be a matrix"),
        (torch.ones(0, 4), r"weight of shape \(0, 4\): it must be a matrix, or a batch of them, not empty"),
        (torch.ones(4, 4, dtype=torch.int64), "weight of dtype torch.int64: it must be of a floating-point dtype"),
        (torch.eye(4) * math.inf, "weight has entries that are not finite"),
        (torch.full((4, 4), math.nan), "weight has entries that are not finite"),
    ],
)
def test_bad_input(weight, problem):
    with pytest.raises(ValueError, match=problem):
        heavy_tail_alpha(weight)


def test_no_gradient_is_kept():
    weight = torch.randn(6, 6, requires_grad=True)
    assert not heavy_tail_alpha(weight).requires_grad
