# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py bench` on the CPU: what it counts, what it refuses, what it writes. No test looks at a time."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from spark_py.bench import run, torch_peer
from spark_py.bench.plot import draw
from spark_py.bench.random_weights import RandomWeights
from spark_py.bench.rigs import BenchPath, Rig, measure_path, open_rig
from spark_py.bench.run import BenchPlan, run_bench
from spark_py.bench.shapes import NAMES, BenchShape, Reads, bytes_read, shape_of
from spark_py.bench.timing import (
    Bandwidth,
    ColdCache,
    ProposeTimes,
    Times,
    count_work,
    graph_of,
    measure,
    measure_queued,
    quietest,
)
from spark_py.bench.v4_parts import V4_SHAPES, v4_rows
from spark_py.cli.demo import DEMO_MODELS
from spark_py.cli.main import cli
from spark_py.model.config import ModelConfig
from spark_py.model.weight_map import Fp8DenseWeight, QuantizedWeight
from spark_py.runtime import GpuBackend, open_backend
from spark_py.runtime.errors import InvalidArgumentError, UnsupportedError

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
SMALL = ("--backend", "host", "--context", "20", "--repeats", "1")


def small(family: str, *modes: str) -> BenchShape:
    """The sizes of a demo checkpoint."""
    return BenchShape(f"small {family}", ModelConfig.from_file(DEMO_MODELS / family), modes, 20)


def bench(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *words])


@pytest.fixture
def host() -> Iterator[GpuBackend]:
    with open_backend("host", on_leak="raise") as gpu:
        yield gpu


# ---------------------------------------------------------------- what is counted


def test_bytes_of_a_dense_draft() -> None:
    """Counted by hand: fc, query with its gate, key, value, output, three of the FFN, LM head; two sides of KV rows."""
    h, q, kv, inter, vocab = 5120, 24 * 256, 4 * 256, 17408, 100_000
    weights = 2 * h * h + 2 * q * h + 2 * kv * h + h * q + 3 * h * inter
    found = bytes_read(shape_of("qwen3.6-27b"), "bf16", 4096)
    assert found.rows(1) == 2 * (weights + vocab * h) + 2 * 2 * kv * 4096
    assert found.rows(8) - found.rows(1) == 7 * 2 * 2 * kv * 4096
    assert bytes_read(shape_of("qwen3.6-27b"), "fp8", 4096).rows(1) == found.rows(1) - weights
    packed_head = found.rows(1) - weights - (2 - 9 / 16) * vocab * h
    assert bytes_read(shape_of("qwen3.6-27b"), "fp8+nvfp4", 4096).rows(1) == packed_head


def test_bytes_are_those_of_the_tensors(host: GpuBackend) -> None:
    """All that a rig's weights hold, but norms and the experts that nobody chooses."""
    shape = shape_of("demo")
    with open_rig(host, shape, "bf16", 20, 2) as rig:
        w = rig.weights
        assert w is not None
        assert w.shared_expert is not None
        one: Any = w.experts[0]
        tensors = [w.fc, w.q_proj, w.k_proj, w.v_proj, w.o_proj, w.moe_gate, rig.lm_head]
        tensors += [w.shared_expert.gate_proj, w.shared_expert.up_proj, w.shared_expert.down_proj]
        expert = sum(2 * int(np.prod(t.shape)) for t in (one.gate_proj, one.up_proj, one.down_proj))
        found = bytes_read(shape, "bf16", 20)
        assert found.shared == sum(2 * int(np.prod(tensor.shape)) for tensor in tensors)  # type: ignore[union-attr]
        assert (found.expert, found.experts, found.top_k) == (expert, len(w.experts), 2)


def test_fp8_over_a_packed_lm_head(host: GpuBackend) -> None:
    with open_rig(host, shape_of("demo"), "fp8+nvfp4", 20, 2) as rig:
        head: Any = rig.head
        kinds = {type(weight) for weight in (head.fc, head.q_proj, head.k_proj, head.o_proj)}
        assert (kinds, type(head.lm_head)) == ({Fp8DenseWeight}, QuantizedWeight)


def test_experts_that_several_rows_choose_are_read_once() -> None:
    reads = Reads(shared=100.0, own=1.0, expert=10.0, experts=4, top_k=2)
    assert reads.rows(1) == 100 + 2 * 10 + 1
    assert reads.rows(2) == 100 + 3 * 10 + 2  # 4 * (1 - 1/4)
    assert reads.rows(1000) == pytest.approx(100 + 4 * 10 + 1000)


@pytest.mark.parametrize("name", NAMES)
def test_each_shape_has_numbers_in_each_of_its_modes(name: str) -> None:
    shape = shape_of(name)
    sizes = [bytes_read(shape, mode, shape.context).rows(1) for mode in shape.modes]
    assert sizes == sorted(sizes, reverse=True)
    assert shape.modes[0] == "bf16"


def test_a_fraction_of_the_floor() -> None:
    wall, device = Times(30.0, 29.0, 33.0), Times(2.0, 1.9, 2.2)
    numbers = run._numbers(ProposeTimes(wall, device), 4e6, Bandwidth(4e12, "a sum"))
    assert numbers == {
        "MB": 4.0, "us": 2.0, "min_us": 1.9, "max_us": 2.2, "wall_us": 30.0, "host_us": 28.0, "floor_us": 1.0,
        "of_floor": 0.5,
    }  # fmt: skip
    numbers = run._numbers(ProposeTimes(wall), 4e6, None)
    assert (numbers["us"], numbers["wall_us"], numbers["host_us"], numbers["of_floor"]) == (30.0, 30.0, None, None)


def test_calls_that_warm_up_do_not_count_and_each_is_prepared() -> None:
    calls = list[str]()
    times = measure(lambda: calls.append("call"), 2, lambda: calls.append("before"))
    assert calls == ["before", "call"] * 5
    assert times.min_us <= times.us <= times.max_us


def test_the_quietest_of_five_rounds_counts_on_a_gpu(host: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds() -> Iterator[Times]:
        yield from (Times(us, us - 1.0, us + 1.0) for us in (90.0, 25.0, 24.0, 80.0, 26.0, 1.0))

    each = rounds()
    assert quietest(host, lambda: next(each)).us == 90.0
    each = rounds()
    monkeypatch.setattr(type(host), "name", "cuda")
    assert quietest(host, lambda: next(each)) == Times(24.0, 23.0, 25.0)


def test_nothing_is_emptied_where_no_gpu_is(host: GpuBackend) -> None:
    make = RandomWeights(host, small=True)
    live = host.live_bytes()
    ColdCache(host, make)(host.default_stream())
    assert host.live_bytes() == live
    make.release()


# ---------------------------------------------------------------- rigs


def drafts_of(rig: Rig, drafts: int, at: int, graph: bool) -> tuple[list[int], Any]:
    with rig.way(BenchPath("", drafts, 1, graph)):
        return rig.propose(drafts, at), rig.logits()


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        (shape_of("demo"), "nvfp4"),
        (shape_of("demo"), "fp8+nvfp4"),
        (small("minimax_m2", "bf16"), "bf16"),
        (small("deepseek_v4", "bf16", "mxfp4"), "mxfp4"),
        (small("deepseek_v4", "bf16", "mxfp4"), "bf16"),
    ],
)
def test_each_path_drafts_the_same_of_the_same_inputs(host: GpuBackend, shape: BenchShape, mode: str) -> None:
    with open_rig(host, shape, mode, 20, 2, keep_logits=True) as rig:
        alone = [drafts_of(rig, 2, at, False) for at in (0, 1)]
        for at in (0, 1, 0, 1):  # the second time is captured, then it replays
            ids, logits = drafts_of(rig, 2, at, True)
            assert ids == alone[at][0]
            np.testing.assert_array_equal(logits, alone[at][1])
        assert not np.array_equal(alone[0][1], alone[1][1])
        assert np.isfinite(alone[0][1]).all()
        assert [state.seq_len for state in rig.states] == [20, 20]


def test_inputs_take_turns(host: GpuBackend) -> None:
    with open_rig(host, shape_of("demo"), "bf16", 20, 3, keep_logits=True) as rig:
        seen = []
        for _ in range(8):
            rig.propose(1)
            seen.append(rig.logits().tobytes())
        assert len(set(seen)) == 8
        pairs = rig.propose_batch(3, 2)
        assert [len(each) for each in pairs] == [2, 2, 2]


def test_launches_are_counted(host: GpuBackend) -> None:
    with open_rig(host, shape_of("demo"), "bf16", 20, 2) as rig:
        eager, graph = (BenchPath("", 2, 1, way) for way in (False, True))
        with rig.way(eager):
            each = count_work(host, rig.action(eager))
        captured = count_work(host, rig.action(graph))
    assert each.host_calls > each.kernels > 10
    # The inputs come by a kernel, an id by that of the LM head, which copies the next embedding.
    assert captured.kernels == each.kernels + 1 - 2
    assert captured.host_calls < 6


def test_what_is_timed_on_the_device_is_the_graph_alone(host: GpuBackend) -> None:
    path = BenchPath("", 2, 1, True)
    with open_rig(host, shape_of("demo"), "bf16", 20, 2) as rig:
        assert graph_of(host, rig.action(path), rig.stream) is None  # the first call is not captured
        graph = graph_of(host, rig.action(path), rig.stream)
        assert graph is not None
        wanted = rig.logits()
        host.memset(rig.ctx.buffers.logits(), 0xFF, 2 * rig.head.draft_vocab)
        with host.trace() as trace:
            graph()
        assert trace.steps == []  # replays of a trace are not traced
        np.testing.assert_array_equal(rig.logits(), wanted)
        times = measure_queued(host, rig.stream, graph, 2, rig.cold)
        assert 0.0 < times.min_us <= times.us <= times.max_us
        counted, both = measure_path(rig, BenchPath("", 1, 1, False), lambda: rig.propose(1), 1)
        assert both.device is None
        assert counted.kernels > 10


def test_a_mode_that_a_rig_has_not(host: GpuBackend) -> None:
    live = host.live_bytes()
    with pytest.raises(InvalidArgumentError, match=r"qwen3\.6-27b has bf16, fp8, fp8\+nvfp4: a head with a dense FFN"):
        open_rig(host, shape_of("qwen3.6-27b"), "nvfp4", 20).__enter__()
    assert host.live_bytes() == live


def test_the_parts_of_a_v4_draft(host: GpuBackend) -> None:
    rows = list(v4_rows(host, V4_SHAPES["tiny"], 2, 1, Bandwidth(1e12, "a sum")))
    assert [row["part"] for row in rows] == [
        "combiner", "attention", "mixture", "connections", "LM head", "draft"
    ]  # fmt: skip
    assert rows[-1]["floor_us"] == pytest.approx(sum(row["floor_us"] for row in rows[:-1]), abs=0.3)


# ---------------------------------------------------------------- the command


def test_the_table() -> None:
    done = bench(*SMALL, "--path", "graph", "--path", "batched", "--batch", "2", "--mode", "fp8")
    assert done.exit_code == 0, done.stderr
    for word in ("demo", "fp8", "graph", "batched 2", "kernels", "no floor"):
        assert word in done.stdout
    assert "floor" not in done.stdout.partition("no floor")[0]
    headers = next(line for line in done.stdout.splitlines() if "kernels" in line)
    assert headers.split()[-4:] == ["propose", "host", "kernels", "calls"]
    assert "demo fp8, spark_py, graph: " in done.stderr


def test_json_on_stdout_and_in_a_file(tmp_path: Path) -> None:
    words = [*SMALL, "--path", "eager", "--mode", "bf16"]
    on_stdout = json.loads(bench(*words, "--json").stdout)
    done = bench(*words, "--json", str(tmp_path / "found.json"))
    in_file = json.loads((tmp_path / "found.json").read_text())
    assert "demo" in done.stdout
    for found in (on_stdout, in_file):
        (row,) = found["rows"]
        assert (row["shape"], row["mode"], row["by"], row["path"], row["context"]) == (
            "demo", "bf16", "spark_py", "eager", 20,
        )  # fmt: skip
        assert row["min_us"] <= row["us"] <= row["max_us"]
        assert row["floor_us"] is row["of_floor"] is None
        assert row["kernels"] > 10
        assert "read_GB_per_s" not in found
    assert on_stdout.keys() == in_file.keys()


def test_what_was_measured_before_an_interrupt_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run._paths

    def interrupted(plan: Any, *rest: Any) -> Iterator[run.BenchRow]:
        yield next(measured(plan, *rest))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_paths", interrupted)
    found = run_bench(BenchPlan("host", modes=("bf16",), context=20, repeats=1))
    assert [row["path"] for row in found["rows"]] == ["eager"]
    assert found["notes"][0] == "interrupted: these are the rows so far"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "gpt-2"], "'gpt-2' is not one of 'qwen3.6-27b'"),
        (["--mode", "int4"], "'int4' is not one of 'bf16'"),
        (["--path", "lazy"], "'lazy' is not one of 'eager'"),
        (["--against", "jax"], "'jax' is not"),
        (["--shape", "demo", "--mode", "mxfp4"], "--mode is 'mxfp4': demo has bf16, fp8, fp8+nvfp4, nvfp4"),
        (["--shape", "deepseek-v4-flash", "--mode", "fp8"], "its projections are FP8 in mode mxfp4"),
        (["--shape", "minimax-m2"], "--shape is 'minimax-m2': takes a GPU: backend host runs demo"),
        (["--batch", "1"], "--batch is 1"),
        (["--batch", "65"], "--batch is 65"),
        (["--batch", "two"], "'two' is not a valid integer"),
        (["--drafts", "0"], "--drafts is 0"),
        (["--drafts", "17"], "--drafts is 17"),
        (["--context", "0"], "--context is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--compile-limit", "-1"], "--compile-limit is -1.0"),
        (["--compile-limit", "nan"], "--compile-limit is nan"),
        (["--seed", "-1"], "--seed is -1"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--json", "/"], "a file is needed"),
        (["--json", "/proc/bench.json"], "it cannot be written"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_measured(words: list[str], message: str) -> None:
    done = bench("--backend", "host", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_batch_that_the_head_does_not_take() -> None:
    done = bench(*SMALL, "--path", "batched", "--batch", "40", "--mode", "bf16")
    assert done.exit_code == 2
    assert "--batch is 40: demo drafts for 32 at once at most" in done.stderr


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "matplotlib"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    done = bench(*SMALL, "--against", "torch")
    assert done.exit_code == 2
    assert "torch is not installed; run: pip install torch" in done.stderr
    done = bench(*SMALL, "--plot", "x.png")
    assert done.exit_code == 2
    assert "pip install 'spark-py[bench]'" in done.stderr


def test_a_picture_needs_a_format_that_it_can_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("spark_py.cli.bench.require_matplotlib", lambda: None)
    done = bench(*SMALL, "--plot", str(tmp_path / "x.txt"))
    assert done.exit_code == 2
    assert "a name that ends in .png, .svg or .pdf is needed" in done.stderr


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib, of the extra bench, is not installed")
def test_the_picture(tmp_path: Path) -> None:
    found = run_bench(BenchPlan("host", modes=("bf16",), paths=("eager", "graph"), context=20, repeats=1))
    lines = []
    for extra in ({}, {"read_GB_per_s": 4000.0}):
        draw(found | extra, tmp_path / "x.svg")
        lines.append((tmp_path / "x.svg").read_text().count('id="line2d_'))
    assert lines[1] > lines[0]  # the floor
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- torch beside it


def test_what_has_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "require_torch", lambda: None)
    with pytest.raises(InvalidArgumentError, match="its peers are BF16, and --mode fp8 is not"):
        BenchPlan(modes=("fp8",), against_torch=True)
    with pytest.raises(InvalidArgumentError, match="deepseek-v4-flash has no peer there"):
        BenchPlan(shapes=("deepseek-v4-flash",), against_torch=True)


def test_a_deadline_ends_what_takes_longer() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"), torch_peer.deadline(0.01):
        threading.Event().wait(30.0)
    with torch_peer.deadline(30.0):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


@pytest.mark.skipif(not HAS_TORCH, reason="torch, the peer, is not installed")
@pytest.mark.parametrize("shape", [shape_of("demo"), small("minimax_m2", "bf16"), small("qwen3_next", "bf16")])
def test_torch_drafts_the_same(host: GpuBackend, shape: BenchShape) -> None:
    """The tolerance is the benchmark's own."""
    with open_rig(host, shape, "bf16", 20, 2) as rig, torch_peer.require_torch().no_grad():
        peer = torch_peer.TorchPeer(rig)
        same, distance = peer.compare(peer.ready("eager"))
        assert distance < 0.01
        assert same >= 6  # of near ties a BF16 step decides
        with pytest.raises(UnsupportedError, match="takes a GPU"):
            peer.ready(torch_peer.WAYS[1])


@pytest.mark.skipif(not HAS_TORCH, reason="torch, the peer, is not installed")
def test_rows_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_bench(BenchPlan("host", modes=("bf16",), paths=("graph",), context=20, repeats=1, against_torch=True))
    assert [(row["by"], row["path"]) for row in found["rows"]] == [("spark_py", "graph"), ("torch", "eager")]
    assert found["rows"][1]["same_drafts"].endswith("of 8")
    assert any("takes a GPU" in note for note in found["notes"])
    # A peer that computes something else would make any comparison of times worthless.
    monkeypatch.setattr(torch_peer.TorchPeer, "_swiglu", lambda self, x, *weights: x)
    with pytest.raises(InvalidArgumentError, match="logits of torch, eager"):
        run_bench(BenchPlan("host", modes=("bf16",), paths=("graph",), context=20, repeats=1, against_torch=True))
