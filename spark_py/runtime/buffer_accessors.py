# SPDX-License-Identifier: AGPL-3.0-only
"""One accessor a buffer, under the buffer's name: its device address, NULL where the model has no use for it.

Twin of `buffers/accessors.rs`. In the shapes m is max_batch_tokens and h hidden_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from .gpu import DevicePtr

__all__ = ["BufferAccessors"]


class BufferAccessors(ABC):
    """Addresses of the arena's buffers."""

    @abstractmethod
    def pointer(self, name: str) -> DevicePtr:
        """The buffer called `name`."""

    def hidden_states(self) -> DevicePtr:
        """BF16 [m, h]: working hidden."""
        return self.pointer("hidden_states")

    def residual(self) -> DevicePtr:
        """BF16 [m, h]: residual."""
        return self.pointer("residual")

    def norm_output(self) -> DevicePtr:
        """BF16 [m, max(h, mamba2_d_inner)]: normed rows; reused several times a layer."""
        return self.pointer("norm_output")

    def qkv_output(self) -> DevicePtr:
        """BF16 [m, q (+ gate), k, v]."""
        return self.pointer("qkv_output")

    def attn_output(self) -> DevicePtr:
        """BF16 [m, heads * head_dim], or what latent attention or Mamba-2 puts out."""
        return self.pointer("attn_output")

    def gate_logits(self) -> DevicePtr:
        """BF16 [m, experts]: router logits."""
        return self.pointer("gate_logits")

    def gate_logits_f32(self) -> DevicePtr:
        """FP32 [m, experts]."""
        return self.pointer("gate_logits_f32")

    def moe_router_in_f32(self) -> DevicePtr:
        """FP32 [m, h]: router input."""
        return self.pointer("moe_router_in_f32")

    def moe_output(self) -> DevicePtr:
        """BF16 [m, h]."""
        return self.pointer("moe_output")

    def logits(self) -> DevicePtr:
        """BF16 [rows, vocab], rows at most 96 or one more than the decode metadata has; prefill uses one."""
        return self.pointer("logits")

    def ssm_qkvz(self) -> DevicePtr:
        """BF16 [m, q, k, v, z]; also contiguous K and V, the shared expert's up row, a drafter's embedding."""
        return self.pointer("ssm_qkvz")

    def ssm_ba(self) -> DevicePtr:
        """BF16 [m, beta, alpha]; also latent rows, a drafter's [embedding, hidden]."""
        return self.pointer("ssm_ba")

    def ssm_deinterleaved(self) -> DevicePtr:
        """BF16 [m, q, k, v, z] apart; also contiguous queries, a drafter's normed embedding."""
        return self.pointer("ssm_deinterleaved")

    def ssm_gates(self) -> DevicePtr:
        """FP32 [m, 2 * value heads]: gate and beta; also a drafter's normed hidden, BF16."""
        return self.pointer("ssm_gates")

    def ssm_conv_out_f32(self) -> DevicePtr:
        """FP32 [m, q, k, v, z]: output of the convolution; also rotated queries of latent attention, BF16."""
        return self.pointer("ssm_conv_out_f32")

    def scratch(self) -> DevicePtr:
        """Routing, argmax results and metadata at fixed offsets; use `scratch_map` to lease regions of it."""
        return self.pointer("scratch")

    def expert_gate_out(self) -> DevicePtr:
        """BF16 [m, experts per token * FFN width]."""
        return self.pointer("expert_gate_out")

    def expert_up_out(self) -> DevicePtr:
        """BF16 [m, experts per token * FFN width]."""
        return self.pointer("expert_up_out")

    def expert_down_out(self) -> DevicePtr:
        """BF16 [m, experts per token * h]."""
        return self.pointer("expert_down_out")

    def splitk_workspace(self) -> DevicePtr:
        """FP32 [multiprocessors, head_dim + 2]: partial output, running maximum and sum of each split."""
        return self.pointer("splitk_workspace")

    def gdn_fla_scratch(self) -> DevicePtr:
        """Chunked prefill of gated delta nets; NULL unless both linear head dims are 128."""
        return self.pointer("gdn_fla_scratch")

    def ssd_scratch(self) -> DevicePtr:
        """Chunked Mamba-2 prefill; NULL without Mamba-2 heads."""
        return self.pointer("ssd_scratch")

    def o_latent(self) -> DevicePtr:
        """BF16 [m, o_groups, o_lora_rank]: DeepSeek-V4's grouped output projection."""
        return self.pointer("o_latent")

    def norm_unit_w(self) -> DevicePtr:
        """BF16 zeros [max(h, mamba2_d_inner)]: a unit weight for kernels that scale by 1 + w."""
        return self.pointer("norm_unit_w")

    def hc_streams(self) -> DevicePtr:
        """FP32 [m, hc_mult, h]: hyper-connection streams."""
        return self.pointer("hc_streams")

    def hc_post(self) -> DevicePtr:
        """FP32 [m, hc_mult]."""
        return self.pointer("hc_post")

    def hc_comb(self) -> DevicePtr:
        """FP32 [m, hc_mult, hc_mult]: the Sinkhorn matrix."""
        return self.pointer("hc_comb")

    def hc_lowrank_scratch(self) -> DevicePtr:
        """Low-rank hyper-connections; two layouts that exclude each other."""
        return self.pointer("hc_lowrank_scratch")

    def qsa_select_scratch(self) -> DevicePtr:
        """Indexer selection."""
        return self.pointer("qsa_select_scratch")

    def token_ids(self) -> DevicePtr:
        """u32 [m]: unchanged through the layers of a step."""
        return self.pointer("token_ids")

    def ffn_act_q8(self) -> DevicePtr:
        """Quantised activations of a dense FFN; NULL with experts."""
        return self.pointer("ffn_act_q8")

    def ffn_act_a(self) -> DevicePtr:
        """8-bit activations of a dense FFN [m, max(h, intermediate)]; NULL with experts."""
        return self.pointer("ffn_act_a")

    def ffn_act_scale(self) -> DevicePtr:
        """FP32 scales of `ffn_act_a`, one per 32; NULL with experts."""
        return self.pointer("ffn_act_scale")

    def fp8_act(self) -> DevicePtr:
        """E4M3 activations [m, K], K the widest projection input."""
        return self.pointer("fp8_act")

    def fp8_act_scale(self) -> DevicePtr:
        """FP32 [m, ceil(K / 128)]: scales of `fp8_act`."""
        return self.pointer("fp8_act_scale")

    def lora_xa(self) -> DevicePtr:
        """BF16 [m, rank]; NULL without adapters."""
        return self.pointer("lora_xa")

    def lora_delta(self) -> DevicePtr:
        """BF16 [m, widest projection output]; NULL without adapters."""
        return self.pointer("lora_delta")

    def lora_hact(self) -> DevicePtr:
        """BF16 [m, intermediate]; NULL without adapters."""
        return self.pointer("lora_hact")

    def lora_seq_slot(self) -> DevicePtr:
        """i32 [m]: adapter slot of each row; NULL without adapters."""
        return self.pointer("lora_seq_slot")
