"""Keyed dropout: exact bits, right rate, no correlation, the same mask for every chunking and dtype."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models.dropout import Dropout, keep_mask, sample_keys

# Two-sided bound of a standard normal: some 200 statistics at 4.9 sigma are together an error level of 2e-4.
BOUND = 4.9
B, T, D = 16, 128, 256


def centred(seed=0, step=0, first=0, layer=3, site=1, probability=0.1) -> torch.Tensor:
    """Mask [B, T, D] in units of its standard deviation: independent entries would have mean 0 and variance 1."""
    dropped = round(probability * 65536)
    kept = 1 - dropped / 65536
    mask = keep_mask(sample_keys(seed, step, torch.arange(first, first + B)), layer, site, T, D, dropped)
    return (mask.double() - kept) / math.sqrt(kept * (1 - kept))


def sigmas(product: torch.Tensor) -> float:
    """The mean of independent products of mean 0 and variance 1, in units of its standard deviation."""
    return float(product.mean()) * math.sqrt(product.numel())


def numpy_mask(seed, step, samples, layer, site, T, D, dropped):
    """The same definition restated in unsigned numpy arithmetic with logical shifts."""
    golden, m1, m2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * m1
        x = (x ^ (x >> np.uint64(27))) * m2
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        assert mix(golden) == 0xE220A8397B1DCDAF  # splitmix64's published first output from state 0
        seeded = np.uint64(seed) * golden
        key = mix(mix(mix(np.array(seeded + golden)) + np.uint64(step) * golden) + samples.astype(np.uint64) * golden)
        place = mix(key + np.uint64(2 * layer + site + 1) * m1)
        row = mix(place[:, None] + np.arange(T, dtype=np.uint64) * golden)
        column = mix(np.arange(1, (D + 1) // 2 + 1, dtype=np.uint64) * golden).astype(np.uint32)
        word = row.astype(np.uint32)[..., None] ^ column
        for multiplier in (np.uint32(0x2C1B3C6D), ((row >> np.uint64(32)).astype(np.uint32) | np.uint32(1))[..., None]):
            word = (word * multiplier).view(np.int32)
            word = (word + (word >> 16)).view(np.uint32)
    lanes = np.stack([word & 0xFFFF, word >> 16], -1).reshape(*word.shape[:-1], -1).astype(np.uint16).view(np.int16)
    return lanes[..., :D] >= dropped - 32768


@pytest.mark.parametrize("D", [1, 7, 64])
def test_every_bit_equals_a_restatement_in_numpy(D):
    samples = np.array([0, 1, 5, 123_456_789_012])
    for seed, step, layer, site, dropped in [(0, 0, 0, 0, 6554), (7, 3, 12, 1, 32768), (2**40, 10**6, 97, 0, 65535)]:
        mask = keep_mask(sample_keys(seed, step, torch.from_numpy(samples)), layer, site, 9, D, dropped)
        assert np.array_equal(mask.numpy(), numpy_mask(seed, step, samples, layer, site, 9, D, dropped))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_rate_within_binomial_bounds(probability):
    z = centred(probability=probability)
    assert abs(sigmas(z)) < BOUND
    assert float(z.mean((1, 2)).abs().max()) * math.sqrt(T * D) < BOUND  # of each sample
    for counts in (z.sum(2) / math.sqrt(D), z.sum((0, 1)) / math.sqrt(B * T)):  # of each row and each column
        chi_square = float(counts.square().sum())  # mean n, variance 2 n (1 + small, for a skewed count)
        assert abs(chi_square - counts.numel()) < BOUND * math.sqrt(2 * counts.numel()) * 1.1


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_no_correlation_between_neighbours(probability):
    z = centred(probability=probability)
    for lag in (1, 2, 3, 4, 8, D // 2):
        assert abs(sigmas(z[:, :, lag:] * z[:, :, :-lag])) < BOUND, f"columns {lag} apart"
    assert abs(sigmas(z[:, :, 0::2] * z[:, :, 1::2])) < BOUND, "two halves of a word"
    for lag in (1, 2, 16):
        assert abs(sigmas(z[:, lag:] * z[:, :-lag])) < BOUND, f"tokens {lag} apart"
    for lag in (1, 2):
        assert abs(sigmas(z[lag:] * z[:-lag])) < BOUND, f"samples {lag} apart"
    square = z[:, 1:, 1:] * z[:, 1:, :-1] * z[:, :-1, 1:] * z[:, :-1, :-1]
    assert abs(sigmas(square)) < BOUND, "corners of a square"


@pytest.mark.parametrize(
    "changed",
    [
        dict(layer=4),
        dict(layer=2),
        dict(site=0),
        dict(step=1),
        dict(seed=1),
        dict(seed=2),
        dict(first=B),
        dict(first=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_correlation_between_layers_sites_steps_seeds_and_samples(changed, probability):
    z, other = centred(probability=probability), centred(probability=probability, **changed)
    if "first" in changed and changed["first"] == 1:
        assert torch.equal(z[1:], other[:-1])  # a sample has its mask wherever it stands in the batch
    else:
        assert abs(sigmas(z * other)) < BOUND
    if changed.get("layer") == 4:  # layer 3, site 1 and layer 4, site 0 are neighbours too
        assert abs(sigmas(z * centred(probability=probability, layer=4, site=0))) < BOUND


def test_bytes_of_neighbouring_bits_are_uniform():
    """Chi-square over all patterns of eight neighbours at probability one half, along columns and along tokens."""
    bits = centred(probability=0.5) > 0
    weights = 2 ** torch.arange(8)
    for order in (bits, bits.transpose(1, 2)):
        counts = torch.bincount((order.reshape(-1, 8) * weights).sum(1), minlength=256).double()
        expected = counts.sum() / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < BOUND * math.sqrt(2 * 255)


def test_spectrum_is_that_of_independent_noise():
    """Marchenko and Pastur: the covariance of N independent rows has its eigenvalues in (1 -+ sqrt(D / N))^2."""
    rows = centred(probability=0.5).reshape(-1, D)
    eigenvalues = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
    edge = math.sqrt(D / len(rows))
    assert (1 - edge) ** 2 * 0.95 < float(eigenvalues[0]) and float(eigenvalues[-1]) < (1 + edge) ** 2 * 1.05


def test_same_mask_for_every_chunking_length_and_dtype():
    dropout, keys = Dropout(0.3, layer=2, site=1), sample_keys(1, 2, torch.arange(6))
    x = torch.randn(6, 10, 12, dtype=torch.float64)
    whole = dropout(x, keys)
    parts = [dropout(x[i : i + 2], keys[i : i + 2]) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[:, :7], dropout(x[:, :7], keys))
    for dtype in (torch.float32, torch.bfloat16):
        low = dropout(x.to(dtype), keys)
        assert low.dtype == dtype and torch.equal(low == 0, whole == 0)


@pytest.mark.parametrize("probability", [0.1, 1 / 3, 0.75])
def test_kept_elements_are_scaled_so_that_the_mean_stays(probability):
    dropout = Dropout(probability, layer=1, site=0)
    x = torch.ones(B, T, D, dtype=torch.float64, requires_grad=True)
    y = dropout(x, sample_keys(0, 0, torch.arange(B)))
    kept = float(y.detach().max())
    assert kept == pytest.approx(1 / (1 - probability), rel=1e-4)
    assert set(y.detach().unique().tolist()) == {0.0, kept}
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the same mask and scale in the backward


def test_no_key_or_no_probability_passes_on():
    x = torch.randn(2, 3, 4)
    assert Dropout(0.5, layer=0, site=0)(x, None) is x
    assert Dropout(0.0, layer=0, site=0)(x, torch.zeros(2, dtype=torch.int64)) is x


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5])
def test_impossible_probability_is_refused(probability):
    with pytest.raises(ValueError, match=f"dropout={probability}"):
        Dropout(probability, layer=0, site=0)
