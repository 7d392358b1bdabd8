# SPDX-License-Identifier: AGPL-3.0-only
"""The row types of the kernel catalogue, and the small vocabulary its tables are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

Access = Literal["r", "w", "rw"]
Dim3 = tuple[int, int, int]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "i64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
}
"""Pointee types as the ABI spells them. FP8, E8M0 and FP4 are u8 bytes."""


class Call:
    """One launch as a reference sees it: `grid`, `block`, `shared_mem`, and every parameter as an attribute.

    Scalars are Python numbers, pointers are NumPy arrays over device memory of the shape that the parameter declares
    (None for a NULL that is allowed). A pointer is bound when it is first asked for, by `bind`, so a shape may use
    every other parameter; `bind` raises AttributeError for a name that is no pointer of the kernel.
    """

    def __init__(
        self,
        grid: Dim3,
        block: Dim3,
        shared_mem: int,
        bind: Callable[[Call, str], Any] | None = None,
        follow: Callable[[Call, str, int], Any] | None = None,
    ) -> None:
        self.grid, self.block, self.shared_mem = grid, block, shared_mem
        self._bind, self._follow = bind, follow

    def behind(self, name: str, index: int) -> Any:
        """The array that entry `index` of the table of addresses `name` points at, of the shape that its `Pointee`
        declares; None for an entry of 0. Only entries that are asked for have to be right."""
        if self._follow is None:
            raise AttributeError(f"kernel call has no table of addresses '{name}'")
        return self._follow(self, name, index)

    def __getattr__(self, name: str) -> Any:
        if self._bind is None or name.startswith("_"):
            raise AttributeError(f"kernel call has no parameter '{name}'")
        value = self._bind(self, name)
        setattr(self, name, value)
        return value


@dataclass(frozen=True, slots=True)
class Pointee:
    """What each entry of a table of device addresses points at: an array of this shape that the kernel reads, on a
    multiple of `align` bytes."""

    dtype: str
    shape: Callable[[Call], tuple[int, ...]]
    align: int = 1


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a catalogued kernel.

    `shape` gives the elements that the launch touches, starting `offset` elements after the pointer; `access` says
    whether they are read, written or both; `align` is the byte alignment the kernel's loads need; `optional` allows
    NULL. `early` says that a kernel of a `dependent` module reads it before it waits for the kernels before it, which
    do not write it: weights. All five are for pointers only. `pointee` makes it a table of addresses (u64), where 0
    stands for no array.
    """

    name: str
    ctype: str
    shape: Callable[[Call], tuple[int, ...]] | None = None
    access: Access = "r"
    align: int = 1
    offset: Callable[[Call], int] | None = None
    optional: bool = False
    pointee: Pointee | None = None
    early: bool = False

    @property
    def is_pointer(self) -> bool:
        """Whether the parameter is a device pointer."""
        return self.ctype.endswith("*")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of a pointer parameter."""
        return DTYPES[self.ctype.removeprefix("const ").removesuffix("*")]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel of the catalogue.

    `geometry` gives (grid, block, dynamic shared bytes) that the launch must have, computed from the call; grid
    entries that carry a row count are taken from the call itself. `run` computes the kernel on the call's arrays
    through `reference`, the plain NumPy function whose docstring says what the kernel is. `grid_text` and `block_text`
    say the geometry to people. `shared_bytes` is the static shared memory of the engine's kernel.
    """

    module: str
    function: str
    params: tuple[ParamSpec, ...]
    grid_text: str
    block_text: str
    geometry: Callable[[Call], tuple[Dim3, Dim3, int]]
    reference: Callable[..., Any]
    run: Callable[[Call], None]
    shared_bytes: int = 0
    optional: bool = False
    gpu_only: bool = False
    min_arch: str = "sm_80"
    preconditions: Callable[[Call], None] | None = field(default=None)
    """Raises ValueError with the rule where the kernel's own requirements (say K % 8 == 0) do not hold."""

    @property
    def key(self) -> tuple[str, str]:
        """(module, function)."""
        return self.module, self.function


def pointer(
    name: str,
    dtype: str,
    access: Access,
    shape: Callable[[Call], tuple[int, ...]],
    *,
    align: int = 0,
    offset: Callable[[Call], int] | None = None,
    optional: bool = False,
    early: bool = False,
) -> ParamSpec:
    """A device pointer; `align` defaults to the element size. Read-only pointers are `const`."""
    ctype = f"const {dtype}*" if access == "r" else f"{dtype}*"
    return ParamSpec(name, ctype, shape, access, align or DTYPES[dtype].itemsize, offset, optional, early=early)


def table(name: str, length: Callable[[Call], tuple[int, ...]], pointee: Pointee) -> ParamSpec:
    """A table of device addresses, u64 each, that the kernel reads. `Call.behind` gives what an entry points at."""
    return ParamSpec(name, "const u64*", length, "r", 8, pointee=pointee)


def u32(name: str) -> ParamSpec:
    """An unsigned 32-bit scalar."""
    return ParamSpec(name, "u32")


def i32(name: str) -> ParamSpec:
    """A signed 32-bit scalar."""
    return ParamSpec(name, "i32")


def u64(name: str) -> ParamSpec:
    """An unsigned 64-bit scalar."""
    return ParamSpec(name, "u64")


def f32(name: str) -> ParamSpec:
    """A 32-bit float scalar."""
    return ParamSpec(name, "f32")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
