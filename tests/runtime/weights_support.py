# SPDX-License-Identifier: AGPL-3.0-only
"""What the weight tests share: safetensors files written by hand, with every byte under control."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from spark_py.runtime import GpuBackend
from spark_py.runtime.weights import WeightDtype, WeightTensor

Array = np.ndarray[Any, Any]


def stored(array: Array, dtype: WeightDtype) -> bytes:
    """The bytes of an array in a file; F4 elements (a byte each) are packed, the even one in the low half."""
    flat = array.reshape(-1).view(np.uint8)
    return (flat[0::2] | flat[1::2] << 4).tobytes() if dtype is WeightDtype.F4 else flat.tobytes()


def random_tensor(rng: np.random.Generator, dtype: WeightDtype, *shape: int) -> Array:
    """Random bit patterns: every value of the type, NaN and infinities included."""
    count = math.prod(shape)
    bits = rng.integers(0, 16 if dtype is WeightDtype.F4 else 256, count * dtype.numpy.itemsize, np.uint8)
    return bits.view(dtype.numpy).reshape(shape)


def header_of(tensors: dict[str, tuple[str, list[int], bytes]]) -> tuple[dict[str, Any], bytes]:
    """Header entries and data of tensors (dtype name, shape, bytes) one after another."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, body) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    return header, data


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> Path:
    """A file of a length field (of the header, unless given), a header and data."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def write(path: Path, tensors: dict[str, tuple[Array, WeightDtype | str]], pad: int = 0) -> Path:
    """A file of arrays; `pad` spaces are added to the header, which moves the data section."""
    listed = {
        name: (str(dtype), list(array.shape), stored(array, WeightDtype(dtype)))
        for name, (array, dtype) in tensors.items()
    }
    header, data = header_of(listed)
    return write_raw(path, json.dumps(header).encode() + b" " * pad, data)


def write_index(folder: Path, weight_map: dict[str, str], family: str = "model") -> Path:
    """An index file."""
    path = folder / f"{family}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def f32(*values: float) -> tuple[Array, WeightDtype]:
    """A small F32 tensor for `write`."""
    return np.array(values, np.float32), WeightDtype.F32


def device_bytes(gpu: GpuBackend, tensor: WeightTensor) -> bytes:
    """A tensor's bytes on the device."""
    data = bytearray(tensor.byte_size)
    gpu.copy_d2h(tensor.ptr, data)
    return bytes(data)
