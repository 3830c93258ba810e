"""Every kernel compiles for GPUs that this machine does not have. Its machine code does not exceed the GPU's resources.

The compiler runs in a separate process, without TRITON_INTERPRET and with its own settings: see
compile_ahead_of_time.py. With BATCH_MANAGER_ALL_CASES=1, all cases are compiled for each GPU, as campaign T18 does. Run
so with `-s` to see the table that triton_kernels/README.md records.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batch_manager.attention.block_sizes import gpu_block_sizes

PROGRAM = Path(__file__).parent / "compile_ahead_of_time.py"
GPUS = ["sm_80", "sm_90", "sm_100", "gfx942"]
FINDINGS = ["variants", "refusals", "blocks"]
KERNELS = {
    "_activation_kernel", "_ban_ngrams_kernel", "_ban_words_kernel", "_beam_block_kernel", "_beam_group_kernel",
    "_beam_row_kernel", "_context_kernel", "_decode_kernel", "_deterministic_linear_kernel", "_fused_linear_kernel",
    "_gated_activation_kernel", "_layer_norm_kernel", "_lora_expand_add_kernel", "_lora_shrink_kernel",
    "_match_stop_words_kernel", "_merge_kernel", "_moe_grouped_gemm_kernel", "_philox_kernel",
    "_prepare_step_kernel", "_quantised_linear_kernel", "_rms_norm_kernel", "_rope_kv_append_kernel",
    "_sample_digit_kernel", "_sample_token_kernel", "_sample_block_kernel",
    "_sample_piece_kernel", "_token_bitmask_kernel", "_token_penalties_kernel",
}

# Known and small; anything more is a regression.
KNOWN_STACK_BYTES = {("sm_100", "decode D256 softcap window"): 8, ("sm_90", "decode D256 G2 norms window"): 8,
                     ("sm_100", "decode D256 G2 norms window"): 8,
                     ("sm_90", "decode D128 G4 fp8"): 8,
                     ("sm_80", "quantised Q4_0 256 rows"): 8,
                     ("sm_90", "context D128 slopes sink logits fixed parts"): 8}


@pytest.fixture(scope="module")
def compiled():
    """Compile all kernels in one process. Return {gpu: records}, with a record for each compiled kernel.

    Three further keys have one record each: "variants", {kernel: number of variants}, "refusals", {wrapper: error}, and
    "blocks", {"found": results of `shared_memory_of_blocks`}.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"          # the default changes between versions of triton
    all_cases = ["--all"] if os.environ.get("BATCH_MANAGER_ALL_CASES") == "1" else []
    done = subprocess.run([sys.executable, PROGRAM, *all_cases, *GPUS], env=environment, capture_output=True, text=True,
                          timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    print_table([record for record in records if record["gpu"] in GPUS])
    return {gpu: [record for record in records if record["gpu"] == gpu] for gpu in [*GPUS, *FINDINGS]}


def print_table(records):
    print("\n| GPU | case | kernel | warps | stages | registers | shared B | stack B | spills |")
    print("|---|---|---|---|---|---|---|---|---|")
    for record in records:
        columns = "gpu", "case", "kernel", "warps", "stages", "registers", "shared_bytes", "stack_bytes", "spills"
        print("| " + " | ".join(str(record[column]) for column in columns) + " |")


def of_kernel(records, kernel):
    found = [record for record in records if record["kernel"] == kernel]
    assert found
    return found


@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles_and_fits_shared_memory(compiled, gpu):
    assert {record["kernel"] for record in compiled[gpu]} == KERNELS
    assert [record for record in compiled[gpu] if record["shared_bytes"] > record["shared_limit_bytes"]] == []


@pytest.mark.parametrize("gpu", GPUS)
def test_nothing_spills(compiled, gpu):
    wrong = [
        record for record in compiled[gpu]
        if record["spills"] or record["stack_bytes"] > KNOWN_STACK_BYTES.get((gpu, record["case"]), 0)
    ]
    assert wrong == []


def test_attention_compiles_with_each_block_size_and_takes_the_shared_memory_that_is_computed(compiled):
    # batch_manager/attention/block_sizes.py refuses a block size by the computed number.
    (found,) = (record["found"] for record in compiled["blocks"])
    labels = [label.rsplit(" ", 1)[0] for label, *_ in found]
    sizes = [size for size in gpu_block_sizes() if size != 64]
    assert labels == [f"{kernel} D128 {size}" for kernel in ("decode", "context") for size in sizes] + [
        "decode D256 128", "decode D256 256"]
    limit = compiled["sm_90"][0]["shared_limit_bytes"]
    for label, computed, taken in found:
        assert taken <= computed, label
        if label.startswith("decode"):
            assert computed - 512 <= taken and (taken <= limit) == (computed <= limit) == ("D256 256" not in label)


def test_decode_loads_pages_in_the_widest_pieces(compiled):
    for record in of_kernel(compiled["sm_90"], "_decode_kernel"):
        is_fp8 = "fp8" in record["case"]                   # values are then transposed entry by entry
        assert record["LDGSTS.128"] > 0 and (record["LDGSTS.narrower"] == 0 or is_fp8), record
        assert (record["e4m3x2"] > 0) == is_fp8, record


def test_decode_keeps_several_pages_in_flight(compiled):
    # Keys and values of a page, for each stage but the current one. Pages with heads of 256 entries leave room for two.
    for record in of_kernel(compiled["sm_90"], "_decode_kernel"):
        head_size = int(re.search(r"D(\d+)", record["case"])[1])
        stages = 2 if head_size == 256 else 4
        assert record["stages"] == stages and record["shared_bytes"] >= (stages - 1) * 2 * 64 * head_size * (
            1 if "fp8" in record["case"] else 2)


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
def test_as_many_decode_programs_as_share_a_multiprocessor_fit_its_registers(compiled, gpu):
    # `decode_settings` counts programs by shared memory and warps, and the work list is split for that number.
    for record in of_kernel(compiled[gpu], "_decode_kernel"):
        shared_bytes = record["shared_bytes"] * (2 if "fp8" in record["case"] else 1)      # of pages in bfloat16
        programs = min(record["shared_limit_bytes"] // shared_bytes, 16 // record["warps"])
        registers = -(-record["registers"] // 8) * 8
        assert programs * record["warps"] * 32 * registers <= 65_536, record


def test_the_counters_of_parts_are_increased_between_barriers_and_order_memory(compiled):
    for record in of_kernel(compiled["sm_90"], "_decode_kernel"):
        assert record["counted after a barrier"] is (True if "merges" in record["case"] else None), record


def test_adapters_load_pages_in_the_widest_pieces_and_use_the_matrix_units(compiled):
    for kernel in ("_lora_shrink_kernel", "_lora_expand_add_kernel"):
        for record in of_kernel(compiled["sm_90"], kernel):
            if record["case"] not in ("lora 100", "lora qkv 135M float32"):
                assert record["HMMA"] > 0 and record["LDG.narrow"] == record["LDGSTS.narrower"] == 0, record
                assert record["LDGSTS.128"] > 0 or kernel != "_lora_shrink_kernel", record    # B is a single tile


def test_context_attention_uses_the_matrix_units(compiled):
    # A tile of UNIFORM_ROWS is too small for the instructions of a warp group.
    high = [record for record in of_kernel(compiled["sm_90"], "_context_kernel") if "fixed parts" not in record["case"]]
    assert all(record["HGMMA"] > 0 for record in high)
    assert all(record["MFMA"] > 0 for record in of_kernel(compiled["gfx942"], "_context_kernel"))
    assert all(record["MFMA"] > 0 for record in of_kernel(compiled["gfx942"], "_decode_kernel"))


def test_the_scale_of_the_softmax_is_part_of_the_exponents_multiply_add(compiled):
    """The loop over keys multiplies the accumulated values, and the maximum of each row's scores; not the scores."""
    records = of_kernel(compiled["sm_90"], "_decode_kernel") + of_kernel(compiled["sm_90"], "_context_kernel")
    plain = [record for record in records if not re.search("softcap|slopes|D256", record["case"])]
    assert len(plain) > 12
    for record in plain:
        head_size = 1 << (int(re.search(r"D(\d+)", record["case"])[1]) - 1).bit_length()
        is_tile = record["kernel"] == "_context_kernel" and "fixed parts" not in record["case"]
        values = (128 if is_tile else 16) * head_size // (32 * record["warps"])           # per thread
        assert record["FMUL in loops"]
        assert all(values <= count <= values + 4 for count in record["FMUL in loops"]), record


def test_deterministic_products_use_the_matrix_units(compiled):
    narrow = [record for record in of_kernel(compiled["sm_90"], "_deterministic_linear_kernel")
              if "float32" not in record["case"]]
    assert all(record["HGMMA"] > 0 for record in narrow)
    assert all(record["MFMA"] > 0 for record in of_kernel(compiled["gfx942"], "_deterministic_linear_kernel"))


def test_fused_products_load_the_weight_in_the_widest_pieces_several_ahead(compiled):
    for record in of_kernel(compiled["sm_90"], "_fused_linear_kernel"):
        if "rows" in record["case"] or record["case"] == "fused 100":
            continue          # tiles of rows are tested below; rows of 100 do not begin at multiples of 16 bytes
        # A piece: 512 bytes of 16 rows of x and of some rows of the weight, 16 bytes per thread. Norm vectors are
        # narrower.
        rows = 80 if "head" in record["case"] else 48 if "gate up" in record["case"] else 32
        assert record["LDGSTS.128"] >= rows * 512 // (16 * 128) * (record["stages"] - 1), record
        norms = "GPT-2" not in record["case"] or "expand" in record["case"]
        assert record["LDGSTS.narrower"] <= 2 * record["stages"] * norms, record
        in_flight_bytes = (record["stages"] - 1) * (rows - 16) * 512
        assert in_flight_bytes >= 24 * 1024, record


def test_fused_products_of_many_rows_load_several_pieces_ahead(compiled):
    found = [record for record in of_kernel(compiled["sm_90"], "_fused_linear_kernel")
             if re.search("[64] rows", record["case"])]
    assert len(found) == 9
    for record in found:
        # A piece: 128 bytes of 64 rows of x and of at least 32 rows of the weight.
        assert record["LDGSTS.narrower"] == 0 and record["LDGSTS.128"] >= 6 * (record["stages"] - 1), record
        assert (record["stages"] - 1) * (64 + 32) * 128 >= 36 * 1024 and record["shared_bytes"] <= 100 * 1024, record


def test_a_norm_that_scales_the_product_is_computed_once_for_all_warps(compiled):
    """The loop multiplies each entry of x by the weight of the norm, and half of the entries by themselves.

    Each thread has its share of the entries. In each warp, all entries would be four times as many multiplications.
    """
    found = [record for record in of_kernel(compiled["sm_90"], "_fused_linear_kernel")
             if not re.search("GPT-2|100|float", record["case"])]
    assert len(found) == 11
    for record in found:
        rows, entries = (64, 64) if "rows" in record["case"] else (16, 256)
        assert record["FMUL in loops"] == [rows * entries // 128 * 3 // 2], record


def test_fused_products_use_the_matrix_units(compiled):
    for record in of_kernel(compiled["sm_90"], "_fused_linear_kernel"):
        unit = "HGMMA" if "rows" in record["case"] else "HMMA"           # tiles are large enough for a warp group
        assert record[unit] > 0 or "float32" in record["case"]
    assert all(record["MFMA"] > 0 for record in of_kernel(compiled["gfx942"], "_fused_linear_kernel"))


def test_quantised_products_use_the_matrix_units_and_load_levels_and_rows_in_wide_pieces_ahead(compiled):
    for record in of_kernel(compiled["sm_90"], "_quantised_linear_kernel"):
        unit = "HGMMA" if record["warps"] == 4 else "HMMA"               # a warp has 16 outputs
        assert record[unit] > 0 and record["stages"] >= 4 and record["LDGSTS.128"] >= record["stages"], record
        assert record["LDG.narrow"] <= 16, record                        # scales and zero points of a step
    assert all(record["MFMA"] > 0 for record in of_kernel(compiled["gfx942"], "_quantised_linear_kernel"))


def test_an_unknown_kind_of_activation_is_refused_in_the_same_words_as_in_the_interpreter(compiled):
    (refusals,) = compiled["refusals"]
    text = "unknown activation 'swish'; expected one of gelu, gelu_new, silu, relu"
    assert refusals == {"gpu": "refusals", "activation": text, "fused_linear": text, "gated_activation": text}


def test_where_an_index_tensor_begins_does_not_compile_a_kernel_again(compiled):
    # A step slices its index tensors at any row. A new variant would stall the first step that needs it.
    # Parts are merged in two variants: for generation rows, and for contexts.
    (variants,) = compiled["variants"]
    assert variants == {
        "gpu": "variants", "_decode_kernel": 1, "_merge_kernel": 2, "_context_kernel": 1, "_rope_kv_append_kernel": 1,
        "_prepare_step_kernel": 1, "_sample_piece_kernel": 1, "_sample_digit_kernel": 1, "_sample_block_kernel": 1,
        "_sample_token_kernel": 1,
        "_token_penalties_kernel": 1, "_ban_ngrams_kernel": 1, "_ban_words_kernel": 1, "_match_stop_words_kernel": 1,
        "_lora_shrink_kernel": 1, "_lora_expand_add_kernel": 1,
        "_deterministic_linear_kernel": 1, "_fused_linear_kernel": 2,        # for few rows, and for tiles of rows
        "_quantised_linear_kernel": 3,                   # tiles of 16, 64 and 128 rows, for matrices of any size
        "_beam_block_kernel": 1, "_beam_row_kernel": 1, "_beam_group_kernel": 1,
    }
