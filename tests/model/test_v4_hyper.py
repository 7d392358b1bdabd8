# SPDX-License-Identifier: AGPL-3.0-only
"""V4HyperConnections around a sublayer whose output is given, against the official maths in FP64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4HyperConnections, V4HyperShape, V4HyperWeights
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, KernelSetError, ReleasedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import BF16, F32, Array, Output, assert_same_bits, download, f64, normal, relative_l2, upload
from tests.model.mtp_forms import hide
from tests.model.v4_hyper_support import HYPER, Site, head_of, post_of, pre_of

H, S, ROWS = HYPER.hidden_size, HYPER.hc_mult, 3


def draw_streams(rng: np.random.Generator, rows: int = ROWS) -> Array:
    """Streams that differ, one of them much larger."""
    streams: Array = (rng.standard_normal((rows, S, H)) * np.array([1.0, 0.5, 8.0, 2.0])[:, None]).astype(F32)
    return streams


def run_around(gpu: GpuBackend, site: Site, streams: Array, outputs: Array) -> tuple[Array, Array]:
    """(y that the sublayer saw, the streams after it gave `outputs`)."""
    rows, stream, seen = len(streams), gpu.default_stream(), []
    state, o = Output(gpu, streams.shape, F32, streams), upload(gpu, outputs)

    def sublayer(y: DevicePtr, out: DevicePtr) -> None:
        seen.append(download(gpu, y, (rows, H), BF16))
        # It may overwrite its input.
        gpu.memset_async(y, 0xFF, rows * H * 2, stream)
        gpu.copy_d2d_async(o, out, rows * H * 2, stream)

    with V4HyperConnections(HYPER, gpu, rows) as connections:
        connections.around(site.to_device(gpu), state.ptr, sublayer, rows, stream)
        (y,) = seen
        return y, state.read()


# y is rounded to BF16 once, 2^-9 of an element at most; streams stay FP32, with about a hundred roundings of 2^-24.
NEAR_Y, NEAR_STREAMS = 2.0**-8, 1e-5


def test_a_sublayer_reads_and_writes_the_streams_as_the_model_has_it(gpu: GpuBackend, rng: np.random.Generator) -> None:
    site, streams, outputs = Site.draw(rng), draw_streams(rng), normal(rng, ROWS, H)
    y, after = run_around(gpu, site, streams, outputs)
    for row in range(ROWS):
        exact, post, comb = pre_of(streams[row], site)
        assert relative_l2(y[row], exact) < NEAR_Y
        assert relative_l2(after[row], post_of(outputs[row], streams[row], post, comb)) < NEAR_STREAMS


def test_misreadings_are_far_off(gpu: GpuBackend, rng: np.random.Generator) -> None:
    site, streams, outputs = Site.draw(rng), draw_streams(rng), normal(rng, ROWS, H)
    _, after = run_around(gpu, site, streams, outputs)
    x, o = streams[0], outputs[0]
    _, post, comb = pre_of(x, site)
    _, half, _ = pre_of(x, site, factor=1.0)
    _, _, elementwise = pre_of(x, site, softmax=False)
    _, _, longer = pre_of(x, site, replace(HYPER, sinkhorn_iters=HYPER.sinkhorn_iters + 1))
    wrong = {
        "comb transposed": post_of(o, x, post, comb.T),
        "post without its factor": post_of(o, x, half, comb),
        "comb from sigmoids": post_of(o, x, post, elementwise),
        "one step more": post_of(o, x, post, longer),
        "streams left as they were": post[:, None] * f64(o) + f64(x),
    }
    for name, other in wrong.items():
        assert relative_l2(after[0], other) > 3 * NEAR_STREAMS, name


def test_expand_and_collapse(gpu: GpuBackend, rng: np.random.Generator) -> None:
    head, hidden, streams = Site.draw(rng, head=True), normal(rng, ROWS, H), draw_streams(rng)
    expanded, row, stream = Output(gpu, (ROWS, S, H), F32), Output(gpu, (ROWS, H)), gpu.default_stream()
    with V4HyperConnections(HYPER, gpu, ROWS) as connections:
        connections.expand(upload(gpu, hidden), expanded.ptr, ROWS, stream)
        connections.collapse(head.to_device(gpu), upload(gpu, streams), row.ptr, ROWS, stream)
        assert_same_bits(expanded.read(), np.repeat(hidden.astype(F32)[:, None], S, axis=1))
        for got, x in zip(row.read(), streams, strict=True):
            assert relative_l2(got, head_of(x, head)) < NEAR_Y


def test_rows_have_the_same_bits_alone_and_with_a_smaller_set(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, streams, outputs = Site.draw(rng), draw_streams(rng), normal(rng, ROWS, H)
    together = run_around(gpu, site, streams, outputs)
    alone = run_around(gpu, site, streams[1:2], outputs[1:2])
    hide(monkeypatch, gpu, "spark_hyper_connection")
    plain = run_around(gpu, site, streams, outputs)
    for part in range(2):
        assert_same_bits(together[part][1:2], alone[part])
        assert_same_bits(together[part], plain[part])


def test_where_the_sublayer_raises_the_streams_are_as_they_were(gpu: GpuBackend, rng: np.random.Generator) -> None:
    streams = draw_streams(rng)
    state = Output(gpu, streams.shape, F32, streams)

    def sublayer(y: DevicePtr, out: DevicePtr) -> None:
        raise InvalidArgumentError("sublayer", 1, "raises")

    with V4HyperConnections(HYPER, gpu, ROWS) as connections, pytest.raises(InvalidArgumentError, match="sublayer"):
        connections.around(Site.draw(rng).to_device(gpu), state.ptr, sublayer, ROWS, gpu.default_stream())
    assert_same_bits(state.read(), streams)


def test_more_rows_than_there_is_room_for_and_use_after_release_raise(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, streams = upload(gpu, normal(rng, 2, H)), upload(gpu, draw_streams(rng, 2))
    before = gpu.live_bytes()
    connections = V4HyperConnections(HYPER, gpu)
    with pytest.raises(CapacityError, match="rows is 2"):
        connections.expand(hidden, streams, 2, gpu.default_stream())
    connections.release()
    with pytest.raises(ReleasedError):
        connections.expand(hidden, streams, 1, gpu.default_stream())
    hide(monkeypatch, gpu, "hyper_connection")
    with pytest.raises(KernelSetError):
        V4HyperConnections(HYPER, gpu)
    assert gpu.live_bytes() == before


@pytest.mark.parametrize("wrong", [{"hc_mult": 5}, {"hidden_size": 0}, {"sinkhorn_iters": 0}, {"hc_eps": 0.0}])
def test_sizes_that_the_kernels_do_not_take_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        V4HyperShape(**wrong)


def test_a_tensor_that_is_null_is_named(gpu: GpuBackend) -> None:
    here = DevicePtr(256)
    V4HyperWeights(here, here, here).check("hc_attn")
    for name in ("fn", "scale", "base"):
        missing: Any = {name: DevicePtr.NULL}
        with pytest.raises(InvalidArgumentError, match=f"hc_attn_{name}"):
            replace(V4HyperWeights(here, here, here), **missing).check("hc_attn")
