# SPDX-License-Identifier: AGPL-3.0-only
"""Faults that draft heads are known for, and the test that keeps each of them out.

FAULTS is the table: what went wrong somewhere, and the tests that would fail here; or why it cannot happen. A name that
no test has fails this module, so that the table stays true. Tests that belong nowhere else are at the end.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.runtime.errors import NullHandleError
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import Form, make_form
from tests.model.support import Array, Oracle, Rig, a_hidden, dense, make_rig, relative_l2

TESTS = Path(__file__).parents[1]


class Fault(NamedTuple):
    """One fault. `tests` are "folder/module::function" without "test_"; `why` says what a test cannot, or what the port
    has not."""

    what: str
    tests: tuple[str, ...] = ()
    why: str = ""


ACCEPTANCE_AND_STATE = (
    Fault("a drafter whose context hooks do nothing never sees the prompt, and nobody is told",
          ("model/speculative::a_drafter_that_cannot_be_fed_says_so",
           "model/mtp_head_rows::a_head_without_prefill_says_so")),
    Fault("rows go through another cache's block table",
          ("model/known_faults::two_heads_share_no_block",
           "model/mtp_head_rows::a_propose_writes_its_own_slots_and_nothing_else",
           "model/mtp_multi::only_a_modules_own_blocks_are_written")),
    Fault("a checkpoint without its MTP layer drafts from memory that nobody filled",
          ("model/mtp_loader::one_missing_tensor_is_named", "model/mtp_loader::a_checkpoint_without_an_mtp_module")),
    Fault("the configuration promises modules that the files have not, or the reverse",
          ("model/mtp_loader::more_modules_than_the_head_has", "model/mtp_loader::a_checkpoint_without_an_mtp_module",
           "model/mtp_multi::the_number_of_modules_is_said", "model/mtp_multi::empty_modules_rejected")),
    Fault("a BF16 projection is taken for FP8, with a scale that nobody filled",
          ("model/mtp_loader_formats::a_projection_in_every_format", "model/mtp_loader_formats::check")),
    Fault("FP8 tensors with block scales are read as BF16, or their edge blocks with another block's scale",
          ("model/dequant_store::fp8", "model/dequant_store::unread_scales")),
    Fault("a shared FP8 cache is read with another scale than it was written with; bad scales are taken",
          ("runtime/kv_cache::fp8_scales", "runtime/kv_cache::bad_fp8_scales_are_refused")),
    Fault("the drafter's cache lacks a confirmed token, or keeps a rejected one",
          ("model/mtp_head_rows::verified_rows_are_the_confirmed_prefix",
           "model/mtp_head_rows::rows_keys_and_bytes_over_random_accept_patterns")),
    Fault("one draft more than a compiled-in width is not undone", ("model/draft_depths::drafts_of_the_head",)),
    Fault("a batch that is not real writes through the blocks of sequences that ended",
          ("model/known_faults::freed_blocks_are_written_by_their_new_owner_alone",
           "model/mtp_head_graph_batch::blocks_that_nobody_has_stay_as_they_are"),
          "there is no warm-up pass: every row that is written belongs to a state with blocks of its own"),
    Fault("a request that ends among accepted drafts leaves a state ahead of its text",
          ("model/speculative::a_request_that_ends_among_accepted_drafts_keeps_what_it_emitted",
           "model/drafter_feed::a_text_that_is_changed")),
    Fault("a verify of k + 1 rows moves the sequence by another number",
          ("model/speculative::the_proposer_gets_the_hidden_row_before_its_token",
           "model/batched_speculative::the_hidden_rows_are_those_before_the_tokens")),
    Fault("after a pause of drafting rows are rotated by their number, not by their position",
          ("model/mtp_head_rows::positions_are_absolute_after_a_pause",
           "model/decoding::a_pause_of_drafting_does_not_move_positions")),
    Fault("one word stands for drafts here and for rows of the verify there",
          ("cli/generate::json_has_every_run", "cli/generate::json_of_one_run")),
    Fault("0 drafts, or a negative number, do something; more drafts than modules run one of them twice",
          ("model/mtp_head_errors::no_drafts_touch_nothing", "model/mtp_multi::drafts_end_at_the_number_of_modules")),
    Fault("drafts run past the sequence's maximum",
          ("model/mtp_head_errors::drafts_end_with_the_sequence", "model/speculative::prompts_up_to_max_seq_len")),
)  # fmt: skip

TOKEN_IDS = (
    Fault("a draft is beyond the vocabulary, or padding of a table wins",
          ("kernels/argmax::argmax", "model/mtp_head_new::padded_tables", "model/target::padding_rows_are_never_picked",
           "model/speculative::drafts_out_of_the_vocabulary_are_refused")),
    Fault("equal maxima give the last index in one place and the first elsewhere",
          ("kernels/argmax::all_paths_agree_on_random_bits", "kernels/argmax::values_that_tie_only_after_rounding",
           "model/grammar::the_best_allowed_token")),
    Fault("a placeholder such as -1 is embedded",
          ("model/mtp_head_errors::a_token_outside_the_table_is_refused_before_any_copy",
           "kernels/embed_from_argmax::an_id_beyond_the_table_is_refused")),
    Fault("greedy is a sampler that takes any tied maximum", ("kernels/argmax::all_paths_agree_on_random_bits",),
          "there is no sampler"),
    Fault("a NaN pins the pick", ("kernels/argmax::argmax", "kernels/argmax::all_paths_agree_on_random_bits")),
)  # fmt: skip

GRAMMAR = (
    Fault("masks are told apart by their number alone",
          ("model/grammar::masks_that_do_not_fit", "model/mtp_head_batch_faults::what_is_refused")),
    Fault("the mask of the first position is used for the others",
          ("model/grammar::several_drafts_under_one_mask_are_one", "model/grammar::each_draft_obeys_its_own_mask")),
)  # fmt: skip

QUANTISED = (
    Fault("a global scale is a divisor in one format and a factor in the other",
          ("model/dequant_store::nvfp4", "model/dequant_store::doubtful_factors_are_warned_of")),
    Fault("shapes that need padding lose it",
          ("model/dequant::nvfp4_columns_must_fill_groups", "kernels/quantize_nvfp4::impossible_numbers_are_refused",
           "kernels/w4a16_gemv::every_number_of_outputs_is_covered")),
    Fault("the layout of a quantised cache depends on the architecture",
          ("runtime/kv_cache::layout_is_a_property_of_the_cache",
           "runtime/kv_cache::k_and_v_scale_patterns_stay_apart")),
    Fault("values beyond E4M3 become NaN here and saturate there",
          ("kernels/reshape_and_cache::edges_of_e4m3",
           "kernels/quantize_nvfp4::the_encoder_is_the_engines_and_not_the_hardwares")),
)  # fmt: skip

THE_ENGINES_OWN = (
    Fault("every draft is token 0: FP8 KV with unit scales saturates", ("model/known_faults::large_keys_and_values",)),
    Fault("a strided norm over [Q | gate] rows of a batch normalises gates",
          ("kernels/ssm_preprocess::deinterleave", "model/mtp_head_batch::a_batch_is_its_sequences_alone",
           "model/mtp_head_batch_faults::faults_show"),
          "the target splits its rows before the norm"),
    Fault("a batched propose falls back for ever past 7168 tokens",
          ("model/drafting_rows::a_full_sequence_fits_its_slab", "model/drafting_rows::stride_of_the_metadata",
           "model/mtp_head_batch::sequences_longer_than_a_slab_of_the_original_size")),
    Fault("metadata of more than 8 sequences runs into other memory",
          ("model/drafting_rows::stride_of_the_metadata", "model/mtp_head_batch::many_sequences",
           "runtime/scratch_map::the_last_block_that_fits_and_one_more")),
    Fault("a long block table is written past its place", ("model/mtp_meta::the_last_table_that_fits",)),
    Fault("the drafter's pool is that of one sequence", ("model/mtp_head_new::blocks_of_the_pool",)),
    Fault("the drafter's pool is allocated after the target's took all memory",
          ("model/mtp_head_new::blocks_of_the_pool",),
          "no pool is sized by the memory that is left: both are sized by sequences, the drafter's by one function"),
    Fault("an odd vocabulary as a row stride is misaligned",
          ("model/drafting_rows::the_leading_dimension_of_a_transposed_head",
           "kernels/w4a16_gemm_t::a_short_ldb_in_a_bare_launch_is_refused")),
    Fault("rows past a kernel's width stay as they were",
          ("kernels/dense_gemv_bf16_batchm::a_launch_that_would_lose_rows_is_refused",
           "kernels/w4a16_gemv::a_launch_that_would_lose_rows_or_chunks_is_refused",
           "model/mtp_head_batch_faults::a_tier_with_more_rows_than_it_takes_is_refused")),
    Fault("a batched GEMV sums otherwise than the single one",
          ("kernels/w4a16_gemv::each_row_is_the_gemv_of_that_row",
           "kernels/dense_gemv_bf16_batchm::each_row_is_the_gemv_of_that_row")),
    Fault("a tail of outputs leaves before a barrier", ("kernels/w4a16_gemv::every_number_of_outputs_is_covered",)),
    Fault("packed tensors are read as BF16",
          ("model/mtp_loader_formats::a_projection_in_every_format", "model/mtp_loader::another_dtype_is_named")),
    Fault("an LM head that is packed already is quantised again",
          ("model/target::other_dtypes_and_layers_are_refused",),
          "the LM head is never quantised here: it is taken as it is"),
    Fault("a head that its checkpoint wants in BF16 is quantised",
          ("model/mtp_loader_formats::lists_of_ignored_modules",)),
    Fault("an all-reduce inside a drafter that one rank runs", why="there is no communicator: all experts are local"),
    Fault("several drafts under a mask for one position", ("model/grammar::several_drafts_under_one_mask_are_one",)),
    Fault("an empty mask repeats the last token", ("model/grammar::a_mask_that_allows_nothing",)),
    Fault("a verdict over more drafts than were verified",
          ("model/speculative::more_drafts_than_asked_for_are_refused",
           "model/batched_speculative::shares_and_budgets")),
    Fault("recurrent state is rolled back one row short", ("model/decoding::the_tokens_are_those_of_the_plain_run",),
          "layers with recurrent state are refused"),
    Fault("the drafter gets the hidden behind the target's final norm",
          ("model/speculative::the_proposer_gets_the_hidden_row_before_its_token",)),
    Fault("a propose destroys hidden rows that later sequences need",
          ("model/batched_speculative::every_verdict_comes_before_any_propose_of_the_next_step",
           "model/batched_speculative::the_hidden_rows_are_those_before_the_tokens",
           "model/mtp_head_batch::hidden_rows_in_the_buffer_that_drafting_overwrites")),
    Fault("another prompt's hidden rows are taken for this one's",
          ("model/drafting_carry::another_prefill_between_chunks_takes_the_buffer",
           "model/decoding::two_sequences_at_once"),
          "each sequence has hidden rows of its own"),
    Fault("a prompt that does not start at 0 leaves the drafter blind",
          ("model/drafter_feed::rows_that_hold_are_taken_over_and_completed",
           "model/drafter_feed::a_drafter_that_comes_late_is_shown_everything")),
    Fault("carried rows are refused wherever a template writes the last turn otherwise",
          ("model/drafting_carry::what_holds_for_a_prompt", "model/drafter_feed::a_text_that_is_changed")),
    Fault("ring labels and hidden rows are mixed, off by one",
          ("model/drafting_catchup::hidden_rows_on_the_device", "model/drafter_feed::a_shift_feeds_other_hidden_rows")),
    Fault("the ring misses the last accepted row of a step", ("model/drafter_feed::with_catchup_no_key_is_missing",)),
    Fault("a cap on rows belongs to another number of sequences",
          ("model/drafting_choice::how_many_are_kept", "model/batched_speculative::shares_and_budgets")),
    Fault("after a batched propose that failed its sequences draft again, and rows are there twice",
          ("model/batched_speculative::a_group_that_fails_drafts_again_in_the_next_step",
           "model/mtp_head_batch_faults::an_error_at_any_position_is_undone",
           "model/mtp_head_errors::an_error_between_drafts_is_undone")),
    Fault("a gate believes a window of one step", ("model/drafting_gate::a_short_window_replaces_no_rate",)),
    Fault("a switch that was set to 0 stays on",
          ("model/levers::switches_by_presence", "model/levers::switches_by_exactly_one")),
    Fault("phases lose bits at long positions", ("kernels/rope::long_positions",)),
    Fault("logits processors do not see drafted tokens", why="there are none: the target's own picks judge drafts"),
    Fault("noise of an NVFP4 LM head flips the target's picks",
          ("model/target::logits_and_hidden_are_those_of_the_formulas",),
          "the target's head is what its checkpoint has"),
    Fault("a projection in another format than the head's is left out without a word",
          ("model/known_faults::a_projection_in_another_format",
           "model/mtp_head_new::a_weight_that_cannot_be_quantised_is_named")),
)  # fmt: skip

AND_THEIR_KIND = (
    Fault("a verdict counts twice, or without drafts",
          ("model/mtp_head_rows::a_verdict_counts_once", "model/mtp_multi::a_verdict_counts_once")),
    Fault("a deferred draft is read from a module that did not make it",
          ("model/mtp_multi::the_deferred_id_is_in_the_module_that_drafted_last",)),
    Fault("caches of later modules lack rows that the text has moved past",
          ("model/mtp_multi::rows_over_random_accept_patterns",
           "model/mtp_multi_chain::drafts_are_those_of_the_definition"),
          "with the engine's own rule they do; with VERIFIED and refeed they do not"),
    Fault("a cap of 0 sequences makes a pool without blocks", ("model/levers::a_zero_that_counts_as_one_says_so",)),
    Fault("the key of a row that was dropped is taken for that of the last",
          ("model/mtp_head_rows::a_key_after_a_gap_is_that_of_the_last_row",
           "model/mtp_head_rows::a_first_row_that_is_dropped_leaves_no_key")),
    Fault("the head is wide as the target's experts in one place and as its FFN in another",
          ("model/mtp_head_forward::moe_width_of_the_target_is_not_the_heads",)),
    Fault("a deferred draft is read that nobody left", ("model/mtp_head_errors::a_deferred_draft",)),
    Fault("a graph is replayed for another number of drafts or sequences, another arena, or tables of another width",
          ("model/mtp_head_graph_batch::mutants_differ",
           "model/mtp_head_graph_batch::a_key_without_the_width_of_tables",
           "model/mtp_head_graph_batch::a_key_without_the_arena",
           "model/mtp_head_graph::a_graph_keyed_by_the_number_of_drafts_alone_works_in_another_arena")),
    Fault("a capture that gives no graph counts as a run, and the ids are those of the last propose",
          ("model/mtp_head_graph::without_a_graph_all_is_done_launch_by_launch",
           "model/mtp_head_graph::mutants_differ")),
    Fault("a replay has the block table of the capture",
          ("model/mtp_head_graph::every_form_drafts_as_without_graphs",
           "model/mtp_head_graph_batch::tables_of_several_widths")),
    Fault("a propose that fails at its first draft keeps the count of the one before",
          ("model/mtp_head_batch_faults::an_error_at_any_position_is_undone",
           "model/mtp_head_graph_batch::an_error_is_undone_at_the_first_run_the_capture_and_a_replay",
           "model/mtp_head_batch_faults::drafts_are_counted_as_their_rows_are_written")),
)  # fmt: skip

MADE_ON_PURPOSE = (
    Fault("the norm of queries runs over rows of [Q | gate]",
          ("model/mtp_head_batch_faults::faults_show", "model/mtp_head_quant::a_fault_is_seen")),
    Fault("the codes of a byte of NVFP4 are swapped",
          ("model/mtp_head_quant::a_fault_is_seen", "model/dequant_mutants::mutant_is_caught")),
    Fault("a scale divides what it should multiply",
          ("model/mtp_head_quant::a_fault_is_seen", "model/dequant_mutants::mutant_is_caught")),
    Fault("an FP8 head has an FP8 cache", ("model/mtp_head_quant::large_values_need_a_bf16_pool",)),
    Fault("a batched GEMV is given more rows than it takes",
          ("model/mtp_head_batch_faults::a_tier_with_more_rows_than_it_takes_is_refused",)),
    Fault("slabs of metadata are 2048 bytes apart, however long the sequences",
          ("model/mtp_head_batch_faults::a_fixed_stride_is_refused_and_not_overrun",)),
    Fault("drafts are counted when all are made",
          ("model/mtp_head_batch_faults::drafts_are_counted_as_their_rows_are_written",)),
    Fault("a graph is kept under its number of sequences alone", ("model/mtp_head_graph_batch::mutants_differ",)),
)  # fmt: skip

FAULTS = ACCEPTANCE_AND_STATE + TOKEN_IDS + GRAMMAR + QUANTISED + THE_ENGINES_OWN + AND_THEIR_KIND + MADE_ON_PURPOSE


@cache
def functions(module: str) -> frozenset[str]:
    """Names of the tests of a module."""
    folder, _, name = module.partition("/")
    tree = ast.parse((TESTS / folder / f"test_{name}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what[:60])
def test_every_fault_has_its_test(fault: Fault) -> None:
    assert fault.tests or fault.why
    for test in fault.tests:
        module, _, name = test.partition("::")
        assert f"test_{name}" in functions(module), test


def test_no_fault_is_there_twice() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


# ---------------------------------------------------------------- tests that belong nowhere else


def pool(rig: Rig) -> Array:
    """Every byte of the head's cache, by block."""
    kv = rig.head.kv_cache
    return np.stack([np.stack(kv.read_block(0, block)) for block in range(8)])


def test_two_heads_share_no_block(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """One has blocks 7 and 3, the other 0 and 1; a propose of either writes its own and nothing else."""
    first, second = make_rig(gpu, rng), make_rig(gpu, rng)
    taken = second.head.kv_cache.alloc_blocks(8)
    a, b = first.state(), second.state()
    for block in (7, 3):
        second.head.kv_cache.free_blocks([taken[block]])
        rows = 16 if block == 7 else 1
        second.feed(
            b, [1] * (rows + 1), rng.standard_normal((rows, 64)), len(b.block_table) * 16, len(b.block_table) * 16 + 1
        )
    first.feed(a, [1] * 18, rng.standard_normal((17, 64)))
    assert (a.block_table, b.block_table) == ([0, 1], [taken[7], taken[3]])
    before = pool(first), pool(second)
    hidden = a_hidden(first, rng)
    first.propose(a, 5, hidden, 30, 2)
    changed = np.flatnonzero((pool(first) != before[0]).any(axis=(1, 2)))
    assert (changed.tolist(), pool(second).tobytes()) == ([1], before[1].tobytes())
    before = pool(first), before[1]
    second.propose(b, 5, hidden, 30, 2)
    changed = np.flatnonzero((pool(second) != before[1]).any(axis=(1, 2)))
    assert (changed.tolist(), pool(first).tobytes()) == ([taken[3]], before[0].tobytes())


def test_freed_blocks_are_written_by_their_new_owner_alone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, hidden = make_rig(gpu, rng), rng.standard_normal((40, 64))
    ended, living = rig.state(), rig.state()
    rig.feed(ended, [1] * 34, hidden)
    rig.feed(living, [2] * 5, hidden)
    freed = list(ended.block_table)
    rig.head.free_state(gpu, ended)
    before = pool(rig)
    for _ in range(3):  # launch by launch, captured, replayed
        rig.propose(living, 5, hidden[0], 30, 3)
        assert (pool(rig)[freed] == before[freed]).all(), "nobody has them"
        rig.head.after_verify(0, living, rig.stream)
    rig.feed(living, [3] * 30, hidden, 4, 40)
    assert living.block_table[1:] != []
    assert set(living.block_table[1:]) <= {*freed, *range(4, 8)}
    untouched = [block for block in range(8) if block not in living.block_table]
    assert (pool(rig)[untouched] == before[untouched]).all()


def test_large_keys_and_values(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Values of some thousand, which a cache in FP8 with unit scales would cut to 448. Bound: the roundings of fc, the
    norm before the projection and V itself, 4 * 2^-9."""
    plain = make_rig(gpu, rng)
    arrays = dict(plain.arrays)
    arrays["v_proj"] = (arrays["v_proj"].astype(np.float32) * 4096).astype(arrays["v_proj"].dtype)
    arrays["k_norm"] = np.full_like(arrays["k_norm"], 1000)
    rig = make_rig(gpu, rng, arrays=arrays)
    oracle, hidden, state = Oracle.of(rig.config, rig.arrays), a_hidden(rig, rng), rig.state()
    rig.propose(state, 9, hidden, 5, 1)
    oracle.step(9, hidden.astype(np.float64), 5)
    for found, wanted in zip(rig.rows(state), (oracle.keys, oracle.values), strict=True):
        assert np.abs(wanted[0]).max() > 1000
        assert relative_l2(found[0], wanted[0]) < 4 * 2**-9


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_projection_in_another_format(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A BF16 projection in an NVFP4 head, which no constructor makes, is what its rows come from. The bound is that of
    test_mtp_head_quant for a pool in FP8. Where a kernel would be needed that the head has not, that is said."""
    rig, exact = make_form(gpu, rng, monkeypatch, Form(MtpQuantization.NVFP4, moe=True))
    setattr(rig.head, name, dense(gpu, rig.arrays[name]))
    exact[name] = rig.arrays[name].astype(np.float64)
    oracle, hidden, state = Oracle(rig.config, exact, kv_e4m3=True), a_hidden(rig, rng), rig.state()
    rig.propose(state, 9, hidden, 5, 1)
    oracle.step(9, hidden.astype(np.float64), 5)
    for found, wanted in zip(rig.rows(state), (oracle.keys, oracle.values), strict=True):
        assert relative_l2(found[0], wanted[0]) < 0.035
    rig.head.q_proj = dense(gpu, rig.arrays["q_proj"])
    with pytest.raises(NullHandleError, match="handle is 0"):
        rig.propose(rig.state(), 9, hidden, 5, 1)
