# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's loader over small folders with the published layout, and over the names of transformers; mutants of it;
a block of loaded weights against the model in FP64 over the bytes of the files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from spark_py.model import weight_loader
from spark_py.model.layers.deepseek_v4 import V4Attention, V4Ffn, V4HyperConnections, V4Layer, V4Shapes
from spark_py.model.weight_loader import deepseek_v4, deepseek_v4_names, deepseek_v4_upload, upload
from spark_py.model.weight_loader.deepseek_v4 import load_v4_mtp_weights, load_v4_target_weights
from spark_py.runtime import open_backend
from spark_py.runtime.errors import SparkError, UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import F32, Array, Output, f64, relative_l2
from tests.kernels import v4_oracle
from tests.model import v4_files as files
from tests.model.v4_hyper_support import post_of, pre_of
from tests.model.v4_loader_support import CHECKS, Loader, opened
from tests.model.v4_support import Pages, attention_of, make_cache

REAL = Loader(upload, deepseek_v4_names, deepseek_v4_upload, deepseek_v4)
FOLDER = Path(weight_loader.__file__).parent
FLASH: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
    "o_lora_rank": 1024, "o_groups": 8, "n_routed_experts": 256, "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048, "sliding_window": 128, "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_loader(check: Callable[[Loader, GpuBackend, Path], None], gpu: GpuBackend, tmp_path: Path) -> None:
    check(REAL, gpu, tmp_path)


def test_the_published_module_has_1575_tensors() -> None:
    """At the published sizes: those that are listed by hand, and a scale for each that is quantised."""
    config = files.CONFIG | FLASH
    shapes = V4Shapes.of(files.config(config))
    names = deepseek_v4_names
    mine = [*names.mtp_tensors(shapes), *names.block_tensors(shapes, "mtp.0.", hashed=False)]
    mine += names.expert_tensors(shapes, "mtp.0.")
    listed = files.listed_mtp(config)
    assert {tensor.name: tensor.shape for tensor in mine} == {name: shape for name, shape, _ in listed}
    assert len(mine) == len(listed)
    assert sum(2 if form in ("fp8", "fp4") else 1 for _, _, form in listed) == 1575


def test_a_block_of_loaded_weights_is_the_models(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    """One token through the module's block: every format of the files on its way to a product."""
    config, tensors = files.config(), files.published(rng, target=False)
    shapes, prefix = V4Shapes.of(config), "mtp.0."
    state = rng.standard_normal((1, config.hc_mult, config.hidden_size)).astype(F32)
    pages = Pages.scatter(rng, [1])
    with (
        opened(tmp_path / "folder", tensors) as store,
        make_cache(gpu, pages.blocks, shape=shapes.attention) as cache,
    ):
        block = load_v4_mtp_weights(store, config, gpu).block
        with (
            V4Attention(block.attention, shapes.attention, cache, gpu) as attention,
            V4HyperConnections(shapes.hyper, gpu) as connections,
            V4Ffn(block.ffn, shapes.ffn, gpu) as ffn,
        ):
            streams = Output(gpu, state.shape, F32, state)
            V4Layer(block.layer, attention, ffn, connections).decode(
                streams.ptr, pages.meta(gpu, [0], 0, 0), gpu.default_stream()
            )
            got = streams.read()[0]

    def norm(name: str, x: Array) -> Array:
        return v4_oracle.rms(x, config.rms_norm_eps, f64(tensors[f"{prefix}{name}.weight"][0]))

    y, post, comb = pre_of(state[0], files.site_of(tensors, f"{prefix}hc_attn"), shapes.hyper)
    host = files.attention_host(tensors, prefix)
    middle = post_of(attention_of(norm("attn_norm", y)[None], host, shapes.attention), state[0], post, comb)
    y, post, comb = pre_of(middle, files.site_of(tensors, f"{prefix}hc_ffn"), shapes.hyper)
    mixture = files.ffn_of(tensors, prefix, config, shapes.ffn)
    wanted = post_of(mixture.output(norm("ffn_norm", y)), middle, post, comb)
    # Rows between the parts are rounded to BF16, about a dozen times 2^-9 of an element at most, streams are not.
    assert relative_l2(got, wanted) < 2.0**-6


def test_a_module_with_a_hash_router_is_refused(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    config = files.config()
    with opened(tmp_path / "folder", files.published(rng)) as store:
        module, target = load_v4_mtp_weights(store, config, gpu), load_v4_target_weights(store, config, gpu)
        ffn = replace(module.block.ffn, router=target.blocks[0].ffn.router)
        with pytest.raises(UnsupportedError, match=r"mtp\.0\.ffn\.gate\.tid2eid"):
            replace(module, block=replace(module.block, ffn=ffn)).check(V4Shapes.of(config), "mtp.0")


def test_a_shared_expert_of_another_width_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="width of the shared expert is 128"):
        V4Shapes.of(files.config(n_shared_experts=2))


# Name -> the check that catches it, module, and what is changed in it.
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "E8M0 as a number": (
        "formats",
        "upload",
        "= read_scale(store, plan), _",
        "= store.read(plan.scale).view(np.uint8).astype(np.float32), _",
    ),
    "scales of MXFP4 in FP32": (
        "sizes",
        "upload",
        "WeightDtype.F8_E8M0 if plan.format is WeightFormat.MXFP4 else ",
        "",
    ),
    "w1 and w3 exchanged": ("stacks", "deepseek_v4", '("w1", "w3", "w2")', '("w3", "w1", "w2")'),
    "w3 rows of a stack first": (
        "stacks",
        "deepseek_v4",
        "joint.weight.offset(2 * size * number)",
        "joint.weight.offset(2 * size * number + size * (number > 0))",
    ),
    "the module routed as the first layer": (
        "sizes",
        "deepseek_v4",
        "shapes, names.MTP, hashed=False)",
        "shapes, names.MTP, hashed=config.num_hash_layers > 0)",
    ),
    "one hash layer fewer": (
        "target",
        "deepseek_v4",
        "layer < config.num_hash_layers",
        "layer < config.num_hash_layers - 1",
    ),
    "DSpark taken for a module": ("presence", "deepseek_v4", "(main_proj|markov_head)", "(nothing)"),
    "other tensors left aside": ("other_tensors", "deepseek_v4", "if rest := [", "if rest := [][:0] and ["),
    "scales that nothing applied": (
        "other_tensors",
        "deepseek_v4",
        "        check_scales_applied(store, accounted, each)\n",
        "",
    ),
    "several modules taken for one": ("wrong_tensors", "deepseek_v4", "if config.num_mtp_modules > 1:", "if False:"),
    "layers with a compressor taken for others": (
        "target",
        "deepseek_v4",
        "if kind != SLIDING_ATTENTION:",
        "if False:",
    ),
    "head from the embedding": (
        "stacks",
        "deepseek_v4",
        "head=embed if config.tie_word_embeddings else",
        "head=embed if True else",
    ),
    "the first of two names": ("other_tensors", "deepseek_v4_names", "if len(there) > 1:", "if False:"),
    "names without model.": ("stacks", "deepseek_v4_names", 'for model in ("", _MODEL)', 'for model in ("",)'),
    "kv_norm by its modules' name alone": (
        "names",
        "deepseek_v4_names",
        "for names in (_MODULES, _SAVED)",
        "for names in (_MODULES,)",
    ),
    "q_norm for kv_norm": (
        "stacks",
        "deepseek_v4_names",
        'weight": "self_attn.kv_norm.weight"',
        'weight": "self_attn.q_a_norm.weight"',
    ),
    "BF16 parameters not widened": (
        "formats",
        "deepseek_v4_upload",
        "self.store.read(stored).astype(np.float32)",
        "self.store.read(stored)",
    ),
    "experts in formats of their own": ("formats", "deepseek_v4_upload", "if all(plan.format", "if any(plan.format"),
    "MXFP4 experts to BF16": ("sizes", "deepseek_v4_upload", "found |= {plan.name for plan in block}", "pass"),
    "projections to BF16": ("sizes", "deepseek_v4_upload", "is_block_scaled(store, plan) and", "False and"),
    "wo_a to BF16": ("sizes", "deepseek_v4_names", "a.group_size), Kind.GROUPED", "a.group_size), Kind.DENSE"),
    "any shape": ("wrong_tensors", "deepseek_v4_upload", "if plan.shape != tensor.shape:", "if False:"),
    "a router in any format": ("wrong_tensors", "deepseek_v4_upload", "(Kind.PLAIN, Kind.F32) and", "(Kind.F32,) and"),
    "tables on trust": ("target", "deepseek_v4_upload", "check_hash_table(table, config.num_experts)", "pass"),
    "memory of parameters not asked for": ("memory", "deepseek_v4_upload", "native, reserve_bytes=reserve)", "native)"),
    "a failed upload keeps what it has": (
        "memory",
        "deepseek_v4_upload",
        "free_quietly(gpu, store.remove(name).ptr)",
        "pass",
    ),
    "parameters of connections in BF16": (
        "stacks",
        "deepseek_v4_names",
        '(f"hc_{site}_{part}", shape, Kind.F32)',
        '(f"hc_{site}_{part}", shape, Kind.PLAIN)',
    ),
}


def build(changed: str, old: str, new: str) -> Loader:
    """The modules, made anew from source so that each imports those before it, one of them edited."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in Loader._fields:
            source = (FOLDER / f"{name}.py").read_text()
            if name == changed:
                assert source.count(old) == 1, f"the mutant's place {old!r} is {source.count(old)} times in {name}.py"
                source = source.replace(old, new)
            full = f"{weight_loader.__name__}.{name}"
            copy = ModuleType(full)
            copy.__package__ = weight_loader.__name__
            patch.setitem(sys.modules, full, copy)
            patch.setattr(weight_loader, name, copy)
            exec(compile(source, f"{name} (mutant)", "exec"), copy.__dict__)
            made.append(copy)
    return Loader(*made)


def run_check(name: str, loader: Loader, folder: Path) -> None:
    with open_backend("host") as gpu:
        next(check for check in CHECKS if check.__name__ == f"check_{name}")(loader, gpu, folder)
        gpu.sweep_unreleased()


@pytest.mark.host_only("what a loader does with files does not depend on the backend")
def test_unchanged_source_passes(tmp_path: Path) -> None:
    loader = build("", "", "")
    for check in sorted({check for check, *_ in MUTANTS.values()}):
        (tmp_path / check).mkdir()
        run_check(check, loader, tmp_path / check)


@pytest.mark.host_only("what a loader does with files does not depend on the backend")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    check, *change = MUTANTS[name]
    loader = build(*change)
    with pytest.raises((AssertionError, SparkError, pytest.fail.Exception)):
        run_check(check, loader, tmp_path)
