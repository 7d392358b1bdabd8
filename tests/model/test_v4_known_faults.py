# SPDX-License-Identifier: AGPL-3.0-only
"""Faults that DeepSeek-V4's drafters are known for, and the tests that keep each of them out, as in `known_faults`."""

from __future__ import annotations

import pytest

from tests.model.test_known_faults import Fault, functions

ATTENTION = (
    Fault("a BF16 draft cache goes through the attention of other models: no sink, no window, values not rotated",
          ("model/v4_attention::decode_gives_the_models_attention",
           "model/v4_attention::misreadings_of_the_model_are_far_off", "parity/v4::drafts")),
    Fault("the tail of a value is read as it was before its rotation",
          ("kernels/v4_attention_chain::misreadings_of_the_model_are_far_off",
           "kernels/spark_v4_paged_decode::queries_and_rows_shifted_alike_give_the_same"),
          "a latent row is stored once, rotated, and is key and value both"),
    Fault("a decode rotates the key's tail of an earlier token",
          ("kernels/spark_v4_qkv::a_query_and_a_row_of_the_same_numbers_are_the_same",
           "model/v4_attention::rows_have_the_same_bits_alone_and_together")),
    Fault("layers without a compressor have the rotation of those with one: another base, YaRN",
          ("model/v4_attention::misreadings_of_the_model_are_far_off",
           "model/config_deepseek_v4::both_forms_of_the_file")),
    Fault("sinks are read as BF16", ("model/v4_loader::loader", "model/v4_loader::mutant_is_caught")),
    Fault("norms are 1 + w", ("model/v4_attention::misreadings_of_the_model_are_far_off",
                              "model/v4_mtp_forward::misreadings_are_far_off")),
)  # fmt: skip
CONNECTIONS = (
    Fault("streams are mixed by comb, not by its transpose",
          ("kernels/hyper_connection::golden_numbers", "model/v4_hyper::misreadings_are_far_off", "parity/v4::target")),
    Fault("comb by sigmoid for softmax, post without its factor 2, rows before columns",
          ("kernels/hyper_connection::hc_pre", "model/v4_hyper::misreadings_are_far_off")),
    Fault("the draft is made of the collapsed hidden in equal streams",
          ("model/v4_mtp_forward::equal_streams_make_the_modes_agree_and_unequal_ones_differ",
           "model/v4_mtp_forward::later_drafts_go_on_from_the_heads_own", "parity/v4::the_modes_differ")),
    Fault("a layer leaves its last mixing to the next one, and a draft has none", (),
          "V4Layer.decode gives the streams after both connections; no later layer owes it anything"),
    Fault("fused connections across layers meet a draft head that has other dtypes", (),
          "connections are fused within a sublayer alone, streams are FP32 everywhere"),
    Fault("the streams that a drafter is given are a rank's share of the rows", (),
          "there is one device; model/v4_target::a_state_has_the_streams_of_every_token"),
)  # fmt: skip
WEIGHTS = (
    Fault("E8M0 is copied as a number",
          ("model/v4_loader::loader", "model/v4_loader::mutant_is_caught",
           "model/v4_ffn::misreadings_of_the_model_are_far_off")),
    Fault("the draft has no embedding and no LM head, since its loader skips the target's",
          ("model/v4_mtp_refusals::draft_tables_are_the_targets",)),
    Fault("the router is quantised, scores by sigmoid, or has no bias because of its name",
          ("model/v4_loader::loader", "model/v4_ffn::misreadings_of_the_model_are_far_off",
           "parity/v4_ffn::the_fp64_model_is_transformers")),
    Fault("the limit of SwiGLU is left out of the shared expert or of one path, or bounds the gate from below",
          ("model/v4_ffn::a_mutant_is_far_off", "parity/v4_ffn::the_rows_show_limits_and_choices")),
    Fault("a module is quantised by another scheme than its files, since its keys are not those of the layers",
          ("model/v4_loader::loader",), "the dtype of each tensor decides"),
    Fault("a DSpark drafter under the module's prefix is half loaded",
          ("model/v4_loader::loader", "model/v4_loader::mutant_is_caught")),
    Fault("the module of a small model is routed by a table, since its index is below num_hash_layers",
          ("model/v4_loader::a_module_with_a_hash_router_is_refused", "model/v4_loader::mutant_is_caught")),
    Fault("the choice of a hash router is that of another row's token",
          ("model/v4_ffn::a_table_routes_by_the_token_of_each_row", "model/v4_ffn::a_mutant_is_far_off")),
)  # fmt: skip
DRAFTING = (
    Fault("the embedding of position 0 is zeroed though ids are those of the next token",
          ("model/v4_mtp_forward::the_first_token_has_its_embedding",)),
    Fault("the block table runs out of the scratch that metadata has",
          ("model/mtp_meta::the_last_table_that_fits",
           "model/v4_mtp::the_last_block_whose_table_fits_in_scratch_and_one_more")),
    Fault("metadata of the draft before is read again", ("model/v4_mtp::metadata_of_a_row",)),
    Fault("a draft that one rank makes waits for the others", (), "there is no communication: a head has all experts"),
    Fault("several drafts are verified inexactly, and text changes",
          ("model/v4_decoding::the_tokens_are_those_of_the_plain_run",)),
    Fault("accepted counts come as a list where an array is wanted", (),
          "after_verify takes one integer; model/v4_mtp_refusals::wrong_arguments_change_nothing"),
    Fault("buffers that are borrowed from recurrent layers are too small",
          ("model/v4_mtp_refusals::an_arena_that_is_too_small_is_named",),
          "the parts of a layer own their scratch"),
    Fault("a rollback is one for all sequences", ("model/v4_mtp::sequences_do_not_touch_each_others_rows",)),
    Fault("an offload table is indexed by the layer behind the last", (),
          "weights are not offloaded; the module's cache has one layer, model/v4_mtp::the_pool"),
    Fault("a verdict drops the row of a verified token", ("model/v4_mtp::rows_over_random_accept_patterns",)),
    Fault("the pool has blocks for one sequence, and layers that nothing uses", ("model/v4_mtp::the_pool",)),
    Fault("a later draft's hidden row is written before it is read",
          ("model/v4_mtp_forward::later_drafts_go_on_from_the_heads_own",)),
    Fault("a draft that fails keeps the block that it took, and takes another the next time",
          ("model/v4_mtp_refusals::a_propose_that_fails_gives_its_blocks_back",)),
    Fault("metadata lie elsewhere than kernels read them",
          ("model/v4_mtp::the_engines_addresses", "model/v4_mtp::metadata_of_a_row")),
)  # fmt: skip
FAULTS = ATTENTION + CONNECTIONS + WEIGHTS + DRAFTING


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what[:60])
def test_every_fault_has_its_test(fault: Fault) -> None:
    assert fault.tests or fault.why
    for test in fault.tests:
        module, _, name = test.partition("::")
        assert f"test_{name}" in functions(module), test


def test_no_fault_is_there_twice() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
