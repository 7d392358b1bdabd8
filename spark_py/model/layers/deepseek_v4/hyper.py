# SPDX-License-Identifier: AGPL-3.0-only
"""V4HyperConnections: the residual streams of a token, and a sublayer between their mixing and its undoing.

A token has hc_mult FP32 streams of hidden_size elements. A sublayer reads a weighted sum of them, y; its output o goes
back as X'_j = post_j o + sum over i of comb_ij X_i. All weights depend on the streams; the maths is that of
`reference.hyper_connection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from ....ops import hyper_connection as ops
from ....ops.rms_norm_vanilla import rms_norm
from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ....runtime.sizes import count
from ...weight_map import DenseWeight
from .scratch import OwnedBuffers

__all__ = ["Sublayer", "V4HyperConnections", "V4HyperShape", "V4HyperWeights", "V4Norm"]

Sublayer: TypeAlias = Callable[[DevicePtr, DevicePtr], None]
"""Called with y and o, BF16 [rows, hidden_size] each: reads y, which it may overwrite, and writes all of o."""

_BF16, _F32 = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class V4HyperShape:
    """The sizes, by default those of DeepSeek-V4-Flash. `sinkhorn_iters` counts column steps."""

    hidden_size: int = 4096
    hc_mult: int = 4
    sinkhorn_iters: int = 20
    norm_eps: float = 1e-6
    hc_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden_size", "hc_mult", "sinkhorn_iters"):
            count(name, getattr(self, name))
        if self.hc_mult > ops.MAX_STREAMS:
            raise InvalidArgumentError("hc_mult", self.hc_mult, f"the kernels mix {ops.MAX_STREAMS} streams at most")
        for name in ("norm_eps", "hc_eps"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise InvalidArgumentError(name, getattr(self, name), "a finite number above 0 is needed")

    @property
    def stream_bytes(self) -> int:
        """Bytes of the streams of a token."""
        return self.hc_mult * self.hidden_size * _F32


@dataclass(frozen=True, slots=True)
class V4HyperWeights:
    """Addresses of FP32 tensors; S hc_mult, h hidden_size. Of a sublayer: fn [(2 + S) S, S h], scale [3],
    base [(2 + S) S]; of a head: fn [S, S h], scale [1], base [S]."""

    fn: DevicePtr
    scale: DevicePtr
    base: DevicePtr

    def check(self, name: str) -> None:
        """InvalidArgumentError where one is NULL."""
        for part in ("fn", "scale", "base"):
            if (ptr := getattr(self, part)).is_null:
                raise InvalidArgumentError(f"{name}_{part}", ptr, "a tensor on the device is needed")


@dataclass(frozen=True, slots=True)
class V4Norm:
    """A norm of rows with the plain weight BF16 [h], by `kernel`, which is `rms_norm_vanilla`'s."""

    weight: DenseWeight
    eps: float
    kernel: KernelHandle

    def run(self, gpu: GpuBackend, x: DevicePtr, y: DevicePtr, rows: int, size: int, stream: StreamLike) -> None:
        """y of x, BF16 [rows, size] both; they may be one buffer."""
        rms_norm(gpu, self.kernel, x, self.weight, y, rows, size, self.eps, stream)


class V4HyperConnections:
    """The connections of up to `max_rows` tokens, and the scratch for one sublayer at a time.

    One object serves all sublayers of a model that run one after the other. Streams are the caller's, FP32
    [rows, hc_mult, hidden_size]. A token's bits do not depend on how many there are. A KernelSetError names a kernel
    that the set lacks; nothing stays allocated after an error.
    """

    def __init__(self, shape: V4HyperShape, gpu: GpuBackend, max_rows: int = 1, name: str = "hc") -> None:
        self.gpu, self.shape = gpu, shape
        self._kernels = ops.HyperConnectionKernels.of(gpu)
        hc = shape.hc_mult
        sizes = {
            "sublayer_in": shape.hidden_size * _BF16,
            "sublayer_out": shape.hidden_size * _BF16,
            "post": hc * _F32,
            "comb": hc * hc * _F32,
            "shares": ops.shares_bytes(1, hc),
        }
        self._scratch = OwnedBuffers(gpu, name, max_rows, sizes)

    def expand(self, hidden: DevicePtr, streams: DevicePtr, rows: int, stream: StreamLike) -> None:
        """Every stream of a token becomes its row of hidden, BF16 [rows, h]."""
        rows, shape = self._scratch.check_rows(rows), self.shape
        ops.hc_expand(self.gpu, self._kernels, hidden, streams, rows, shape.hidden_size, shape.hc_mult, stream)

    def expand_sum(
        self, own: DevicePtr, common: DevicePtr, streams: DevicePtr, rows: int, apart: bool, stream: StreamLike
    ) -> bool:
        """Start the streams with bf16(own + common), own BF16 [rows, hc_mult, h] where `apart`, else [rows, h] for all
        streams, common BF16 [rows, h]. False, and nothing done, where the set or the size has no kernel for that."""
        rows, shape, kernels = self._scratch.check_rows(rows), self.shape, self._kernels
        h, hc = shape.hidden_size, shape.hc_mult
        if not ops.fits_fused(rows, h, kernels.expand_sum):
            return False
        ops.hc_expand_sum(self.gpu, kernels, own, common, streams, rows, h, hc, apart, stream)
        return True

    def widen(self, rows_of_streams: DevicePtr, streams: DevicePtr, rows: int, stream: StreamLike) -> None:
        """Streams that have a row each, BF16 [rows, hc_mult, h], as FP32."""
        rows, shape = self._scratch.check_rows(rows) * self.shape.hc_mult, self.shape
        ops.hc_expand(self.gpu, self._kernels, rows_of_streams, streams, rows, shape.hidden_size, 1, stream)

    def around(
        self,
        weights: V4HyperWeights,
        streams: DevicePtr,
        sublayer: Sublayer,
        rows: int,
        stream: StreamLike,
        norm: V4Norm | None = None,
    ) -> None:
        """The streams after `sublayer`, in place, which reads y normalised where there is a norm. It must not use this
        object's connections itself, and its launches belong on `stream`. Where it raises, the streams are as they
        were."""
        y, shape, buffers = self.enter(weights, streams, rows, stream, norm), self.shape, self._scratch
        o, post, comb = (buffers[name] for name in ("sublayer_out", "post", "comb"))
        sublayer(y, o)
        ops.hc_post(
            self.gpu, self._kernels, o, streams, post, comb, streams, rows, shape.hidden_size, shape.hc_mult, stream
        )

    def enter(
        self,
        weights: V4HyperWeights,
        streams: DevicePtr,
        rows: int,
        stream: StreamLike,
        norm: V4Norm | None = None,
    ) -> DevicePtr:
        """What `around` gives a sublayer to read, BF16 [rows, h]: scratch of this object, until it is used again."""
        rows, shape, buffers, kernels = self._scratch.check_rows(rows), self.shape, self._scratch, self._kernels
        y, post, comb, shares = (buffers[name] for name in ("sublayer_in", "post", "comb", "shares"))
        h, hc, iters, norm_eps, hc_eps = (
            shape.hidden_size, shape.hc_mult, shape.sinkhorn_iters, shape.norm_eps, shape.hc_eps
        )  # fmt: skip
        if norm is not None and ops.fits_fused(rows, h, kernels.mix, kernels.pre_norm):
            ops.hc_pre_norm(
                self.gpu, kernels, streams, weights.fn, weights.scale, weights.base, norm.weight, y, post, comb, rows,
                h, hc, iters, norm_eps, hc_eps, norm.eps, stream, shares=shares,
            )  # fmt: skip
            return y
        ops.hc_pre(
            self.gpu, kernels, streams, weights.fn, weights.scale, weights.base, y, post, comb, rows, h, hc, iters,
            norm_eps, hc_eps, stream, shares=shares,
        )  # fmt: skip
        if norm is not None:
            norm.run(self.gpu, y, y, rows, h, stream)
        return y

    def collapse(
        self, weights: V4HyperWeights, streams: DevicePtr, hidden: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        """hidden BF16 [rows, h]: the streams of each token as one row, by the weights of a head."""
        rows, shape = self._scratch.check_rows(rows), self.shape
        ops.hc_head(
            self.gpu, self._kernels, streams, weights.fn, weights.scale, weights.base, hidden, rows, shape.hidden_size,
            shape.hc_mult, shape.norm_eps, shape.hc_eps, stream, shares=self._scratch["shares"],
        )  # fmt: skip

    def collapse_normed(
        self,
        weights: V4HyperWeights,
        streams: DevicePtr,
        hidden: DevicePtr,
        norm: V4Norm,
        normed: DevicePtr,
        rows: int,
        stream: StreamLike,
    ) -> None:
        """`collapse`, and hidden behind a norm, BF16 [rows, h] too."""
        rows, shape, kernels = self._scratch.check_rows(rows), self.shape, self._kernels
        if not ops.fits_fused(rows, shape.hidden_size, kernels.mix, kernels.head_norm):
            self.collapse(weights, streams, hidden, rows, stream)
            norm.run(self.gpu, hidden, normed, rows, shape.hidden_size, stream)
            return
        ops.hc_head_norm(
            self.gpu, kernels, streams, weights.fn, weights.scale, weights.base, norm.weight, hidden, normed, rows,
            shape.hidden_size, shape.hc_mult, shape.norm_eps, shape.hc_eps, norm.eps, stream,
            shares=self._scratch["shares"],
        )  # fmt: skip

    def release(self) -> None:
        """Free the scratch; a second call does nothing."""
        self._scratch.release()

    def __enter__(self) -> V4HyperConnections:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
