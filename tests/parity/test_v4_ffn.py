# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's mixture against transformers' `DeepseekV4SparseMoeBlock`: the FP64 model of the tests, and V4Ffn."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Ffn, V4FfnShape
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, Output, relative_l2, upload
from tests.model.test_v4_ffn import NEAR
from tests.model.v4_ffn_support import Bf16, Expert, HostFfn
from tests.parity.support import FIXTURES
from tools.goldens import cases, v4_ffn

PARTS = ("w1", "w3", "w2")


@pytest.fixture(scope="module")
def stored() -> dict[str, Array]:
    return cases.load(FIXTURES / f"{v4_ffn.NAME}.npz")[1]


def mixture(stored: dict[str, Array], hashed: bool) -> HostFfn:
    values = {name: array.view(BF16) for name, array in stored.items() if array.dtype == np.uint16}
    experts = (Expert(*(Bf16(values[part][number]) for part in PARTS)) for number in range(len(values["w1"])))
    return HostFfn(
        values["gate"], None if hashed else stored["bias"], stored["table"] if hashed else None, tuple(experts),
        Expert(*(Bf16(values[f"shared_{part}"]) for part in PARTS)), V4FfnShape(**v4_ffn.SIZES),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("router", ["learned", "hashed"])
def test_the_fp64_model_is_transformers(stored: dict[str, Array], router: str) -> None:
    """What every other test of the mixture compares with; transformers adds 1e-20 to the sum of weights."""
    host = mixture(stored, router == "hashed")
    for row, token, output in zip(stored["x"].view(BF16), stored["tokens"], stored[f"{router}_output"], strict=True):
        assert relative_l2(host.output(row, int(token)), output) < 1e-12


@pytest.mark.parametrize("router", ["learned", "hashed"])
def test_outputs_are_those_of_transformers(gpu: GpuBackend, stored: dict[str, Array], router: str) -> None:
    host, x = mixture(stored, router == "hashed"), stored["x"].view(BF16)
    out, tokens = Output(gpu, x.shape), upload(gpu, stored["tokens"].astype(U32))
    with V4Ffn(host.to_device(gpu), host.shape, gpu, len(x), tokens) as ffn:
        ffn(upload(gpu, x), out.ptr, len(x), gpu.default_stream())
    for got, output in zip(out.read(), stored[f"{router}_output"], strict=True):
        assert relative_l2(got, output) < NEAR


def test_the_rows_show_limits_and_choices(stored: dict[str, Array]) -> None:
    """A fixture in which nothing is limited, or the bias chooses nothing, would show little."""
    host = mixture(stored, hashed=False)
    wrong = {
        "limits": {"limits": (np.inf, np.inf)},
        "shared limit": {"limits": (host.shape.swiglu_limit, np.inf)},
        "gate below": {"gate_below": True},
        "bias in weights": {"bias_in_weights": True},
    }
    for name, misread in wrong.items():
        outputs = np.stack([host.output(row, **misread) for row in stored["x"].view(BF16)])  # type: ignore[arg-type]
        assert relative_l2(outputs, stored["learned_output"]) > 4 * NEAR, name
    for weights in (stored["learned_weights"], stored["hashed_weights"]):
        np.testing.assert_allclose(weights.sum(axis=1), 1.5, rtol=1e-12)
    assert not np.array_equal(stored["learned_experts"], stored["hashed_experts"])
