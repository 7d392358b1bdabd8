# SPDX-License-Identifier: AGPL-3.0-only
"""Draft heads of checkpoints whose MTP modules are layers behind the last: MiniMax-M2, GLM-4.5. Twin of the proposer's
part of `factory`: one set of weights makes an MtpHead, several a MultiModuleMtpHead."""

from __future__ import annotations

from contextlib import ExitStack

from .layer import DraftProposer
from .layers.hidden_mode import HiddenMode
from .layers.mtp_head import MtpHead, MtpQuantization
from .layers.mtp_multi import MultiModuleMtpHead
from .levers import ModelLevers
from .mtp_factory import HeadFactory
from .weight_loader import forced_quantization, free_copied_modules, load_mtp_modules
from .weight_loader.module_names import module_shapes

__all__ = ["MtpModulesFactory"]


class MtpModulesFactory(HeadFactory):
    """Makes the heads of MiniMax-M2 and GLM-4.5. A module that has an embedding or a LM head of its own drafts with
    those, in BF16 whatever its quantisation."""

    def quantizations(self) -> tuple[MtpQuantization, ...]:
        """What the modules may be quantised to, BF16 first: that alone where the checkpoint keeps the first of them out
        of quantisation."""
        return tuple(q for q in _ALL if self._forced(q, quietly=True) is q)

    def _forced(self, quantization: MtpQuantization, quietly: bool = False) -> MtpQuantization:
        shapes = module_shapes(self._config, 0)
        return forced_quantization(
            self._config, quantization, quietly, [shapes[field][0] for field in ("fc", "q_proj")]
        )

    def __call__(
        self,
        levers: ModelLevers,
        quantization: MtpQuantization | None = None,
        hidden_mode: HiddenMode | None = None,
    ) -> DraftProposer:
        """A MultiModuleMtpHead of the modules that the checkpoint has, or an MtpHead where it has one and the
        configuration no more. Each has a KV pool of its own, and is in BF16 by default, or where the checkpoint forces
        that.

        Fewer modules than configured are a warning, and `num_modules` is what there is; without any, MissingWeightError
        lists the tensors of the first. Otherwise errors as `load_mtp_modules`, `MtpHead` and `MultiModuleMtpHead`.
        """
        self._refuse_hidden_mode(hidden_mode)
        quantization = self._forced(quantization or MtpQuantization.BF16)
        config, gpu, copies = self._config, self._gpu, quantization is not MtpQuantization.BF16
        store = self._store_for(quantization)
        modules = load_mtp_modules(store, config, gpu, native_fp8=quantization is MtpQuantization.FP8)
        packed = quantization is MtpQuantization.NVFP4
        with ExitStack() as built:
            heads = []
            for weights in modules:
                lm_head = self._nvfp4_lm_head() if packed and weights.lm_head is None else self._weights.lm_head
                head = MtpHead(
                    weights, self._weights.embed_tokens, lm_head, None, config, gpu, quantization, 0,
                    self._max_seq_len, self._main_kv_blocks, levers,
                )  # fmt: skip
                built.callback(head.release)
                heads.append(head)
            several = len(heads) > 1 or config.num_mtp_modules > 1
            made = MultiModuleMtpHead(heads) if several else heads[0]
            self._stack.push(built.pop_all())
        self._stack.callback(made.release)
        if copies:
            free_copied_modules(store, config, modules, gpu)
        return made


_ALL = (MtpQuantization.BF16, MtpQuantization.FP8, MtpQuantization.NVFP4)
