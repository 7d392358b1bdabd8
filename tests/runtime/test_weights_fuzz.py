# SPDX-License-Identifier: AGPL-3.0-only
"""Damaged files: refused with a typed error exactly where the safetensors library refuses, before anything is uploaded,
and without memory that a number in the file asks for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from spark_py.runtime import errors
from spark_py.runtime.host import HostBackend
from spark_py.runtime.weights import WeightDtype, WeightStore

from .weights_support import header_of, write_index, write_raw

MANY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SIZES = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "U8": 1,
    "I64": 8,
    "BOOL": 1,
    "F64": 8,
    "F4": 0.5,
    "F6_E2M3": 0.75,
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def entry(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def by_the_library(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What the library reads from the file; None when it refuses it."""
    try:
        listed = deserialize(path.read_bytes())
    except SafetensorError:
        return None
    return {name: (view["dtype"], tuple(view["shape"]), bytes(view["data"])) for name, view in listed}


def same_as_the_library(path: Path) -> None:
    """Accepted with equal contents, or refused by both; an upload only where the whole file is sound."""
    expected = by_the_library(path)
    with HostBackend() as gpu:
        try:
            store = WeightStore.open(path)
        except errors.WeightFileError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert expected is None, f"the library accepts what we refuse: {refusal}"
            assert refusal.path == path
            str(refusal).encode()
            assert (gpu.alloc_count, gpu.h2d_async_count, gpu.host_pinned_alloc_count) == (0, 0, 0)
            return
        assert expected is not None, "the library refuses what we accept"
        assert store.names() == tuple(sorted(expected))
        raw = path.read_bytes()
        for name, (dtype, shape, body) in expected.items():
            info = store.info(name)
            assert (info.dtype_name, info.shape, info.nbytes) == (dtype, shape, len(body))
            assert raw[info.offset : info.offset + info.nbytes] == body
        with store:
            store.load(gpu, [n for n, (dtype, _, _) in expected.items() if dtype in WeightDtype.__members__])
            for name, (_, _, body) in expected.items():
                if store.is_loaded(name) and body:
                    assert gpu.read_alloc(store.get(name).ptr) == body


@st.composite
def sound(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A header and data that fit."""
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), unique=True, max_size=4))
    tensors = {}
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if dtype in ("F4", "F6_E2M3"):
            shape = [*shape, 4]
        size = int(np.prod(shape, dtype=object) * SIZES[dtype])
        tensors[name] = (dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return header_of(tensors)


numbers = st.one_of(
    st.integers(-2, 20), st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 1.0, None])
)
junk = st.recursive(
    st.one_of(numbers, st.booleans(), st.text(max_size=3), st.sampled_from(sorted(SIZES))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@MANY
@given(made=sound(), pad=st.integers(0, 8))
def test_sound_files(folder: Path, made: tuple[dict[str, Any], bytes], pad: int) -> None:
    path = write_raw(folder / "x", json.dumps(made[0]).encode() + b" " * pad, made[1])
    assert by_the_library(path) is not None
    same_as_the_library(path)


@MANY
@given(data=st.data(), made=sound())
def test_changed_fields(folder: Path, data: st.DataObject, made: tuple[dict[str, Any], bytes]) -> None:
    header, body = made
    for name in list(header):
        what = data.draw(st.sampled_from(["keep", "dtype", "shape", "offsets", "begin", "end", "drop", "junk"]))
        if what == "dtype":
            header[name]["dtype"] = data.draw(st.sampled_from(sorted(SIZES)) | junk)
        elif what == "shape":
            header[name]["shape"] = data.draw(st.lists(numbers, max_size=4) | junk)
        elif what == "offsets":
            header[name]["data_offsets"] = data.draw(st.lists(numbers, min_size=2, max_size=2) | junk)
        elif what in ("begin", "end"):
            header[name]["data_offsets"][what == "end"] = data.draw(numbers)
        elif what == "drop":
            del header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
        elif what == "junk":
            header[name] = data.draw(junk)
    if data.draw(st.booleans()):
        header["__metadata__"] = data.draw(st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2) | junk)
    same_as_the_library(write_raw(folder / "x", json.dumps(header).encode(), body))


@MANY
@given(data=st.data(), made=sound())
def test_changed_bytes(folder: Path, data: st.DataObject, made: tuple[dict[str, Any], bytes]) -> None:
    """Cut, grow, flip and overwrite anywhere, the length field included."""
    path = write_raw(folder / "x", json.dumps(made[0]).encode(), made[1])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        what = data.draw(st.sampled_from(["cut", "grow", "set", "drop", "length"]))
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        if what == "cut":
            del raw[at:]
        elif what == "grow":
            raw += data.draw(st.binary(max_size=9))
        elif what == "set" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif what == "drop":
            del raw[at : at + 1]
        elif what == "length":
            raw[:8] = data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 200)).to_bytes(8, "little")
    path.write_bytes(raw)
    same_as_the_library(path)


@MANY
@given(raw=st.binary(max_size=60))
@example(raw=b"")
@example(raw=bytes(8))
@example(raw=(2**60).to_bytes(8, "little"))
@example(raw=b"\x02" + bytes(7) + b"{}")
def test_any_bytes(folder: Path, raw: bytes) -> None:
    path = folder / "x"
    path.write_bytes(raw)
    same_as_the_library(path)


@pytest.mark.parametrize(
    ("header", "data", "tensor", "message"),
    [
        ({"a": entry(end=4)}, 4, "a", r"F32 \[2\] takes 8 bytes, its offsets span 4"),
        ({"a": entry(), "b": entry(begin=4, end=12)}, 12, "b", "begins at byte 4 of the data, expected 8: overlaps"),
        (
            {"a": entry(), "b": entry(begin=12, end=20)},
            20,
            "b",
            "begins at byte 12 of the data, expected 8: leaves a gap",
        ),
        ({"a": entry()}, 7, "a", "ends at byte 8 of the data, the file holds 7"),
        ({"a": entry()}, 9, "", "tensors take 8 bytes, the file holds 9"),
        ({"a": entry(begin=8, end=0)}, 8, "a", r"data_offsets \[8, 0\] run backwards"),
        ({"a": entry(shape=[2**40, 2**40])}, 8, "a", r"F32 \[1099511627776, 1099511627776\] overflows 64 bits"),
        ({"a": entry(shape=[2**63] * 50_000)}, 8, "a", "overflows 64 bits"),
        ({"a": entry(shape=[-2])}, 8, "a", r"shape is \[-2\]"),
        ({"a": entry(dtype="F7")}, 8, "a", "dtype is 'F7'; known: F4,"),
        ({"a": entry(dtype="F4", shape=[3], end=2)}, 2, "a", r"F4 \[3\] takes 1.5 bytes, its offsets span 2"),
        ({"a": entry(end=2**64)}, 8, "a", "data_offsets is"),
        ({"a": 3}, 8, "a", "entry is 3"),
        ([], 0, "", "expected struct"),
    ],
)
def test_the_values_at_fault_are_named(tmp_path: Path, header: Any, data: int, tensor: str, message: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(data))
    with pytest.raises(errors.WeightFileError, match=message) as caught:
        WeightStore.open(path)
    assert (caught.value.path, caught.value.tensor) == (path, tensor)
    assert len(str(caught.value)) < 1000
    same_as_the_library(path)


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"9" * 5000 + b"}", b'{"\\ud800":1}']
)
def test_json_that_python_reads_otherwise(tmp_path: Path, header: bytes) -> None:
    same_as_the_library(write_raw(tmp_path / "x.safetensors", header, b""))


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 10**8 + 1, 10**8, 2**31, 200])
def test_a_huge_header_length_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", b"{}", b"", length)
    tracemalloc.start()
    try:
        with pytest.raises(errors.WeightFileError, match=f"header length is {length}, but 2 bytes follow"):
            WeightStore.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((10**8 + 1).to_bytes(8, "little"))
        file.truncate(10**8 + 100)  # sparse
    with pytest.raises(errors.WeightFileError, match="header length is 100000001: limit 100000000"):
        WeightStore.open(path)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS bounds native allocations on Linux")
def test_native_code_allocates_nothing_for_a_length_field(tmp_path: Path) -> None:
    """tracemalloc does not see the library's memory; an address space 64 MiB above the idle process does."""
    for i, length in enumerate((2**60, 2**64 - 1, 10**8, 9 * 10**7)):
        write_raw(tmp_path / f"{i}.safetensors", b"{}", b"", length)
    overflow = {"a": entry(shape=[2**30, 2**30], end=8)}
    write_raw(tmp_path / "s.safetensors", json.dumps(overflow).encode(), bytes(8))
    program = """
import resource, sys
from pathlib import Path
from spark_py.runtime import errors
from spark_py.runtime.weights import WeightStore
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        WeightStore.open(path)
    except errors.WeightFileError:
        print("refused")
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 5), done.stderr


@MANY
@given(data=st.data())
def test_index_files_of_any_kind(data: st.DataObject) -> None:
    """Two shards and an index that is right, wrong or junk: a store that has every tensor, or a typed error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mtp.safetensors"]
        held: dict[str, dict[str, bytes]] = {}
        for file in data.draw(st.lists(st.sampled_from(files), unique=True)):
            names = data.draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
            held[file] = {n: bytes([data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 2))) for n in names}
            header, body = header_of({n: ("U8", [len(b)], b) for n, b in held[file].items()})
            write_raw(folder / file, json.dumps(header).encode(), body)
        shards = st.sampled_from([*files, "gone.safetensors", "model.safetensors.index.json", "../x"])
        kind: Callable[[], Any] = data.draw(
            st.sampled_from([
                lambda: None,
                lambda: write_index(folder, {n: f for f, t in held.items() for n in t}),
                lambda: write_index(folder, data.draw(st.dictionaries(st.sampled_from("abcde"), shards, max_size=4))),
                lambda: write_index(folder, data.draw(junk)),
                lambda: (folder / "model.safetensors.index.json").write_bytes(data.draw(st.binary(max_size=20))),
            ])
        )  # fmt: skip
        kind()
        with HostBackend() as gpu:
            try:
                store = WeightStore.open(folder)
            except errors.WeightFileError as error:
                str(error).encode()
                assert gpu.alloc_count == 0
                return
            assert set(store.names()) == {n for tensors in held.values() for n in tensors}
            for tensor in store.names():
                bodies = {tensors[tensor] for tensors in held.values() if tensor in tensors}
                if len(bodies) > 1:
                    with pytest.raises(errors.DuplicateWeightError):
                        store.load(gpu, [tensor])
                    assert gpu.alloc_count == 0
                else:
                    assert store.read(tensor).tobytes() == bodies.pop()
