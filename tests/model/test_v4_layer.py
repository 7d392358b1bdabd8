# SPDX-License-Identifier: AGPL-3.0-only
"""V4Layer, fed token by token, against the model's layer in FP64: two norms, two connections, attention, a feed-forward
part of one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Attention, V4HyperConnections, V4Layer, V4LayerWeights
from spark_py.model.weight_map import DenseWeight
from spark_py.ops.gemv import dense_gemv
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend, StreamLike
from spark_py.testing import BF16, F32, Array, Output, assert_same_bits, f64, normal, relative_l2, upload
from tests.kernels import v4_oracle
from tests.model.v4_hyper_support import HYPER, Site, post_of, pre_of
from tests.model.v4_support import BLOCK, SHAPE, Pages, attention_of, draw_weights, make_cache, to_device

H, S, WINDOW = HYPER.hidden_size, HYPER.hc_mult, SHAPE.window
LENGTHS = [2 * WINDOW, WINDOW + 1, 1]
"""The longest first: sequences end in rows other than the first of those that are decoded together."""


@dataclass(frozen=True)
class Host:
    """A layer on the host; `ffn` [h, h]."""

    attention: dict[str, Array]
    hc_attn: Site
    attn_norm: Array
    hc_ffn: Site
    ffn_norm: Array
    ffn: Array

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Host:
        def norm() -> Array:
            weight: Array = (1 + 0.5 * rng.standard_normal(H)).astype(BF16)
            return weight

        matrix = normal(rng, H, H, scale=H**-0.5)
        return cls(draw_weights(rng), Site.draw(rng), norm(), Site.draw(rng), norm(), matrix)

    def to_device(self, gpu: GpuBackend) -> V4LayerWeights:
        norms = [DenseWeight(upload(gpu, w), w.shape) for w in (self.attn_norm, self.ffn_norm)]
        return V4LayerWeights(self.hc_attn.to_device(gpu), norms[0], self.hc_ffn.to_device(gpu), norms[1])


@contextmanager
def layer_of(gpu: GpuBackend, host: Host, rows: int, blocks: int) -> Iterator[V4Layer]:
    matrix, gemv = upload(gpu, host.ffn), gpu.kernel("gemv", "dense_gemv_bf16")

    def ffn(x: DevicePtr, y: DevicePtr, count: int, stream: StreamLike) -> None:
        for row in range(count):
            dense_gemv(gpu, gemv, x.offset(row * H * 2), matrix, y.offset(row * H * 2), H, H, stream)

    with (
        make_cache(gpu, blocks) as cache,
        V4Attention(to_device(gpu, host.attention), SHAPE, cache, gpu, rows) as attention,
        V4HyperConnections(HYPER, gpu, rows) as connections,
    ):
        yield V4Layer(host.to_device(gpu), attention, ffn, connections)


def last_streams(
    gpu: GpuBackend, rng: np.random.Generator, host: Host, inputs: list[Array], *, together: bool
) -> list[Array]:
    """Each sequence's last streams [S, h]: sequences that have a token are decoded together, or each alone."""
    pages = Pages.scatter(rng, [len(tokens) for tokens in inputs])
    last: list[Array] = [np.empty(0)] * len(inputs)
    with layer_of(gpu, host, len(inputs), pages.blocks) as layer:
        for token in range(max(map(len, inputs))):
            active = [s for s, tokens in enumerate(inputs) if token < len(tokens)]
            for group in [active] if together else [[s] for s in active]:
                state = Output(gpu, (len(group), S, H), F32, np.stack([inputs[s][token] for s in group]))
                layer.decode(state.ptr, pages.meta(gpu, group, token, 0), gpu.default_stream())
                got = state.read()
                for row, s in enumerate(group):
                    last[s] = got[row]
    return last


def model(tokens: Array, host: Host) -> Array:
    """The last of the streams [L, S, h] after the layer, FP64."""
    eps = SHAPE.norm_eps
    mixed = [pre_of(x, host.hc_attn) for x in tokens]
    rows = v4_oracle.rms(np.stack([y for y, _, _ in mixed]), eps, f64(host.attn_norm))
    middle = post_of(attention_of(rows, host.attention), tokens[-1], *mixed[-1][1:])
    y, post, comb = pre_of(middle, host.hc_ffn)
    return post_of(f64(host.ffn) @ v4_oracle.rms(y, eps, f64(host.ffn_norm)), middle, post, comb)


def draw(rng: np.random.Generator) -> tuple[Host, list[Array]]:
    return Host.draw(rng), [rng.standard_normal((length, S, H)).astype(F32) for length in LENGTHS]


# Rows between the parts are rounded to BF16, about a dozen times 2^-9 of an element at most, streams are not.
NEAR = 2.0**-6


def test_decode_gives_the_models_layer(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host, inputs = draw(rng)
    got = last_streams(gpu, rng, host, inputs, together=True)
    for tokens, streams in zip(inputs, got, strict=True):
        assert relative_l2(streams, model(tokens, host)) < NEAR, f"length {len(tokens)}"


def test_misreadings_are_far_off(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host, inputs = draw(rng)
    tokens = inputs[1]
    got = last_streams(gpu, rng, host, [tokens], together=True)[0]
    ones = np.ones(H, BF16)
    wrong = {
        "no weight of attn_norm": replace(host, attn_norm=ones),
        "no weight of ffn_norm": replace(host, ffn_norm=ones),
        "norms exchanged": replace(host, attn_norm=host.ffn_norm, ffn_norm=host.attn_norm),
        "connections exchanged": replace(host, hc_attn=host.hc_ffn, hc_ffn=host.hc_attn),
        "no feed-forward part": replace(host, ffn=np.zeros_like(host.ffn)),
        "no attention": replace(host, attention=host.attention | {"wo_b": np.zeros_like(host.attention["wo_b"])}),
    }
    near = relative_l2(got, model(tokens, host))
    for name, other in wrong.items():
        assert relative_l2(got, model(tokens, other)) > 4 * near, name


def test_rows_have_the_same_bits_alone_and_together(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host, inputs = draw(rng)
    together = last_streams(gpu, rng, host, inputs, together=True)
    for a, b in zip(together, last_streams(gpu, rng, host, inputs, together=False), strict=True):
        assert_same_bits(a, b)


def test_rows_alone_are_those_of_decode(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A sequence's rows written in one call, without attention: the bytes that token by token gives; streams stay."""
    host, tokens = Host.draw(rng), rng.standard_normal((7, S, H)).astype(F32)
    pages, stream = Pages.scatter(rng, [len(tokens)]), gpu.default_stream()
    steps = [pages.meta(gpu, [0], token, 3) for token in range(len(tokens))]
    found = []
    for together in (False, True):
        with layer_of(gpu, host, len(tokens), pages.blocks) as layer:
            state = Output(gpu, tokens.shape, F32, tokens)
            if together:
                slots = [pages.tables[0, t // BLOCK].astype(np.int64) * BLOCK + t % BLOCK for t in range(len(tokens))]
                positions = upload(gpu, np.arange(3, 3 + len(tokens), dtype=np.uint32))
                meta = replace(steps[0], positions=positions, slot=upload(gpu, np.array(slots)), num_seqs=len(tokens))
                layer.write_rows(state.ptr, meta, stream)
                assert_same_bits(state.read(), tokens)
            else:
                for token, meta in enumerate(steps):
                    layer.decode(state.ptr.offset(token * S * H * 4), meta, stream)
                assert (state.read() != tokens).any()
            cache = layer.attention.kv_cache
            found.append([cache.read_block(0, block)[0].tobytes() for block in range(pages.blocks)])
    assert found[0] == found[1]
    assert len(set(found[0])) > 2, "blocks that were written, and one that was not"


def test_parts_that_do_not_fit_are_named(gpu: GpuBackend, rng: np.random.Generator) -> None:
    with layer_of(gpu, Host.draw(rng), 1, 1) as layer:
        weights, attention = layer.weights, layer.attention
        with (
            V4HyperConnections(replace(HYPER, hidden_size=2 * H), gpu) as connections,
            pytest.raises(InvalidArgumentError, match="hidden_size of the connections"),
        ):
            V4Layer(weights, attention, layer.ffn, connections)
        for name in ("attn_norm", "ffn_norm"):
            short: Any = DenseWeight(getattr(weights, name).weight, (H - 1,))
            with pytest.raises(InvalidArgumentError, match=rf"mtp\.{name}"):
                V4Layer(replace(weights, **{name: short}), attention, layer.ffn, layer.connections, "mtp")
        nothing = replace(weights.hc_ffn, base=DevicePtr.NULL)
        with pytest.raises(InvalidArgumentError, match=r"mtp\.hc_ffn_base"):
            V4Layer(replace(weights, hc_ffn=nothing), attention, layer.ffn, layer.connections, "mtp")
