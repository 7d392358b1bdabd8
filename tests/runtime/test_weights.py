# SPDX-License-Identifier: AGPL-3.0-only
"""WeightStore: what arrives on the device and on the host, in which order, and what a failure leaves."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import serialize_file
from safetensors.numpy import save_file

from spark_py.runtime import DevicePtr, GpuBackend, errors
from spark_py.runtime import weight_upload as upload_module
from spark_py.runtime.host import HostBackend
from spark_py.runtime.weight_reader import TensorReader
from spark_py.runtime.weights import WeightDtype, WeightStore, WeightTensor

from .weights_support import device_bytes, f32, header_of, random_tensor, stored, write, write_raw

D = WeightDtype
SHAPES = [(), (2, 0, 3), (4,), (6, 10), (2, 3, 4)]


def everything(rng: np.random.Generator) -> dict[str, tuple[Any, WeightDtype]]:
    """Every dtype in every shape; F4 scalars do not exist (half a byte)."""
    return {
        f"layer.{dtype}.{i}": (random_tensor(rng, dtype, *shape), dtype)
        for dtype in D
        for i, shape in enumerate(SHAPES)
        if dtype is not D.F4 or math.prod(shape) % 2 == 0
    }


def bits_to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """BF16 bit patterns of finite or infinite F32 values, by exact comparison in FP64 of the two neighbours."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    low = bits >> 16
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low & 1 == 1))
    return (low + up).astype(np.uint16)


@pytest.mark.parametrize("pad", range(9), ids=lambda n: f"pad{n}")
def test_every_dtype_shape_and_header_length_arrives_bit_for_bit(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, pad: int
) -> None:
    tensors = everything(rng)
    path = write(tmp_path / "model.safetensors", tensors, pad)
    with WeightStore.open(path) as store:
        assert store.names() == tuple(sorted(tensors))
        assert set(store.load(gpu, tensors)) == set(tensors)
        for name, (array, dtype) in tensors.items():
            tensor, info, body = store.get(name), store.info(name), stored(array, dtype)
            assert (tensor.shape, tensor.dtype, tensor.byte_size) == (array.shape, dtype, len(body))
            assert (info.shape, info.dtype, info.nbytes, info.file) == (array.shape, dtype, len(body), path)
            assert path.read_bytes()[info.offset : info.offset + info.nbytes] == body
            assert tensor.ptr.address % 256 == 0
            assert tensor.ptr.is_null == (body == b"")
            assert device_bytes(gpu, tensor) == body
            host = store.read(name)
            assert (host.dtype, host.shape) == (dtype.numpy, array.shape)
            assert host.tobytes() == array.tobytes()
            assert host.flags.aligned
            assert host.flags.writeable
        assert store.total_bytes() == sum(len(stored(*t)) for t in tensors.values())
        assert store.unread() == ()
    assert gpu.live_bytes() == 0


def test_a_tensor_at_an_odd_offset_is_usable(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    tensors = {
        "odd": (random_tensor(rng, D.U8, 3), D.U8),
        "bf16": (random_tensor(rng, D.BF16, 5), D.BF16),
        "f32": (rng.standard_normal((7, 3)).astype(np.float32), D.F32),
    }
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors, pad=3)) as store:
        store.load(gpu, tensors)
        assert (store.info("f32").offset - store.info("odd").offset) % 4 == 1
        view = np.frombuffer(device_bytes(gpu, store.get("f32")), np.float32).reshape(7, 3)
        np.testing.assert_array_equal(view, tensors["f32"][0])
        np.testing.assert_array_equal(store.read("f32"), tensors["f32"][0])


def test_files_of_the_library(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    """Names in an order that is not the file's, metadata, and a BF16 tensor, as the library writes them."""
    a, b = rng.standard_normal((3, 5)).astype(np.float32), rng.integers(-9, 9, (4,), np.int64)
    save_file({"z.weight": a, "a.ids": b}, tmp_path / "model.safetensors", {"format": "pt"})
    bf16 = random_tensor(rng, D.BF16, 6, 2)
    serialize_file({"mtp.fc": _spec("bfloat16", bf16)}, tmp_path / "mtp.safetensors")
    with WeightStore.open(tmp_path) as store:
        assert store.names() == ("a.ids", "mtp.fc", "z.weight")
        store.load(gpu, lambda _: True)
        assert device_bytes(gpu, store.get("z.weight")) == a.tobytes()
        assert device_bytes(gpu, store.get("a.ids")) == b.tobytes()
        assert store.read("mtp.fc").tobytes() == bf16.tobytes()
        assert device_bytes(gpu, store.get("mtp.fc")) == bf16.tobytes()


def _spec(dtype: str, array: np.ndarray[Any, Any]) -> Any:
    from safetensors import TensorSpec

    return TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)


@pytest.mark.parametrize("chunk", [64, 256, 4096])
def test_pieces_through_two_buffers(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Tensors larger than a buffer, equal to it, and many in one, with conversions between them."""
    monkeypatch.setattr(upload_module, "_CHUNK_BYTES", chunk)
    tensors: dict[str, tuple[Any, WeightDtype]] = {}
    for i, count in enumerate([1, chunk, chunk - 1, chunk + 1, 3 * chunk + 7, 2, 5, chunk // 4, 11 * chunk]):
        tensors[f"u{i}"] = (random_tensor(rng, D.U8, count), D.U8)
        tensors[f"f{i}"] = (rng.standard_normal(count).astype(np.float32), D.F32)
    calls: list[tuple[int, int, str]] = []
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors, 1)) as store:
        store.load(gpu, reversed(tensors), progress=lambda *call: calls.append(call), convert={"F32": "BF16"})
        for name, (array, dtype) in tensors.items():
            want = bits_to_bf16(array).tobytes() if dtype is D.F32 else array.tobytes()
            assert device_bytes(gpu, store.get(name)) == want, name
    total = sum(a.nbytes for a, _ in tensors.values())
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert {c[1] for c in calls} == {total}
    assert calls[-1][0] == total
    assert list(dict.fromkeys(c[2] for c in calls)) == list(tensors), "file order"


@pytest.mark.parametrize("chunk", [128, 1024])
def test_a_buffer_is_not_written_while_a_copy_may_still_read_it(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """The slowest stream there can be: nothing is copied before somebody waits for it."""
    queued: list[Any] = []
    really_copy, really_wait = gpu.copy_h2d_async_retained, gpu.synchronize
    events_ahead = [0]

    def copy(src: Any, dst: DevicePtr, stream: Any) -> None:
        assert src.ctypes.data % 64 == 0
        queued.append((src, dst, stream))

    def drain(until: int | None) -> None:
        while queued and (until is None or until in queued):
            operation = queued.pop(0)
            if isinstance(operation, tuple):
                really_copy(*operation)
                really_wait(operation[2])

    def record(event: int, stream: Any) -> None:
        events_ahead.append(sum(isinstance(operation, int) for operation in queued))
        queued.append(event)

    monkeypatch.setattr(upload_module, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(gpu, "copy_h2d_async_retained", copy)
    monkeypatch.setattr(gpu, "record_event", record)
    monkeypatch.setattr(gpu, "event_synchronize", drain)
    monkeypatch.setattr(gpu, "synchronize", lambda stream: drain(None))
    counts = [3, 5, 1, *(int(n) for n in rng.integers(1, 5 * chunk, 12))]
    tensors = {f"w{i}": (random_tensor(rng, D.U8, n), D.U8) for i, n in enumerate(counts)}
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors)) as store:
        store.load(gpu, tensors)
        assert not queued, "load waits for its copies"
        for name, (array, _) in tensors.items():
            assert device_bytes(gpu, store.get(name)) == array.tobytes(), name
    assert max(events_ahead) == 1, "one buffer is filled while the other is copied"


@pytest.mark.host_only("counts operations")
def test_only_what_was_asked_for_is_uploaded(gpu: HostBackend, tmp_path: Path) -> None:
    tensors = {"c": f32(1), "a": f32(2, 3), "b": f32(4), "empty": f32()}
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors)) as store:
        assert gpu.alloc_count == 0
        store.load(gpu, lambda name: name in ("a", "c"))
        assert (gpu.alloc_count, gpu.h2d_async_count, gpu.h2d_blocking_count) == (2, 2, 0)
        assert store.unread() == ("b", "empty")
        assert store.total_bytes() == 12
        assert store.load(gpu, ["a", "c", "b", "b"]) == ("b",), "what is there is left alone"
        assert gpu.alloc_count == 3
        assert store.is_loaded("b")
        assert not store.is_loaded("empty")
        with pytest.raises(errors.WeightNotLoadedError, match=r"'empty' is in .*x\.safetensors"):
            store.get("empty")
        assert store.load(gpu, lambda _: False) == ()


@pytest.mark.parametrize("dtype", [D.F32, D.F16])
def test_conversion_rounds_to_nearest_even(gpu: GpuBackend, tmp_path: Path, dtype: WeightDtype) -> None:
    if dtype is D.F16:
        values = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    else:
        high = np.arange(2**16, dtype=np.uint32) << 16
        values = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    with WeightStore.open(write(tmp_path / "x.safetensors", {"w": (values, dtype)})) as store:
        store.load(gpu, ["w"], convert={dtype: D.BF16})
        tensor = store.get("w")
        assert (tensor.dtype, tensor.shape) == (D.BF16, values.shape)
        got = np.frombuffer(device_bytes(gpu, tensor), np.uint16)
        numbers = ~np.isnan(values)
        np.testing.assert_array_equal(got[numbers], bits_to_bf16(values[numbers]))
        assert np.isnan(got.view(ml_dtypes.bfloat16)[~numbers].astype(np.float32)).all()
        with pytest.raises(errors.InvalidArgumentError, match="on the device as BF16"):
            store.load(gpu, ["w"])


def test_conversion_is_never_silent_and_never_another(gpu: GpuBackend, tmp_path: Path) -> None:
    tensors = {"f32": f32(1, 2), "f16": (np.ones(2, np.float16), D.F16), "u8": (np.ones(2, np.uint8), D.U8)}
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors)) as store:
        store.load(gpu, tensors, convert={"F16": "BF16"})
        assert [store.get(n).dtype for n in tensors] == [D.F32, D.BF16, D.U8]
        for pair in ({"F32": "F16"}, {"U8": "BF16"}, {"F8_E4M3": "BF16"}, {"F64": "F32"}):
            with pytest.raises(errors.InvalidArgumentError, match="F16 -> BF16, F32 -> BF16"):
                store.load(gpu, tensors, convert=pair)


def test_missing_names_come_in_one_error(gpu: GpuBackend, tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": f32(1), "model.mtp.fc.weight": f32(2), "head": f32(3)}
    store = WeightStore.open(write(tmp_path / "x.safetensors", tensors))
    asked = ["head", "mtp.fc.weight", "model.layers.0.mlp.up_porj.weight", "zzz"]
    with pytest.raises(errors.MissingWeightError) as caught:
        store.load(gpu, asked)
    assert caught.value.missing == tuple(asked[1:])
    assert caught.value.near["mtp.fc.weight"][0] == "model.mtp.fc.weight"
    assert "model.layers.0.mlp.up_proj.weight" in caught.value.near[asked[2]]
    assert caught.value.near["zzz"] == ()
    assert all(name in str(caught.value) for name in asked[1:])
    assert store.unread() == store.names()
    assert gpu.live_bytes() == 0
    for name in ("get", "read", "info", "remove"):
        with pytest.raises(errors.MissingWeightError):
            getattr(store, name)("zzz")


@pytest.mark.parametrize("names", ["head", b"head", [1], ["head", None]])
def test_names_that_are_no_list_of_names(gpu: GpuBackend, tmp_path: Path, names: Any) -> None:
    store = WeightStore.open(write(tmp_path / "x.safetensors", {"head": f32(1)}))
    with pytest.raises(errors.InvalidArgumentError, match="names"):
        store.load(gpu, names)


def test_unsupported_dtypes_are_named_when_touched(gpu: GpuBackend, tmp_path: Path) -> None:
    listed = {"mask": ("BOOL", [3], b"\1\0\1"), "w": ("F32", [1], b"\0\0\x80\x3f"), "d": ("F64", [1], bytes(8))}
    header, data = header_of(listed)
    with WeightStore.open(write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), data)) as store:
        assert "mask" in store
        assert store.info("mask").dtype_name == "BOOL"
        for call in (
            lambda: store.info("mask").dtype,
            lambda: store.read("mask"),
            lambda: store.load(gpu, ["w", "mask"]),
        ):
            with pytest.raises(errors.UnsupportedWeightDtypeError, match="'mask': dtype BOOL is not supported"):
                call()
        assert gpu.live_bytes() == 0
        store.load(gpu, ["w"])
        assert device_bytes(gpu, store.get("w")) == b"\0\0\x80\x3f"


def test_preflight_names_need_reserve_and_free(
    gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore.open(write(tmp_path / "x.safetensors", {"a": f32(*range(25)), "b": f32(*range(50))}))
    monkeypatch.setattr(gpu, "free_memory", lambda: 399)
    with pytest.raises(errors.OutOfDeviceMemoryError, match="weights take 300 bytes, the reserve 100") as caught:
        store.load(gpu, ["a", "b"], reserve_bytes=100)
    assert (caught.value.requested, caught.value.free) == (400, 399)
    assert gpu.live_bytes() == 0
    with store:
        store.load(gpu, ["a", "b"], reserve_bytes=100, convert={"F32": "BF16"})
        assert store.total_bytes() == 150
    with store:
        store.load(gpu, ["a", "b"], reserve_bytes=99)
    for bad in (-1, 1.5, True):
        with pytest.raises(errors.SparkError, match="reserve_bytes"):
            store.load(gpu, ["a"], reserve_bytes=bad)  # type: ignore[arg-type]


def _failing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = TensorReader.read

    def read(self: TensorReader, info: Any, start: int, into: Any) -> None:
        if info.name == "c" and into.nbytes:
            raise errors.WeightFileError(info.file, "disk on fire", info.name)
        inner(self, info, start, into)

    monkeypatch.setattr(TensorReader, "read", read)


@pytest.mark.parametrize("how", ["read", "alloc", "copy", "progress", "interrupt"])
def test_a_failure_in_the_middle_leaves_the_store_as_before(
    gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tensors = {name: f32(*([i] * 100)) for i, name in enumerate("abcd")}
    with WeightStore.open(write(tmp_path / "x.safetensors", tensors)) as store:
        store.load(gpu, ["a"])
        live, unread = gpu.live_bytes(), store.unread()
        kind: type[BaseException] = errors.SparkError
        progress = None
        with monkeypatch.context() as patch:
            if how == "read":
                _failing_read(patch)
            elif how in ("alloc", "copy"):
                name = "alloc" if how == "alloc" else "copy_h2d_async_retained"
                inner, count = getattr(gpu, name), iter(range(99))

                def third_fails(*args: Any, **kwargs: Any) -> Any:
                    if next(count) == 2:
                        raise errors.OutOfDeviceMemoryError(400, 0, 1, "test")
                    return inner(*args, **kwargs)

                patch.setattr(gpu, name, third_fails)
            else:
                kind = ZeroDivisionError if how == "progress" else KeyboardInterrupt

                def progress(done: int, total: int, name: str) -> None:
                    if name == "c":
                        raise kind

            with pytest.raises(kind):
                store.load(gpu, list("abcd"), progress=progress)
        assert gpu.live_bytes() == live
        assert store.unread() == unread
        assert [store.is_loaded(n) for n in "abcd"] == [True, False, False, False]
        assert device_bytes(gpu, store.get("a")) == tensors["a"][0].tobytes()
        store.load(gpu, list("abcd"))
        for name, (array, _) in tensors.items():
            assert device_bytes(gpu, store.get(name)) == array.tobytes()
    assert gpu.live_bytes() == 0
    assert not gpu._pinned.all(), "staging buffers are given back"  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["shorter", "longer", "rewritten", "deleted"])
def test_a_file_that_changed_since_open_is_refused_before_any_upload(
    gpu: GpuBackend, tmp_path: Path, change: str
) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": f32(1, 2)})
    path = write(tmp_path / "model-00002-of-00002.safetensors", {"b": f32(3, 4)})
    store = WeightStore.open(tmp_path)
    body = path.read_bytes()
    if change == "deleted":
        path.unlink()
    else:
        path.write_bytes({"shorter": body[:-1], "longer": body + b"x", "rewritten": body}[change])
        os.utime(path, ns=(1, 1))
    with pytest.raises(errors.WeightFileError) as caught:
        store.load(gpu, ["a", "b"], progress=lambda *_: pytest.fail("uploaded"))
    assert (caught.value.path, caught.value.tensor) == (path, "b")
    with pytest.raises(errors.WeightFileError):
        store.read("b")
    assert gpu.live_bytes() == 0


def test_insert_remove_and_release(gpu: GpuBackend, tmp_path: Path) -> None:
    store = WeightStore.open(write(tmp_path / "x.safetensors", {"embed": f32(1, 2), "fc": f32(3)}))
    store.load(gpu, ["embed", "fc"])
    assert store.insert("lm_head", store.get("embed")) is None
    assert (len(store), store.total_bytes()) == (3, 12), "a shared buffer counts once"
    mine = WeightTensor(gpu.alloc(4), (2,), D.BF16)
    before = store.insert("fc", mine)
    assert before is not None
    gpu.free(before.ptr)
    assert store.get("fc") is mine
    assert store.load(gpu, ["lm_head", "embed"]) == ()
    taken = store.remove("fc")
    with pytest.raises(errors.WeightNotLoadedError):
        store.get("fc")
    assert store.load(gpu, ["fc"]) == ("fc",), "the file still has it"
    store.release()
    store.release()
    assert gpu.live_bytes() == 4
    gpu.free(taken.ptr)
    assert not store.is_loaded("embed")
    store.load(gpu, ["embed"])
    store.release()


def test_a_store_without_files(gpu: GpuBackend) -> None:
    store = WeightStore.from_map({"w": WeightTensor(gpu.alloc(6), (3,), D.BF16)})
    assert (store.names(), store.total_bytes(), store.unread()) == (("w",), 6, ())
    with pytest.raises(errors.InvalidArgumentError, match="never loaded"):
        store.release()
    store.release(gpu)
    assert gpu.live_bytes() == 0


@pytest.mark.host_only("needs a second backend")
def test_one_backend_a_store(gpu: GpuBackend, tmp_path: Path) -> None:
    store = WeightStore.open(write(tmp_path / "x.safetensors", {"a": f32(1), "b": f32(1)}))
    store.load(gpu, ["a"])
    with HostBackend() as other:
        for call in (lambda: store.load(other, ["b"]), lambda: store.release(other)):
            with pytest.raises(errors.InvalidArgumentError, match="gpu"):
                call()
    store.release()


@pytest.mark.host_only("closes its own backend")
def test_release_after_the_backend_closed(tmp_path: Path) -> None:
    store = WeightStore.open(write(tmp_path / "x.safetensors", {"a": f32(1)}))
    with HostBackend() as backend:
        store.load(backend, ["a"])
    store.release()
    assert not store.is_loaded("a")


def test_fp8_is_told_from_its_scales(tmp_path: Path, rng: np.random.Generator) -> None:
    for dtype, expected in ((D.F8_E4M3, True), (D.F8_E5M2, True), (D.F8_E8M0, False), (D.U8, False)):
        path = write(tmp_path / f"{dtype}.safetensors", {"w": (random_tensor(rng, dtype, 4), dtype)})
        assert WeightStore.open(path).has_fp8_weights() is expected


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), D.F4), ((-1,), D.F32), ((1.5,), D.F32), ((2,), "F64"), ((True,), D.U8)]
)
def test_a_tensor_that_cannot_be(shape: Any, dtype: Any) -> None:
    with pytest.raises(errors.SparkError):
        WeightTensor(DevicePtr(256), shape, dtype)


def test_a_shape_that_numpy_cannot_hold(gpu: GpuBackend, tmp_path: Path) -> None:
    header, data = header_of({"w": ("F32", [2**63, 0], b"")})
    with WeightStore.open(write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), data)) as store:
        store.load(gpu, ["w"])
        assert store.get("w").byte_size == 0
        with pytest.raises(errors.WeightFileError, match="9223372036854775808"):
            store.read("w")
