# SPDX-License-Identifier: AGPL-3.0-only
"""transformers' layer of DeepSeek-V4 on the same card in the same run, in BF16 with random weights of its own."""

from __future__ import annotations

import statistics
import time
from typing import Any

from spark_py.model.layers.deepseek_v4 import V4Shapes

__all__ = ["v4_layer_rows"]


def v4_layer_rows(shapes: V4Shapes, rows: int, repeats: int, device: str = "cuda") -> list[dict[str, Any]]:
    """`DeepseekV4DecoderLayer` in BF16, with each form of its experts that the card has; empty without transformers."""
    try:
        import torch
        from transformers import DeepseekV4Config, DynamicCache
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modelling
    except ImportError:
        return []
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    config = DeepseekV4Config(
        hidden_size=a.hidden_size, num_attention_heads=a.num_heads, head_dim=a.head_dim, qk_rope_head_dim=a.rope_dim,
        q_lora_rank=a.q_lora_rank, o_groups=a.o_groups, o_lora_rank=a.o_lora_rank, sliding_window=a.window,
        n_routed_experts=ffn.num_experts, num_experts_per_tok=ffn.top_k, moe_intermediate_size=ffn.inter,
        hc_mult=hyper.hc_mult, hc_sinkhorn_iters=hyper.sinkhorn_iters, num_hidden_layers=1, vocab_size=ffn.vocab_size,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    found: list[dict[str, Any]] = []
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for experts in ("eager", "grouped_mm"):
        config._experts_implementation = experts
        with torch.device(device), torch.no_grad():
            torch.set_default_dtype(torch.bfloat16)
            layer = modelling.DeepseekV4DecoderLayer(config, 0).eval().to(torch.bfloat16)
            for parameter in layer.parameters():
                parameter.normal_(std=0.02)
            rotary = modelling.DeepseekV4RotaryEmbedding(config)
            streams = torch.randn(rows, 1, hyper.hc_mult, a.hidden_size)
            position = torch.full((rows, 1), a.window)
            tables = {kind: rotary(streams, position, layer_type=kind) for kind in ("main", "compress")}

            def step(
                layer: Any = layer, streams: Any = streams, tables: Any = tables, position: Any = position
            ) -> None:
                cache = DynamicCache(config=config)
                layer(streams, position_embeddings=tables, position_ids=position, attention_mask=None, cache=cache)

            times = []
            try:
                for repeat in range(repeats + 3):
                    synchronize()
                    start = time.perf_counter()
                    step()
                    synchronize()
                    if repeat > 2:
                        times.append((time.perf_counter() - start) * 1e6)
            except Exception as error:  # an implementation that this torch or card has not
                found.append({"part": f"DeepseekV4DecoderLayer, bf16, experts {experts}", "error": str(error)[:200]})
                continue
            finally:
                torch.set_default_dtype(torch.float32)
        found.append({"part": f"DeepseekV4DecoderLayer, bf16, experts {experts}", "us": statistics.median(times)})
        del layer
        torch.cuda.empty_cache()
    return found
