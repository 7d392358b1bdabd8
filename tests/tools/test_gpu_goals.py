# SPDX-License-Identifier: AGPL-3.0-only
"""The goals of the GPU suite, computed from rows as the programs make them: each bound, from both sides."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest

from spark_py.bench.run import BenchRow, _numbers
from spark_py.bench.timing import Bandwidth, ProposeTimes, Times
from tools.beside_torch import DEPENDENT, ORDINARY, row_of
from tools.gpu_benchmarks import BESIDE, QUIET
from tools.gpu_goals import BESIDE_TORCH, DRAFTS, HEADS, goals_of, render_goals

pytestmark = pytest.mark.host_only("about numbers that were measured elsewhere")

BANDWIDTH = Bandwidth(4e12, "a sum")
SHAPES = (
    (17408, 5120), (12288, 5120), (5120, 17408), (5120, 6144), (5120, 10240), (4096, 4096), (1024, 5120),
    (100_000, 5120), (248_320, 5120),
)  # fmt: skip


def times(us: float) -> Times:
    return Times(us, us, us)


def product(form: str, n: int, k: int, of_bandwidth: float, kernel: str, m: int = 1) -> dict[str, Any]:
    nbytes = n * k * {"bf16": 2.0, "nvfp4": 0.5625, "fp8": 1.0}[form]
    us = BANDWIDTH.floor_us(nbytes) / of_bandwidth
    about = {"format": form, "kernel": kernel, "m": m, "n": n, "k": k}
    return row_of(
        about, {ORDINARY: times(us), "mv": times(2.0 * us), "linear": times(2.1 * us)}, nbytes, nbytes, 0.0, BANDWIDTH
    )


def draft(shape: str, mode: str, path: str, floors: float, host: float, by: str = "spark_py") -> dict[str, Any]:
    """A row as spark-py bench has it, `floors` times its floor of 250 us."""
    found = _numbers(ProposeTimes(times(250.0 * floors + host), times(250.0 * floors)), 1e9, BANDWIDTH)
    return asdict(BenchRow(shape, mode, by, path, 4096, **found))


def measured() -> dict[str, Any]:
    """The benchmarks of a run in which each line is reached, with rows beside them that must not count."""
    worse = 0.3
    products = [product("bf16", n, k, 0.95, "spark_gemv_rows") for n, k in SHAPES]
    products += [product("bf16", n, k, worse, "dense_gemv_bf16") for n, k in SHAPES]
    for form, kernel in (("nvfp4", "spark_w4a16_gemv_rows"), ("fp8", "spark_fp8_gemv_rows")):
        products += [product(form, n, k, worse, kernel, m=8) for n, k in SHAPES]
        products += [product(form, n, k, 0.9, kernel) for n, k in SHAPES]
    by_shape: dict[str, list[dict[str, Any]]] = {shape: [] for shape in DRAFTS}
    for shape, mode in (*HEADS, ("qwen3.6-27b", "fp8")):
        slower = 2.0 if mode == "fp8" else 1.0
        by_shape[shape] += [
            draft(shape, mode, "eager", 9.0, 0.0),
            draft(shape, mode, "graph", 1.05 * slower, 30.0),
            draft(shape, mode, "chain graph, 3 drafts", 3.12 * slower, 35.0),
            draft(shape, mode, "batched 8, graph", 1.2 * slower, 90.0),
        ]
    peers = [draft("qwen3.6-27b", "bf16", "compiled (max-autotune), CUDA graph", 1.3, 10.0, "torch")]
    peers += [draft("qwen3.6-27b", "bf16", "CUDA graph", 0.5, 10.0, "torch")]
    peers += [draft("qwen3.6-27b", "bf16", "graph", 1.06, 300.0)]
    us = {"launch_typed": 4.0, "cupy_raw_kernel": 1.0, "ctypes_new_objects_cast": 20.0, "ctypes_kept_objects": 3.8}
    launch = {name: {"median_us": value, "min_us": value, "max_us": value} for name, value in us.items()}
    attention = [
        row_of(
            {"kernel": kernel, "shape": shape}, {ORDINARY: times(us), "sdpa": times(60.0)}, nbytes, 1.0, 0.0, BANDWIDTH
        )
        for kernel, shape, us, nbytes in (
            ("paged_decode_attn", "1 x 32768 tokens, 24/4 heads of 256", 1500.0, 134.2e6),
            ("spark_paged_decode_split, _merge", "1 x 4096 tokens, 24/4 heads of 256", 12.0, 16.8e6),
            ("spark_paged_decode_split, _merge", "1 x 32768 tokens, 24/4 heads of 256", 40.0, 134.2e6),
        )
    ]
    found: dict[str, Any] = {DRAFTS[shape]: {"rows": rows} for shape, rows in by_shape.items()}
    found |= {"products": {"rows": products}, "kernels": {"rows": attention}, BESIDE_TORCH: {"rows": peers}}
    for values in found.values():
        values |= {"read_GB_per_s": 4000.0, "read_by": "a sum"}
    found["launch"] = launch | {"over_ctypes": 1.05, "device": "a GPU"}
    return {name: {"ok": True, "seconds": 1.0, "beside": "nothing", "values": values} for name, values in found.items()}


def states(benchmarks: dict[str, Any]) -> dict[int, str]:
    return {goal["line"]: goal["reached"] for goal in goals_of(json.loads(json.dumps(benchmarks)))}


def row_in(benchmarks: dict[str, Any], name: str, **wanted: Any) -> dict[str, Any]:
    rows = benchmarks[name]["values"]["rows"]
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    found: dict[str, Any] = row
    return found


def test_the_names_are_those_of_programs_that_run() -> None:
    benchmarks = measured()
    assert benchmarks.keys() <= {**QUIET, **BESIDE}.keys()
    assert {*DRAFTS.values(), "launch"} <= QUIET.keys()  # times of the host


def test_all_lines_reached() -> None:
    assert states(measured()) == dict.fromkeys(range(1, 12), "yes")


BOUNDS = [
    # line, benchmark, the row, its number, the number at the bound, and beyond it
    (1, "products", {"format": "bf16", "n": 17408, "k": 5120}, "us", "floor_us", 1 / 0.9, "up"),
    (1, "products", {"format": "bf16", "n": 248_320, "k": 5120}, "us", "floor_us", 1 / 0.9, "up"),
    (1, "products", {"format": "bf16", "n": 5120, "k": 6144}, "us", "floor_us", 1 / 0.88, "up"),
    (1, "products", {"format": "bf16", "n": 1024, "k": 5120}, "torch_us", "us", 0.98, "down"),
    (1, "products", {"format": "bf16", "n": 100_000, "k": 5120}, "torch_us", "us", 0.98, "down"),
    (2, "products", {"format": "nvfp4", "n": 100_000, "k": 5120, "m": 1}, "us", "floor_us", 1 / 0.8, "up"),
    (3, "products", {"format": "fp8", "n": 248_320, "k": 5120, "m": 1}, "us", "floor_us", 1 / 0.85, "up"),
    (4, DRAFTS["qwen3.6-27b"], {"mode": "bf16", "path": "graph"}, "us", "floor_us", 1.10, "up"),
    (4, BESIDE_TORCH, {"by": "spark_py"}, "us", "floor_us", 1.10, "up"),
    (5, DRAFTS["qwen3.6-27b"], {"mode": "fp8+nvfp4", "path": "graph"}, "us", "floor_us", 1.35, "up"),
    (5, DRAFTS["qwen3-next-80b"], {"mode": "nvfp4", "path": "graph"}, "us", "floor_us", 1.35, "up"),
    (6, DRAFTS["qwen3-next-80b"], {"mode": "bf16", "path": "graph"}, "us", "floor_us", 1.35, "up"),
    (7, DRAFTS["deepseek-v4-flash"], {"path": "graph"}, "us", "floor_us", 1.5, "up"),
    (11, "kernels", {"kernel": "spark_paged_decode_split, _merge", "shape": "1 x 32768 tokens, 24/4 heads of 256"},
     "us", "floor_us", 1 / 0.8, "up"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "wanted", "key", "of", "factor", "way"), BOUNDS)
def test_just_beyond_a_bound_is_no(
    line: int, name: str, wanted: dict[str, Any], key: str, of: str, factor: float, way: str
) -> None:
    benchmarks = measured()
    row = row_in(
        benchmarks, name, **({"kernel": "spark_gemv_rows"} if wanted.get("format") == "bf16" else {}), **wanted
    )
    step = 1.001 if way == "up" else 1 / 1.001
    row[key] = row[of] * factor / step
    assert states(benchmarks)[line] == "yes"
    row[key] = row[of] * factor * step
    assert states(benchmarks)[line] == "no"


@pytest.mark.parametrize(
    ("line", "name", "wanted", "key", "within", "beyond"),
    [
        (1, "products", {"kernel": "spark_gemv_rows", "n": 4096}, "us", 8.39 + 2.99, 8.39 + 3.01),
        (4, BESIDE_TORCH, {"path": "compiled (max-autotune), CUDA graph"}, "us", 265.1, 265.0),
        (8, DRAFTS["qwen3.6-27b"], {"mode": "bf16", "path": "graph"}, "host_us", 39.9, 40.0),
        (8, DRAFTS["deepseek-v4-flash"], {"path": "chain graph, 3 drafts"}, "host_us", 39.9, 40.0),
        (8, DRAFTS["qwen3-next-80b"], {"mode": "nvfp4", "path": "chain graph, 3 drafts"}, "us", 800.0, 801.0),
        (9, DRAFTS["qwen3.6-27b"], {"mode": "bf16", "path": "batched 8, graph"}, "us", 328.0, 328.2),
    ],
)
def test_numbers_of_two_rows(
    line: int, name: str, wanted: dict[str, Any], key: str, within: float, beyond: float
) -> None:
    for number, state in ((within, "yes"), (beyond, "no")):
        benchmarks = measured()
        row_in(benchmarks, name, **wanted)[key] = number
        found = states(benchmarks)
        assert found.pop(line) == state
        assert set(found.values()) == {"yes"}


def test_a_launch_is_held_against_the_quickest_ctypes() -> None:
    for us, state in ((4.36, "yes"), (4.38, "no")):  # of 3.8
        benchmarks = measured()
        benchmarks["launch"]["values"]["launch_typed"]["median_us"] = us
        assert states(benchmarks)[10] == state
    del benchmarks["launch"]["values"]["ctypes_kept_objects"]
    assert states(benchmarks)[10] == "not measured"


@pytest.mark.parametrize("name", [*measured()])
def test_what_was_not_measured_is_never_reached(name: str) -> None:
    """A benchmark that was left out, that ended without a result, and one of whose rows there is none."""
    whole = measured()
    missing = {line for line, state in states({k: v for k, v in whole.items() if k != name}).items() if state != "yes"}
    assert missing
    for instead in ({"ok": False, "message": "stopped after 180 s"}, {"ok": True, "values": {}}):
        found = states({**whole, name: instead})
        assert {line for line, state in found.items() if state == "not measured"} == missing
    if name == "launch":
        return
    for at, row in enumerate(whole[name]["values"]["rows"]):
        fewer = copy.deepcopy(whole)
        del fewer[name]["values"]["rows"][at]
        changed = {line for line, state in states(fewer).items() if state != "yes"}
        assert changed <= missing
        counts = row.get("m", 1) == 1 and row.get("path") not in ("eager", "CUDA graph")
        counts &= row.get("kernel") not in ("dense_gemv_bf16", "paged_decode_attn") and row.get("mode") != "fp8"
        counts &= not (row.get("format") in ("nvfp4", "fp8") and row["n"] not in (17408, 100_000, 248_320))
        counts &= row.get("shape") != "1 x 4096 tokens, 24/4 heads of 256"
        counts &= not (str(row.get("path")).startswith("batched") and (row["shape"], row["mode"]) != HEADS[0])
        assert bool(changed) == counts, row


def test_floors_stand_on_the_median_of_all_readings() -> None:
    """Not on that of the program whose row it is, nor on what the row itself says."""
    benchmarks = measured()
    values = benchmarks[DRAFTS["deepseek-v4-flash"]]["values"]
    row = row_in(benchmarks, DRAFTS["deepseek-v4-flash"], path="graph")
    row["us"] = 250.0 * 1.499
    values["read_GB_per_s"], row["floor_us"], row["of_floor"] = 8000.0, 1.0, 9.0
    assert states(benchmarks)[7] == "yes"
    for name, each in benchmarks.items():
        if name != "launch":
            each["values"]["read_GB_per_s"] = 4010.0
    assert states(benchmarks)[7] == "no"
    for each in benchmarks.values():
        each["values"].pop("read_GB_per_s", None)
    assert {line for line, state in states(benchmarks).items() if state == "yes"} == {8, 9, 10}


def test_a_miss_shows_beside_what_was_not_measured() -> None:
    benchmarks = measured()
    del benchmarks[BESIDE_TORCH]
    row_in(benchmarks, DRAFTS["qwen3.6-27b"], mode="bf16", path="graph")["us"] = 280.0
    assert states(benchmarks)[4] == "no"


def test_the_tables() -> None:
    benchmarks = measured()
    benchmarks["products"]["values"]["read_GB_per_s"] = 4123.4
    benchmarks["kernels"]["values"]["read_GB_per_s"] = 3990.0
    row_in(benchmarks, "products", kernel="spark_gemv_rows", n=12288)["us"] *= 1.2
    benchmarks["products"]["values"]["fp32_read_GB_per_s"] = 4444.4
    text = "\n".join(render_goals(goals_of(benchmarks), benchmarks))
    assert "A sum of FP32 reads 4444 GB/s." in text
    assert "Reached 10 of 11, missed 1, not measured 0." in text
    assert "0.792 of the read bandwidth (12288 x 5120, spark_gemv_rows, ordinary launches)" in text
    assert "at 4000 GB/s, the median of what 6 programs of the run read, 3990 to 4123, each before" in text
    assert "| 10 | launch_typed, 10 changing arguments | times the quickest ctypes | 1.053 | <= 1.15 | yes |" in text
    empty = "\n".join(render_goals(goals_of({}), {}))
    assert "Reached 0 of 11, missed 0, not measured 11." in empty
    assert "yes" not in empty


def test_a_product_is_that_of_the_quickest_kernel() -> None:
    benchmarks = measured()
    slow = dict(row_in(benchmarks, "products", kernel="spark_gemv_rows", n=12288))
    rows = benchmarks["products"]["values"]["rows"]
    rows.insert(0, slow | {"kernel": "another", "us": slow["us"] * 2})
    assert states(benchmarks)[1] == "yes"
    rows[:] = [row for row in rows if row["n"] != 12288 or row["kernel"] == "another"]
    assert states(benchmarks)[1] == "no"


def test_a_wrong_result_has_no_row() -> None:
    with pytest.raises(ValueError, match="away from torch's"):
        row_of({}, {ORDINARY: times(1.0), "mv": times(1.0)}, 1.0, 1.0, float("nan"), BANDWIDTH)


def test_the_quicker_kind_of_launches_counts_and_both_are_shown() -> None:
    both = {ORDINARY: times(3.0), DEPENDENT: times(2.0), "mv": times(4.0)}
    row = row_of({}, both, 1.0, 1.0, 0.0, BANDWIDTH)
    assert (row["us"], row["launches"], row["both_us"]) == (2.0, DEPENDENT, "3.00 / 2.00")
    assert (row["torch_us"], row["torch_by"]) == (4.0, "mv")
    row = row_of({}, {**both, DEPENDENT: times(3.5)}, 1.0, 1.0, 0.0, BANDWIDTH)
    assert (row["us"], row["launches"]) == (3.0, ORDINARY)
