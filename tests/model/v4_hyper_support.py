# SPDX-License-Identifier: AGPL-3.0-only
"""Random hyper-connections on a backend, and the official maths of them in FP64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spark_py.model.layers.deepseek_v4 import V4HyperShape, V4HyperWeights
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import F32, Array, f64, upload

HYPER = V4HyperShape(hidden_size=32, sinkhorn_iters=3)
"""Three column steps: more would hide in which order rows and columns come."""


@dataclass(frozen=True)
class Site:
    """fn, scale and base on the host."""

    fn: Array
    scale: Array
    base: Array

    @classmethod
    def draw(cls, rng: np.random.Generator, head: bool = False, shape: V4HyperShape = HYPER) -> Site:
        """Of a sublayer or of a head; mixes of about 1, so that no weight is near 0 or at its limit."""
        hc = shape.hc_mult
        rows, size = hc if head else (2 + hc) * hc, hc * shape.hidden_size
        scale = rng.uniform(0.7, 1.3, 1 if head else 3).astype(F32)
        fn = (rng.standard_normal((rows, size)) * size**-0.5).astype(F32)
        return cls(fn, scale, rng.standard_normal(rows).astype(F32))

    def to_device(self, gpu: GpuBackend) -> V4HyperWeights:
        return V4HyperWeights(upload(gpu, self.fn), upload(gpu, self.scale), upload(gpu, self.base))


def _sigmoid(x: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


def _mixes(streams: Array, site: Site, shape: V4HyperShape) -> Array:
    x = f64(streams).reshape(-1)
    result: Array = f64(site.fn) @ x / np.sqrt((x * x).mean() + shape.norm_eps)
    return result


def pre_of(
    streams: Array, site: Site, shape: V4HyperShape = HYPER, *, factor: float = 2.0, softmax: bool = True
) -> tuple[Array, Array, Array]:
    """(y [h], post [S], comb [S, S]) of one token's streams [S, h]; `factor` and `softmax` name misreadings."""
    hc, eps = shape.hc_mult, shape.hc_eps
    m, base, (a, b, c) = _mixes(streams, site, shape), f64(site.base), f64(site.scale)
    pre = _sigmoid(m[:hc] * a + base[:hc]) + eps
    post = factor * _sigmoid(m[hc : 2 * hc] * b + base[hc : 2 * hc])
    logits = (m[2 * hc :] * c + base[2 * hc :]).reshape(hc, hc)
    comb = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) if softmax else _sigmoid(logits)
    comb = comb + eps
    for step in range(2 * shape.sinkhorn_iters - 1):
        comb = comb / (comb.sum(axis=step % 2, keepdims=True) + eps)
    return pre @ f64(streams), post, comb


def post_of(o: Array, streams: Array, post: Array, comb: Array) -> Array:
    """The streams after a sublayer that gave o [h]."""
    result: Array = post[:, None] * f64(o) + comb.T @ f64(streams)
    return result


def head_of(streams: Array, site: Site, shape: V4HyperShape = HYPER) -> Array:
    """One row [h] of one token's streams."""
    weights = _sigmoid(_mixes(streams, site, shape) * f64(site.scale)[0] + f64(site.base)) + shape.hc_eps
    result: Array = weights @ f64(streams)
    return result
