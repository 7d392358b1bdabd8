# SPDX-License-Identifier: AGPL-3.0-only
"""A draft head of random weights with sequences of a given length: what proposes are measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.deepseek_v4 import V4Shapes
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState, MtpQuantization
from spark_py.model.layers.mtp_head.quantize import Quantizer
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight, MtpWeights
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype

from .random_weights import RandomWeights, head_weights, v4_weights
from .shapes import BenchShape
from .timing import ColdCache, Counted, ProposeTimes, Times, count_work, graph_of, measure, measure_queued, quietest

__all__ = ["PATHS", "SETS", "BenchPath", "Rig", "measure_path", "open_rig"]

SETS = 8
"""Inputs that take turns: token, hidden row and, of one sequence at a time, the sequence."""
PATHS = ("eager", "graph", "chain", "batched")
_BLOCK, _BATCH_TOKENS, _ROOM, _LARGE = 16, 64, 64, 1024


@dataclass(frozen=True, slots=True)
class BenchPath:
    """A way to draft: `drafts` a sequence of `n` sequences, launch by launch or as a graph."""

    name: str
    drafts: int
    n: int
    graph: bool

    @staticmethod
    def of(name: str, drafts: int, batch: int) -> BenchPath:
        """One of PATHS: eager and graph draft once, chain `drafts` times in one graph, batched once for `batch`."""
        return {
            "eager": BenchPath("eager", 1, 1, False),
            "graph": BenchPath("graph", 1, 1, True),
            "chain": BenchPath(f"chain graph, {drafts} drafts", drafts, 1, True),
            "batched": BenchPath(f"batched {batch}, graph", 1, batch, True),
        }[name]


class Rig:
    """A head, and `sequences` sequences of `context` KV rows of random numbers.

    A call drafts and takes a verdict that drops all rows, so that the context stays as long as it was; the next one has
    other inputs. `weights` is None where the head is DeepSeek-V4's, whose drafts read streams.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        head: MtpHead | DeepseekV4MtpHead,
        make: RandomWeights,
        config: ModelConfig,
        buffers: BufferArena,
        context: int,
        sequences: int,
        weights: MtpWeights | None,
        tables: tuple[DenseWeight, DenseWeight],
    ) -> None:
        self.gpu, self.head, self.config, self.context = gpu, head, config, context
        self.weights, self.embed_tokens, self.lm_head = weights, *tables
        self.stream = gpu.create_stream()
        self.ctx = ForwardContext(buffers, gpu, config, head.levers)
        h, rng = config.hidden_size, make.random
        self.hiddens = [make.tensor(h).weight for _ in range(SETS)]
        streams = (config.hc_mult, h)
        self.stacks = [None] * SETS if weights is not None else [make.f32(*streams) for _ in range(SETS)]
        self.tokens = [int(token) for token in rng.integers(0, config.vocab_size, SETS)]
        self._fill_cache(make)
        self.cold = ColdCache(gpu, make)
        self.states = [self._state() for _ in range(sequences)]
        self._turn = 0

    def _fill_cache(self, make: RandomWeights) -> None:
        kv = self.head.kv_cache
        nbytes = kv.num_blocks() * kv.block_stride_bytes_for_layer(0)
        for pool in dict.fromkeys((kv.k_pool_ptr(0), kv.v_pool_ptr(0))):
            make.fill(pool, nbytes, "units" if kv.config.dtype is KvCacheDtype.BF16 else "codes")

    def _state(self) -> MtpProposerState:
        state, kv = self.head.alloc_state(self.gpu), self.head.kv_cache
        kv.grow_table(state.block_table, -(-self.context // kv.block_size()), "bench")
        state.seq_len, state.last_pair_key = self.context, self.context - 1
        return state

    def propose(self, drafts: int, at: int | None = None) -> list[int]:
        """Drafts of one sequence: with input set `at` of the first sequence, or with the next of all."""
        turn = self._next() if at is None else at
        state = self.states[turn % len(self.states) if at is None else 0]
        token, hidden, stack = self.tokens[turn], self.hiddens[turn], self.stacks[turn]
        found = self.head.propose(
            token, hidden, self.context + 1, drafts, state, self.ctx, self.stream, target_hidden_stack=stack
        )
        self._undo(state)
        return found

    def propose_batch(self, n: int, drafts: int) -> list[list[int]]:
        """Drafts of n sequences at once, each with an input set of its own."""
        turns = [self._next() for _ in range(n)]
        states, positions = self.states[:n], [self.context + 1] * n
        tokens, rows = [self.tokens[turn] for turn in turns], [self.hiddens[turn] for turn in turns]
        found = self.head.propose_batch(tokens, rows, positions, drafts, states, self.ctx, self.stream)
        if found is None:
            raise InvalidArgumentError("--batch", n, f"this head drafts for {self.most_at_once()} at once")
        for state in states:
            self._undo(state)
        return found

    def most_at_once(self) -> int:
        """Sequences of one batched propose; 1 where the head has none."""
        return self.head.propose_batch_max(self.ctx.buffers, self.config)

    def action(self, path: BenchPath) -> Callable[[], object]:
        """A call of this path; of one that is no graph, within `launching_one_by_one`."""
        if path.n > 1:
            return lambda: self.propose_batch(path.n, path.drafts)
        return lambda: self.propose(path.drafts)

    @contextmanager
    def way(self, path: BenchPath) -> Iterator[None]:
        """The head as the path wants it."""
        with nullcontext() if path.graph else self.launching_one_by_one():
            yield

    @contextmanager
    def launching_one_by_one(self) -> Iterator[None]:
        """The head as if its levers allowed no graph: heads take a while to build, so one serves both ways."""
        head: Any = self.head
        inputs = head.propose_inputs
        head.propose_inputs = None if isinstance(head, MtpHead) else {}
        try:
            yield
        finally:
            head.propose_inputs = inputs

    def logits(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Those of the last draft of one sequence, FP32 [draft_vocab]."""
        raw = np.empty(self.head.draft_vocab, "<u2")
        self.gpu.copy_d2h_on_stream(self.ctx.buffers.logits(), raw.view(np.uint8), self.stream)
        return (raw.astype(np.uint32) << 16).view(np.float32)

    def _next(self) -> int:
        self._turn = (self._turn + 1) % SETS
        return self._turn

    def _undo(self, state: MtpProposerState) -> None:
        state.seq_len, state.last_num_drafted, state.last_pair_key = self.context, 0, self.context - 1

    def release(self) -> None:
        """Give back what is neither the head's nor the weights'."""
        for state in self.states:
            self.head.free_state(self.gpu, state)
        self.gpu.destroy_stream(self.stream)


@contextmanager
def open_rig(
    gpu: GpuBackend,
    shape: BenchShape,
    mode: str,
    context: int,
    sequences: int = SETS,
    seed: int = 0,
    keep_logits: bool = False,
) -> Iterator[Rig]:
    """A rig of a shape whose weights are stored as `mode` says; `keep_logits` is for `Rig.logits` after graphs.
    InvalidArgumentError for a mode that the shape has not."""
    shape.check_mode(mode)
    c, max_seq_len = shape.config, context + _ROOM
    levers = ModelLevers(drafter_prefill=False, mtp_max_seqs=sequences, keep_logits=keep_logits)
    with ExitStack() as stack:
        make = RandomWeights(gpu, seed, small=c.hidden_size < _LARGE)
        stack.callback(make.release)
        table, lm_head = make.tensor(c.vocab_size, c.hidden_size), make.tensor(c.vocab_size, c.hidden_size)
        head: MtpHead | DeepseekV4MtpHead
        weights: MtpWeights | None = None
        if shape.is_v4:
            module = v4_weights(make, V4Shapes.of(c), mode)
            head = DeepseekV4MtpHead(module, table, lm_head, c, gpu, 0, max_seq_len, levers)
        else:
            dense, _, packed = mode.partition("+")
            weights, quant = head_weights(make, c), MtpQuantization.parse(dense)
            drafting: Any = lm_head
            if MtpQuantization.NVFP4.value in (dense, packed):
                quantizer = Quantizer(gpu, MtpQuantization.NVFP4, gpu.default_stream())
                stack.callback(quantizer.release)
                drafting = quantizer.proj("lm_head", lm_head, c.vocab_size, c.hidden_size)
            head = MtpHead(weights, table, drafting, None, c, gpu, quant, 0, max_seq_len, 1 << 20, levers)
        stack.callback(head.release)
        buffers = stack.enter_context(BufferArena(c, _BATCH_TOKENS, max_seq_len, _BLOCK, sequences, gpu))
        rig = Rig(gpu, head, make, c, buffers, context, sequences, weights, (table, lm_head))
        stack.callback(rig.release)
        gpu.synchronize(gpu.default_stream())
        yield rig


def measure_path(rig: Rig, path: BenchPath, action: Callable[[], object], repeats: int) -> tuple[Counted, ProposeTimes]:
    """What a path launches, and how long it takes, with a cold L2 cache each time."""
    gpu, stream = rig.gpu, rig.stream

    def ready() -> None:
        rig.cold(stream)
        gpu.synchronize(stream)

    def round_of() -> Times:
        rig.cold.awake(stream)
        return measure(action, repeats, ready)

    with rig.way(path):
        counted = count_work(gpu, action)
        wall = quietest(gpu, round_of)
        graph = graph_of(gpu, action, stream) if path.graph else None
        device = None if graph is None else measure_queued(gpu, stream, graph, repeats, rig.cold)
    return counted, ProposeTimes(wall, device)
