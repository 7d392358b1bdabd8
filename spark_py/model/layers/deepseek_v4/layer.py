# SPDX-License-Identifier: AGPL-3.0-only
"""V4Layer: attention and a feed-forward part, each between its norm and its hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr, StreamLike
from ...layer import AttnMetadataDev
from ...weight_map import DenseWeight
from .attention import V4Attention
from .hyper import V4HyperConnections, V4HyperWeights, V4Norm

__all__ = ["FeedForward", "V4Layer", "V4LayerWeights"]

FeedForward: TypeAlias = Callable[[DevicePtr, DevicePtr, int, StreamLike], None]
"""Called with x, y, rows and stream: writes y BF16 [rows, h] from the normalised x BF16 [rows, h]."""


@dataclass(frozen=True, slots=True)
class V4LayerWeights:
    """What a layer has beside its attention and its feed-forward part; norms BF16 [h], used as they are."""

    hc_attn: V4HyperWeights
    attn_norm: DenseWeight
    hc_ffn: V4HyperWeights
    ffn_norm: DenseWeight

    def check(self, hidden_size: int, name: str) -> None:
        """InvalidArgumentError for the first tensor that is NULL or of another shape."""
        self.hc_attn.check(f"{name}.hc_attn")
        self.attn_norm.check_shape(f"{name}.attn_norm", hidden_size)
        self.hc_ffn.check(f"{name}.hc_ffn")
        self.ffn_norm.check_shape(f"{name}.ffn_norm", hidden_size)


class V4Layer:
    """One decoder layer over the streams of a token a sequence; it owns no memory.

    Attention, connections and feed-forward part stay the caller's, and layers that run one after the other may share
    connections. InvalidArgumentError for tensors, or for parts of another hidden size, that do not fit; a
    KernelSetError for a kernel that the set lacks.
    """

    def __init__(
        self,
        weights: V4LayerWeights,
        attention: V4Attention,
        ffn: FeedForward,
        connections: V4HyperConnections,
        name: str = "layer",
    ) -> None:
        self.weights, self.attention, self.ffn, self.connections = weights, attention, ffn, connections
        self.gpu, self.hidden_size = attention.gpu, attention.shape.hidden_size
        if connections.shape.hidden_size != self.hidden_size:
            limit = f"that of {name}'s attention is {self.hidden_size}"
            raise InvalidArgumentError("hidden_size of the connections", connections.shape.hidden_size, limit)
        weights.check(self.hidden_size, name)
        norm_k, eps = self.gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla"), attention.shape.norm_eps
        self._attn_norm, self._ffn_norm = (V4Norm(each, eps, norm_k) for each in (weights.attn_norm, weights.ffn_norm))

    def decode(self, streams: DevicePtr, meta: AttnMetadataDev, stream: StreamLike) -> None:
        """The streams FP32 [meta.num_seqs, hc_mult, h] of each sequence's new row after this layer, in place.

        Writes the row's latent to its slot. Where the feed-forward part raises, the streams are those after attention.
        """
        weights, rows = self.weights, meta.num_seqs

        def attend(x: DevicePtr, y: DevicePtr) -> None:
            self.attention.decode(x, meta, y, stream)

        def feed(x: DevicePtr, y: DevicePtr) -> None:
            self.ffn(x, y, rows, stream)

        self.connections.around(weights.hc_attn, streams, attend, rows, stream, self._attn_norm)
        self.connections.around(weights.hc_ffn, streams, feed, rows, stream, self._ffn_norm)

    def write_rows(self, streams: DevicePtr, meta: AttnMetadataDev, stream: StreamLike) -> None:
        """The latents that `decode` writes of these streams, with the same bits, and nothing else: the streams stay as
        they are. The rows may be of one sequence: of `meta`, positions, slots and num_seqs are read."""
        x = self.connections.enter(self.weights.hc_attn, streams, meta.num_seqs, stream, self._attn_norm)
        self.attention.write(x, meta, stream)
