# SPDX-License-Identifier: AGPL-3.0-only
"""The same draft in torch, on the same weights, tables and KV rows: what a reader would write without this package.

One row, BF16, for the heads whose body `HeadBody` describes. Nothing here imports torch before a peer is asked for.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.layers.mtp_head.body import QkNorm, SharedExpert
from spark_py.model.layers.mtp_head.types import NormConvention
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.errors import InvalidArgumentError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr

from .rigs import SETS, Rig
from .timing import ProposeTimes, Times, measure, measure_queued, quietest

__all__ = ["WAYS", "TorchPeer", "deadline", "require_torch"]

WAYS = ("eager", "CUDA graph", "compiled (max-autotune), CUDA graph")
_WARM_UP = 3


def require_torch() -> Any:
    """The module, or UnsupportedError with the line that installs it."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError("--against torch: torch is not installed; run: pip install torch") from None
    return torch


@contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """TimeoutError in what runs longer than so many seconds; 0: no limit. In the main thread alone."""
    if not limit_s:
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"not done within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    # Again each second: a compiler that tries many kernels takes an error for one of theirs and goes on.
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class TorchPeer:
    """The head of a rig in torch. `token`, `hidden` and `position` are its inputs, in fixed memory; `step` gives the id
    and the logits. Weights are the rig's own memory; the KV rows are a copy of those of its first sequence."""

    def __init__(self, rig: Rig) -> None:
        self.torch = require_torch()
        weights, c, head = rig.weights, rig.config, rig.head
        if weights is None or not isinstance(head, MtpHead):
            raise InvalidArgumentError("--against", "torch", f"a head of {c.model_type} has no peer there")
        self.rig, self.config, self.body = rig, c, head.body
        self.device = "cuda" if rig.gpu.name == "cuda" else "cpu"
        self.scale = float(c.head_dim) ** -0.5
        torch, w = self.torch, weights
        self.table, self.lm_head = self._of(rig.embed_tokens), self._of(rig.lm_head)
        names = (
            "pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "post_attn_layernorm", "norm", "q_norm",
            "k_norm", "fc", "q_proj", "k_proj", "v_proj", "o_proj", "moe_gate", "shared_expert_gate",
        )  # fmt: skip
        self.w = {name: self._of(getattr(w, name)) for name in names if getattr(w, name) is not None}
        self.ffn = self._triple(w.dense_ffn or w.shared_expert)
        self.stacks: tuple[Any, ...] = ()
        if w.experts:
            first: Any = w.experts[0]
            parts = (first.gate_proj, first.up_proj, first.down_proj)
            # Experts of a kind lie behind each other.
            self.stacks = tuple(self._view(part.weight, (len(w.experts), *part.shape)) for part in parts)
        bias = w.correction_bias
        self.bias = None if bias is None else self._view(bias.weight, bias.shape, "float32")
        self.k, self.v = (self._rows(side) for side in (0, 1))
        rows = torch.arange(self.config.rotary_dim() // 2, device=self.device, dtype=torch.float32)
        self.inv_freq = c.rope_theta ** (-2.0 * rows / self.config.rotary_dim())
        self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.hidden = torch.zeros(1, c.hidden_size, dtype=torch.bfloat16, device=self.device)
        self.position = torch.full((1,), rig.context + 1, dtype=torch.float32, device=self.device)
        self.hiddens = [self._view(ptr, (1, c.hidden_size)) for ptr in rig.hiddens]
        self._turn = 0

    def _view(self, ptr: DevicePtr, shape: tuple[int, ...], dtype: str = "int16") -> Any:
        """The rig's memory as a tensor: BF16, or FP32."""
        array = self.rig.gpu.view(ptr, shape, dtype)
        tensor = self.torch.as_tensor(array, device=self.device)
        return tensor if dtype == "float32" else tensor.view(self.torch.bfloat16)

    def _of(self, weight: DenseWeight) -> Any:
        return self._view(weight.weight, weight.shape)

    def _triple(self, weights: Any) -> tuple[Any, ...]:
        return () if weights is None else tuple(map(self._of, (weights.gate_proj, weights.up_proj, weights.down_proj)))

    def _rows(self, side: int) -> Any:
        """K or V of the first sequence, BF16 [kv heads, context + 1, head_dim]; the last row is the draft's."""
        c, kv, state = self.config, self.rig.head.kv_cache, self.rig.states[0]
        pool = (kv.k_pool_ptr(0), kv.v_pool_ptr(0))[side]
        blocks = self._view(pool, (kv.num_blocks(), kv.block_size(), c.num_key_value_heads, c.head_dim))
        rows = blocks[self.torch.tensor(state.block_table, device=self.device)].flatten(0, 1)
        made = self.torch.zeros(c.num_key_value_heads, self.rig.context + 1, c.head_dim, dtype=rows.dtype)
        made = made.to(self.device)
        made[:, :-1] = rows[: self.rig.context].transpose(0, 1)
        return made

    # ------------------------------------------------------------ the draft

    def _norm(self, x: Any, name: str) -> Any:
        wide, w = x.float(), self.w[name].float()
        scaled = wide * self.torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (scaled * (1.0 + w if self.body.norm is NormConvention.ONE_PLUS_W else w)).to(x.dtype)

    def _rotate(self, x: Any) -> Any:
        """RoPE of [heads, head_dim]: pairs of the first rotary_dim elements, half and half."""
        torch, half = self.torch, self.inv_freq.shape[0]
        angle = self.position * self.inv_freq
        cos, sin = torch.cos(angle), torch.sin(angle)
        a, b = x[:, :half].float(), x[:, half : 2 * half].float()
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
        return torch.cat((turned, x[:, 2 * half :]), -1)

    def _heads(self, x: Any, heads: int, norm: str) -> Any:
        if self.body.qk_norm is QkNorm.WHOLE:
            x = self._norm(x, norm)
        x = x.view(heads, self.config.head_dim)
        return self._norm(x, norm) if self.body.qk_norm is QkNorm.PER_HEAD else x

    def _attend(self, x: Any) -> Any:
        torch, c, linear = self.torch, self.config, self.torch.nn.functional.linear
        nq, nkv, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q, gate = linear(x, self.w["q_proj"]), None
        if self.body.gated:
            q, gate = q.view(nq, 2 * hd).chunk(2, -1)
        q = self._rotate(self._heads(q.reshape(1, nq * hd), nq, "q_norm"))
        k = self._rotate(self._heads(linear(x, self.w["k_proj"]), nkv, "k_norm"))
        self.k[:, -1], self.v[:, -1] = k, linear(x, self.w["v_proj"]).view(nkv, hd)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, None], self.k[None], self.v[None], scale=self.scale, enable_gqa=True
        ).view(nq, hd)
        if gate is not None:
            out = out * torch.sigmoid(gate.float()).to(out.dtype)
        return linear(out.reshape(1, nq * hd), self.w["o_proj"])

    def _swiglu(self, x: Any, gate: Any, up: Any, down: Any) -> Any:
        functional = self.torch.nn.functional
        inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(inner, down)

    def _experts(self, x: Any) -> Any:
        torch, c = self.torch, self.config
        logits = torch.nn.functional.linear(x, self.w["moe_gate"]).float()[0]
        if c.scoring_func == "sigmoid":
            scores = torch.sigmoid(logits)
            chosen = torch.topk(scores if self.bias is None else scores + self.bias, c.num_experts_per_tok).indices
        else:
            scores = torch.softmax(logits, -1)
            chosen = torch.topk(scores, c.num_experts_per_tok).indices
        share = scores[chosen]
        if c.norm_topk_prob:
            share = share / share.sum()
        gate, up, down = (stack[chosen] for stack in self.stacks)
        inner = torch.nn.functional.silu(gate @ x[0]) * (up @ x[0])
        each = (down @ inner[:, :, None])[:, :, 0]
        return (each.float() * (share * c.routed_scaling_factor)[:, None]).sum(0, keepdim=True)

    def _feed_forward(self, x: Any) -> Any:
        if not self.stacks:
            return self._swiglu(x, *self.ffn)
        out = self._experts(x)
        if self.ffn:
            shared = self._swiglu(x, *self.ffn).float()
            if self.body.shared_expert is SharedExpert.GATED:
                gate = self.torch.nn.functional.linear(x, self.w["shared_expert_gate"])
                shared = shared * self.torch.sigmoid(gate.float())
            out = out + shared
        return out.to(x.dtype)

    def step(self) -> tuple[Any, Any]:
        """A draft from the inputs: its id [1] and logits BF16 [1, V]."""
        linear, w = self.torch.nn.functional.linear, self.w
        embed = self._norm(self.table[self.token], "pre_fc_norm_embedding")
        hidden = self._norm(self.hidden, "pre_fc_norm_hidden")
        pair = (hidden, embed) if self.body.hidden_first else (embed, hidden)
        x = linear(self.torch.cat(pair, -1), w["fc"])
        x = x + self._attend(self._norm(x, "input_layernorm"))
        x = x + self._feed_forward(self._norm(x, "post_attn_layernorm"))
        logits = linear(self._norm(x, "norm"), self.lm_head)
        return logits.argmax(-1), logits

    # ------------------------------------------------------------ running it

    def ready(self, way: str, limit_s: float = 0.0) -> Callable[[], tuple[Any, Any]]:
        """`step` run as one of WAYS: a call that leaves id and logits where it says. UnsupportedError for a graph
        without a GPU, and where torch cannot compile or capture, or not within `limit_s` seconds, if that is not 0."""
        torch, step = self.torch, self.step
        if way == WAYS[0]:
            return step
        if self.device != "cuda":
            raise UnsupportedError(f"torch, {way}: takes a GPU")
        begun = time.monotonic()
        try:
            if way == WAYS[2]:
                step = torch.compile(self.step, mode="max-autotune-no-cudagraphs", fullgraph=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with deadline(limit_s), torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = step()
        except Exception as error:  # torch's compilers raise many kinds
            why = (str(error).splitlines() or [type(error).__name__])[0]
            if limit_s and time.monotonic() - begun >= limit_s:  # whatever the compiler made of it
                why = f"not compiled within {limit_s:g} s"
            raise UnsupportedError(f"torch, {way}: {why}") from error

        def replay() -> tuple[Any, Any]:
            graph.replay()
            return found

        return replay

    def propose(self, run: Callable[[], tuple[Any, Any]], at: int | None = None) -> int:
        """A draft with input set `at`, or the next, read back to the host."""
        if at is None:
            at = self._turn = (self._turn + 1) % SETS
        self.token.fill_(self.rig.tokens[at])
        self.hidden.copy_(self.hiddens[at])
        return int(run()[0].item())

    def compare(self, run: Callable[[], tuple[Any, Any]]) -> tuple[int, float]:
        """(input sets of SETS with the same draft, the largest relative L2 distance of logits): the head beside torch,
        on the same inputs."""
        same, worst = 0, 0.0
        for at in range(SETS):
            with self.rig.launching_one_by_one():  # a graph writes no logits
                mine, ours = self.rig.propose(1, at)[0], self.rig.logits().astype(np.float64)
            same += self.propose(run, at) == mine
            theirs = run()[1].float().cpu().numpy().astype(np.float64).reshape(-1)[: ours.size]
            worst = max(worst, float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours)))
        return same, worst

    def measure(self, run: Callable[[], tuple[Any, Any]], repeats: int) -> ProposeTimes:
        """As `measure_path`, of a call that `ready` gave: of a graph its replay on the device too."""
        torch, gpu = self.torch, self.rig.gpu
        if self.device != "cuda":
            return ProposeTimes(measure(lambda: self.propose(run), repeats))
        stream = gpu.create_stream()
        outer = torch.cuda.ExternalStream(stream)

        def ready() -> None:
            self.rig.cold(stream)
            gpu.synchronize(stream)

        def round_of() -> Times:
            self.rig.cold.awake(stream)
            return measure(lambda: self.propose(run), repeats, ready)

        try:
            # On a stream that both sides know, so that the cache is emptied in order.
            with torch.cuda.stream(outer):
                wall = quietest(gpu, round_of)
                device = None if run == self.step else measure_queued(gpu, stream, run, repeats, self.rig.cold)
        finally:
            torch.cuda.synchronize()
            gpu.destroy_stream(stream)
        return ProposeTimes(wall, device)
