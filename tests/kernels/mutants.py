# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants: kernels with one detail changed, which the check of the kernel must notice.

A mutant patches a file of cuda_src, or a reference, or both; the text to find occurs exactly once in its file. Each
family has its table in `mutants_FAMILY.py`.

A kernel that writes past its buffer does so by a row or so, less than the red zone of host memory: the emulation that
does not check lets it write, and beyond the zone lies the heap of the process that runs the tests.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

FAMILIES = (
    "norm",
    "spark_norm_rows",
    "elementwise",
    "gemv",
    "argmax",
    "batchm",
    "spark_gemv_rows",
    "spark_fp8_gemv_rows",
    "spark_w4a16_gemv_rows",
    "spark_gemv_argmax",
    "spark_w8a16_rows",
    "spark_hc_norm",
    "spark_mxfp4_experts",
    "attention",
    "kv_fp8",
    "spark_paged_decode_split",
    "spark_propose_inputs",
    "spark_qk_norm_rope_cache",
    "fused_k",
    "gemm",
    "quantize_nvfp4",
    "w4a16",
    "w4a16_gemm_t",
    "w4a16_joint",
    "fp8_gemv",
    "moe_topk",
    "moe_topk_sigmoid",
    "moe_experts",
    "moe_blend",
    "moe_bf16",
    "spark_moe_step_bf16",
    "spark_moe_step_nvfp4",
    "moe_v4",
    "hyper_connection",
    "mxfp4",
    "spark_v4_rope",
    "spark_v4_qkv",
    "spark_v4_paged_decode",
    "spark_v4_grouped_gemv",
)


@dataclass(frozen=True, slots=True)
class Patch:
    """A replacement in one file: of cuda_src (`norm.cu`, `rms_norm.cuh`) or of spark_py/reference (`norm.py`)."""

    file: str
    find: str
    replace: str

    def apply(self, folder: Path) -> str:
        """The patched text; AssertionError unless `find` occurs once."""
        text = (folder / self.file).read_text()
        assert text.count(self.find) == 1, f"{self.file}: {text.count(self.find)} times: {self.find!r}"
        assert self.find != self.replace
        return text.replace(self.find, self.replace)


@dataclass(frozen=True, slots=True)
class Mutant:
    """`check` names the registered check that must fail, "module::function" with an optional "@aspect". `race`: what is
    wrong is an order that nothing enforces; a GPU may keep it all the same, the checked emulation does not rely on it.
    """

    check: str
    name: str
    cu: Patch | None = None
    py: Patch | None = None
    race: bool = False

    @property
    def kernel(self) -> tuple[str, str]:
        """(module, function)."""
        module, _, function = self.check.partition("@")[0].partition("::")
        return module, function

    def __str__(self) -> str:
        return f"{self.check}: {self.name}"


def all_mutants() -> list[Mutant]:
    """Every mutant of every family."""
    return [m for family in FAMILIES for m in importlib.import_module(f"{__package__}.mutants_{family}").MUTANTS]
