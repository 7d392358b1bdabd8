# SPDX-License-Identifier: AGPL-3.0-only
"""ModelLevers: every switch of the draft heads and of the loop around them, as explicit fields.

Twin of `layers/ops` `ModelLevers` and of the `ATLAS_*` variables around it. Nothing else reads the environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..runtime.errors import InvalidArgumentError
from ..runtime.sizes import count, integer
from .drafting.dcut import DCUT_RATIOS, snap_ratio
from .drafting.ladder import DEFAULT_LADDER, Ladder, check_ladder, parse_ladder
from .drafting.rows import META_STRIDE_MAX, META_STRIDE_MIN, propose_meta_stride_override
from .env_rules import is_one, parse_f32, parse_isize, parse_usize, present
from .row_policy import RowPolicy

__all__ = ["DEFAULT_MTP_MAX_SEQS", "IGNORED", "ModelLevers"]

log = logging.getLogger("spark_py.model")

DEFAULT_MTP_MAX_SEQS = 8
_MAX_SEQS_WITHOUT_LADDER = 4
DEFAULT_DCUT_RATIO, DEFAULT_DCUT_MAX_SEQS = 0.75, 8
DEFAULT_GATE_REPROBE, DEFAULT_GATE_REFRESH = 256, 1024
MAX_SHADOW_TOPK = 8
MAX_REFEED_SHIFT = 4

_OBSOLETE = "obsolete, in the engine too: drafter prefill and carry are on unless ATLAS_NO_MTP_DRAFTER_CONTEXT is 1"
_BISECTION = "an aid for taking the head apart; its buffers can be read with gpu.view"
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "ATLAS_MTP_DRAFTER_PREFILL": _OBSOLETE,
        "ATLAS_MTP_CARRY_DRAFTER": _OBSOLETE,
        "ATLAS_NO_MTP_TC": "there is no tensor-core GEMV",
        "ATLAS_NO_MTP_BATCH_VERIFY": "sequences are verified one after another",
        "ATLAS_NO_MTP_BATCH_BOOTSTRAP": "sequences are prefilled one after another",
        "ATLAS_NO_MTP_BOOT_ARGMAX": "sequences are prefilled one after another",
        "ATLAS_MTP_CONCAT_HIDDEN_FIRST": _BISECTION,
        "ATLAS_MTP_SKIP_FC": _BISECTION,
        "ATLAS_MTP_SKIP_ATTN": _BISECTION,
        "ATLAS_MTP_SKIP_MLP": _BISECTION,
        "ATLAS_MTP_AUDIT_PTRS": _BISECTION,
        "ATLAS_MTP_DIVERGENCE_DUMP": _BISECTION,
        "ATLAS_MTP_WEIGHT_AUDIT": "the loader checks every tensor's name, shape and dtype in any case",
        "ATLAS_QWEN3X_LMHEAD_NVFP4": "the LM head is what the caller passes",
    }
)
"""Variables of the engine that change nothing here, with the reason; `from_env` warns where one is set."""

_SWITCHES = (
    "drafter_prefill", "exact_drafter_rows", "refeed", "carry_drafter", "eager_drafter", "catchup", "refeed_debug",
    "batch_propose", "dcut", "gate_force", "debug_norms", "accept_debug", "prefill_profile", "carry_debug",
    "chain_postnorm", "lm_head_tgemm", "gemv_sw", "gemv_exact_m_tiers", "kv_gemv_pinned", "small_m_tier",
    "propose_graph", "keep_logits", "bf16_moe_fused",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelLevers:
    """Switches of one model; each is read when a head or a loop is built, so that a running one never changes its mind.

    The drafter's rows:
    drafter_prefill: the drafter sees the prompt, and its scratch for that is allocated.
    exact_drafter_rows: rows fed by prefill and catch-up have the bits of rows that a propose writes (batched GEMV);
        off, the engine's own way, a GEMM, whose sums have another order.
    row_policy, refeed: what stays after a verify; see RowPolicy.
    refeed_shift: the fed rows' hidden comes from so many tokens later, -4 to 4; a check that 0 is right, nothing else.
    refeed_debug: FNV-1a hashes of the fed hidden rows in the log.
    catchup: rows that are missing are fed from a ring of the last hidden rows (see drafting.catchup). Needs
        mtp_max_seqs 1, as in the engine.
    carry_drafter: rows move from a sequence that ends to the next one that begins alike (see drafting.carry); acts
        where `carries`. carry_debug: what was carried, in the log.
    eager_drafter: the drafter sees the prompt at the end of the target's prefill; off: before the first propose.
    chain_postnorm: drafts after the first read the drafter's hidden behind its final norm.

    How much is drafted:
    mtp_max_seqs: sequences that draft at the same time; sizes the drafter's KV pool.
    mtp_k_ladder: drafts by the number of sequences (see drafting.ladder); None: always what was asked for.
    draft_conf_tau: above 0, each propose measures the probability of its drafts (`last_confidence`), and the decoding
        loop verifies none where the smallest is below it; 0 to 0.99.
    batch_propose: sequences draft in one pass where the proposer offers it.
    dcut, dcut_ratio, dcut_max_seqs: which drafts of a batch are verified (see drafting.dcut).
    gate_force: MTP stays on whatever its speed. gate_reprobe, gate_refresh: tokens; see drafting.gate.

    Kernels, none of which changes which drafts are made but for the last bits of sums:
    gemv_sw: the single-warp W4A16 GEMV. lm_head_tgemm: the tiled GEMM over the transposed LM head.
    gemv_exact_m_tiers, kv_gemv_pinned, small_m_tier: see drafting.rows. bf16_moe_fused: BF16 experts without a copy of
        their ids to the host. propose_graph: all drafts of a propose, single or batched, are one graph, on every
        backend (see mtp_head.propose_graph). keep_logits: such a graph leaves the last draft's logits in the arena;
        without it, it need not write them at all.
    propose_meta_stride: bytes of a sequence's metadata in a batched propose; None: what max_seq_len needs.

    The log: shadow_topk, the so many most probable ids of each draft, at most 8. debug_norms, L2 norms of a draft's
    stages. accept_debug, acceptance of each request. prefill_profile, seconds of the rows that are fed.
    """

    drafter_prefill: bool = True
    exact_drafter_rows: bool = True
    row_policy: RowPolicy = RowPolicy.SEED
    refeed: bool = False
    mtp_max_seqs: int = DEFAULT_MTP_MAX_SEQS
    draft_conf_tau: float = 0.0
    carry_drafter: bool = True
    eager_drafter: bool = True
    catchup: bool = False
    refeed_shift: int = 0
    refeed_debug: bool = False
    mtp_k_ladder: Ladder | None = DEFAULT_LADDER
    batch_propose: bool = True
    dcut: bool = True
    dcut_ratio: float = DEFAULT_DCUT_RATIO
    dcut_max_seqs: int = DEFAULT_DCUT_MAX_SEQS
    gate_force: bool = False
    gate_reprobe: int = DEFAULT_GATE_REPROBE
    gate_refresh: int = DEFAULT_GATE_REFRESH
    shadow_topk: int = 0
    debug_norms: bool = False
    accept_debug: bool = False
    prefill_profile: bool = False
    carry_debug: bool = False
    chain_postnorm: bool = False
    lm_head_tgemm: bool = True
    gemv_sw: bool = True
    gemv_exact_m_tiers: bool = True
    kv_gemv_pinned: bool = False
    small_m_tier: bool = True
    propose_graph: bool = True
    keep_logits: bool = False
    bf16_moe_fused: bool = True
    propose_meta_stride: int | None = None

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgumentError(name, value, "True or False")
        if not isinstance(self.row_policy, RowPolicy):
            raise InvalidArgumentError("row_policy", self.row_policy, "a RowPolicy")
        for name, least in (("mtp_max_seqs", 1), ("dcut_max_seqs", 0), ("gate_reprobe", 1), ("gate_refresh", 1)):
            count(name, getattr(self, name), least)
        if not _is_number(self.draft_conf_tau) or not 0.0 <= self.draft_conf_tau <= 0.99:
            raise InvalidArgumentError("draft_conf_tau", self.draft_conf_tau, "a number from 0 to 0.99 is needed")
        if not _is_number(self.dcut_ratio) or self.dcut_ratio not in DCUT_RATIOS:
            raise InvalidArgumentError("dcut_ratio", self.dcut_ratio, f"one of {', '.join(map(str, DCUT_RATIOS))}")
        if count("shadow_topk", self.shadow_topk, 0) > MAX_SHADOW_TOPK:
            raise InvalidArgumentError("shadow_topk", self.shadow_topk, f"0 to {MAX_SHADOW_TOPK}")
        if abs(integer("refeed_shift", self.refeed_shift)) > MAX_REFEED_SHIFT:
            limit = f"{-MAX_REFEED_SHIFT} to {MAX_REFEED_SHIFT}"
            raise InvalidArgumentError("refeed_shift", self.refeed_shift, limit)
        if self.mtp_k_ladder is not None:
            check_ladder("mtp_k_ladder", self.mtp_k_ladder)
        stride = self.propose_meta_stride
        if stride is not None and propose_meta_stride_override(count("propose_meta_stride", stride)) != stride:
            limit = f"a multiple of 8 from {META_STRIDE_MIN} to {META_STRIDE_MAX}, or None"
            raise InvalidArgumentError("propose_meta_stride", stride, limit)
        if self.catchup and self.mtp_max_seqs != 1:
            raise InvalidArgumentError(
                "catchup", True, f"one sequence at a time, and mtp_max_seqs is {self.mtp_max_seqs}"
            )

    @property
    def feeds_drafter(self) -> bool:
        """Whether rows are ever fed: a head then has the scratch of prefill chunks."""
        return self.drafter_prefill or self.refeed or self.catchup

    @property
    def carries(self) -> bool:
        """Whether rows are carried from one sequence to the next: one at a time drafts, and drafters see prompts."""
        return self.carry_drafter and self.drafter_prefill and self.mtp_max_seqs == 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ModelLevers:
        """The levers that the engine's environment variables ask for, each by the engine's own parse rule.

        Off where the variable is set to anything, "0" and the empty text included: ATLAS_NO_MTP_LMHEAD_TGEMM,
        NO_GEMV_EXACT_M_TIERS, NO_MTP_K_LADDER (then mtp_max_seqs is 4 unless given), NO_MTP_EAGER_DRAFTER,
        NO_MTP_BATCH_PROPOSE, NO_MTP_DCUT; on likewise: MTP_KV_GEMV, MTP_ACCEPT_DEBUG.

        For exactly "1", off: NO_GEMV_SW, NO_DRAFTER_SMALL_M_TIER, NO_MTP_PROPOSE_GRAPH, NO_MTP_BF16_MOE_FUSED,
        NO_MTP_DRAFTER_CONTEXT (drafter_prefill and carry_drafter), MTP_DRAFTER_CONTEXT_PREFILL_ONLY_UNSAFE (the latter
        alone); on: MTP_REFEED_DEBUG, MTP_DEBUG_NORMS, MTP_PREFILL_PROFILE, MTP_CARRY_DEBUG, MTP_GATE_FORCE,
        MTP_CHAIN_POSTNORM, and where mtp_max_seqs is 1, MTP_CATCHUP and MTP_REFEED_ACCEPTED.

        Numbers, the default for anything else, blanks included: MTP_MAX_SEQS, MTP_GATE_REPROBE, MTP_GATE_REFRESH (0
        counts as 1 and is logged), MTP_DCUT_MAX_SEQS, MTP_SHADOW_TOPK (at most 8), MTP_REFEED_SHIFT (held within -4 to
        4), MTP_DRAFT_CONF (0 to 0.99), MTP_DCUT_RATIO (0 to 1, then the nearest of 0.25, 0.5, 0.75 and 1).
        PROPOSE_META_STRIDE may have blanks around it and becomes a multiple of 8 within 2048 and 2^24. MTP_K_LADDER is
        `n:k,n:k`; one bad part makes it the default.

        The row policy is SEED. A variable of IGNORED that is set is logged.
        """
        values = os.environ if env is None else env

        def get(name: str) -> str | None:
            return values.get(f"ATLAS_{name}")

        for name, reason in IGNORED.items():
            if name in values:
                log.warning("%s is set and changes nothing: %s", name, reason)

        ladder = None if present(get("NO_MTP_K_LADDER")) else parse_ladder(get("MTP_K_LADDER")) or DEFAULT_LADDER
        seqs = _at_least_1("MTP_MAX_SEQS", get, _MAX_SEQS_WITHOUT_LADDER if ladder is None else DEFAULT_MTP_MAX_SEQS)
        context = not is_one(get("NO_MTP_DRAFTER_CONTEXT"))
        stride = parse_usize((get("PROPOSE_META_STRIDE") or "").strip())
        max_dcut, topk = parse_usize(get("MTP_DCUT_MAX_SEQS")), parse_usize(get("MTP_SHADOW_TOPK"))
        ratio, shift = parse_f32(get("MTP_DCUT_RATIO")), parse_isize(get("MTP_REFEED_SHIFT"))
        return cls(
            drafter_prefill=context,
            refeed=is_one(get("MTP_REFEED_ACCEPTED")) and seqs == 1,
            mtp_max_seqs=seqs,
            draft_conf_tau=min(max(parse_f32(get("MTP_DRAFT_CONF")) or 0.0, 0.0), 0.99),
            carry_drafter=context and not is_one(get("MTP_DRAFTER_CONTEXT_PREFILL_ONLY_UNSAFE")),
            eager_drafter=not present(get("NO_MTP_EAGER_DRAFTER")),
            catchup=is_one(get("MTP_CATCHUP")) and seqs == 1,
            refeed_shift=min(max(shift or 0, -MAX_REFEED_SHIFT), MAX_REFEED_SHIFT),
            refeed_debug=is_one(get("MTP_REFEED_DEBUG")),
            mtp_k_ladder=ladder,
            batch_propose=not present(get("NO_MTP_BATCH_PROPOSE")),
            dcut=not present(get("NO_MTP_DCUT")),
            dcut_ratio=DEFAULT_DCUT_RATIO if ratio is None else snap_ratio(ratio),
            dcut_max_seqs=DEFAULT_DCUT_MAX_SEQS if max_dcut is None else max_dcut,
            gate_force=is_one(get("MTP_GATE_FORCE")),
            gate_reprobe=_at_least_1("MTP_GATE_REPROBE", get, DEFAULT_GATE_REPROBE),
            gate_refresh=_at_least_1("MTP_GATE_REFRESH", get, DEFAULT_GATE_REFRESH),
            shadow_topk=min(topk or 0, MAX_SHADOW_TOPK),
            debug_norms=is_one(get("MTP_DEBUG_NORMS")),
            accept_debug=present(get("MTP_ACCEPT_DEBUG")),
            prefill_profile=is_one(get("MTP_PREFILL_PROFILE")),
            carry_debug=is_one(get("MTP_CARRY_DEBUG")),
            chain_postnorm=is_one(get("MTP_CHAIN_POSTNORM")),
            lm_head_tgemm=not present(get("NO_MTP_LMHEAD_TGEMM")),
            gemv_sw=not is_one(get("NO_GEMV_SW")),
            gemv_exact_m_tiers=not present(get("NO_GEMV_EXACT_M_TIERS")),
            kv_gemv_pinned=present(get("MTP_KV_GEMV")),
            small_m_tier=not is_one(get("NO_DRAFTER_SMALL_M_TIER")),
            propose_graph=not is_one(get("NO_MTP_PROPOSE_GRAPH")),
            bf16_moe_fused=not is_one(get("NO_MTP_BF16_MOE_FUSED")),
            propose_meta_stride=None if stride is None else propose_meta_stride_override(stride),
        )


def _at_least_1(name: str, get: Callable[[str], str | None], default: int) -> int:
    number = parse_usize(get(name))
    if number == 0:
        log.warning("ATLAS_%s is 0, which leaves nothing to work with: taken as 1", name)
    return default if number is None else max(number, 1)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
