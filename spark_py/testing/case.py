# SPDX-License-Identifier: AGPL-3.0-only
"""One launch against its reference: buffers are made, poisoned and guarded, the kernel runs, everything is compared.

Outputs are held to their bounds; what a kernel only reads, and what lies beside its buffers, must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ..catalog import find
from ..catalog.spec import Call, Dim3, KernelSpec
from ..runtime.errors import InvalidArgumentError, SparkError
from ..runtime.gpu import DevicePtr, GpuBackend
from .compare import Bound, bits
from .inputs import BF16, Array, Distribution
from .memory import POISON, Output
from .writer import writing_block

__all__ = [
    "Alias",
    "Argument",
    "Case",
    "Difference",
    "Draw",
    "KernelCase",
    "Poisoned",
    "Table",
    "Tag",
    "run_case",
    "written_by",
]

Tag = Literal["abi", "numeric", "decision"]


@dataclass(frozen=True, slots=True)
class Poisoned:
    """A buffer that the kernel is to fill: `shape` elements, each byte 0xA5 before the launch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = BF16


@dataclass(frozen=True, slots=True)
class Alias:
    """The same pointer as the parameter `name`: a launch in place."""

    name: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of device addresses: each entry points at a buffer of its own with that content, None is address 0."""

    entries: Sequence[Array | None]


Argument: TypeAlias = "int | float | Array | Poisoned | Alias | Table | Distribution | None"
"""A scalar, NULL, the content of a buffer, or how to make it. A distribution is drawn in the catalogue's shape."""

Draw: TypeAlias = "Callable[[np.random.Generator], Mapping[str, Argument]]"
"""The arguments of a case, by parameter."""

Reference: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of a catalogued kernel, as data.

    `arguments(rng)` gives every parameter but outputs, which are poisoned in the catalogue's shape. `grid` carries row
    counts that no parameter has. `bounds` says for each output how close it has to be; without an entry, bit for bit.
    A `decision` case asks for what this project decided where the engine does otherwise; `subject` names it. `shift`
    moves every buffer whose alignment allows it off its 256-byte boundary, in bytes.
    """

    name: str
    arguments: Draw
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    grid: Dim3 = (1, 1, 1)
    tag: Tag = "numeric"
    subject: str = ""
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One buffer that is not as it has to be."""

    kernel: str
    parameter: str
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.parameter}: {self.text}"


@dataclass(slots=True)
class _Buffer:
    """A buffer of the launch: its content before, and where it is on the device."""

    before: Array
    written: bool
    device: Output | None = None


def _poison(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.full(size, POISON, np.uint8).view(dtype).reshape(tuple(shape))


def _catalogue_call(
    spec: KernelSpec,
    scalars: Mapping[str, Any],
    arrays: Mapping[str, Array | None],
    grid: Dim3,
    block: Dim3,
    shared: int,
    tables: Mapping[str, Sequence[Array | None]],
) -> Call:
    """A call whose pointers are views of `arrays`, of the shape and offset that the catalogue gives them. What tables
    of addresses point at is in `tables`."""
    params = {param.name: param for param in spec.params if param.is_pointer}

    def bind(call: Call, name: str) -> Any:
        if name not in params:
            raise AttributeError(f"{spec.module}::{spec.function} has no parameter '{name}'")
        array = arrays[name]
        if array is None:
            return None
        param = params[name]
        assert param.shape is not None
        shape = tuple(int(n) for n in param.shape(call))
        first = int(param.offset(call)) if param.offset else 0
        return array.reshape(-1)[first : first + int(np.prod(shape))].reshape(shape)

    def follow(call: Call, name: str, index: int) -> Any:
        pointee = params[name].pointee
        if pointee is None:
            raise AttributeError(f"{spec.module}::{spec.function} has no table of addresses '{name}'")
        entry = tables[name][index]
        return None if entry is None else entry.reshape(tuple(int(n) for n in pointee.shape(call)))

    call = Call(grid, block, shared, bind, follow)
    for name, value in scalars.items():
        setattr(call, name, value)
    return call


def _plain_call(scalars: Mapping[str, Any], arrays: Mapping[str, Any], grid: Dim3, block: Dim3, shared: int) -> Call:
    call = Call(grid, block, shared)
    for name, value in (*scalars.items(), *arrays.items()):
        setattr(call, name, value)
    return call


def _dims(size: int | Sequence[int]) -> Dim3:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


class _Launch:
    """A launch in the making: arguments as buffers and scalars, in the kernel's order."""

    def __init__(self, gpu: GpuBackend, module: str, function: str, spec: KernelSpec | None) -> None:
        self.gpu, self.spec, self.name = gpu, spec, f"{module}::{function}"
        self.kernel = gpu.kernel(module, function)
        self.scalars: dict[str, Any] = {}
        self.buffers: dict[str, _Buffer | None] = {}
        self.aliases: dict[str, str] = {}
        self.tables: dict[str, Sequence[Array | None]] = {}
        self._entries: list[tuple[str, Array, Output]] = []
        self._grid: Dim3 = (1, 1, 1)
        self._fire: Callable[[Dim3], None] = lambda grid: None

    def order(self, arguments: Mapping[str, Any]) -> list[str]:
        """The parameter names in the order of the launch."""
        if self.spec is not None:
            names = [param.name for param in self.spec.params]
            missing = [p.name for p in self.spec.params if p.name not in arguments and p.access != "w"]
        else:
            params = self.gpu.signature(self.kernel).params
            # PTX alone has no names: then the arguments come in the kernel's order.
            known = all(param.ctype for param in params)
            names = [param.name for param in params] if known else list(arguments)
            missing = [name for name in names if name not in arguments]
            if len(names) != len(params):
                raise InvalidArgumentError("args", sorted(arguments), f"{self.name} has {len(params)} parameters")
        unknown = [name for name in arguments if name not in names]
        if missing or unknown:
            raise InvalidArgumentError("args", sorted(arguments), f"{self.name} takes {', '.join(names)}")
        return names

    def make(
        self,
        arguments: Mapping[str, Argument],
        names: Sequence[str],
        rng: np.random.Generator,
        grid: Dim3,
    ) -> None:
        """Sort `arguments` into scalars and buffers; draw and poison what is not given."""
        accesses = {p.name: p for p in self.spec.params} if self.spec is not None else {}
        for name in names:
            value = arguments.get(name)
            param = accesses.get(name)
            if param is not None and not param.is_pointer:
                self.scalars[name] = float(np.float32(value)) if param.ctype == "f32" else value  # type: ignore[arg-type]
            elif isinstance(value, (bool, int, float, np.integer, np.floating)):
                self.scalars[name] = value
        contents: dict[str, Array | None] = {}
        for name in names:
            if name in self.scalars:
                continue
            value = arguments.get(name)
            if isinstance(value, Alias):
                self.aliases[name] = value.name
            elif isinstance(value, Table):
                self.tables[name] = value.entries
                contents[name] = np.zeros(len(value.entries), np.uint64)  # the addresses come with the buffers
            elif isinstance(value, np.ndarray):
                contents[name] = np.ascontiguousarray(value)
            elif isinstance(value, Poisoned):
                contents[name] = _poison(value.shape, value.dtype)
            elif value is None and (name in arguments or name not in accesses):
                contents[name] = None
        for name, target in self.aliases.items():
            if target not in names:
                raise InvalidArgumentError(name, target, f"{self.name} has no such parameter")
        shared = contents | {name: contents.get(target) for name, target in self.aliases.items()}
        for name in names:  # what is left has the catalogue's shape, which may depend on the contents above
            if name in self.scalars or name in shared:
                continue
            param = accesses.get(name)
            if param is None or param.shape is None:
                raise InvalidArgumentError(name, arguments.get(name), "a shape is needed: an array or Poisoned(shape)")
            assert self.spec is not None
            call = _catalogue_call(self.spec, self.scalars, shared, grid, (1, 1, 1), 0, self.tables)
            shape = tuple(int(n) for n in param.shape(call))
            value = arguments.get(name)
            made = _poison(shape, param.dtype) if value is None else value(rng, shape, param.dtype)  # type: ignore[operator]
            contents[name] = shared[name] = made
        for name, content in contents.items():
            param = accesses.get(name)
            users = [name, *(alias for alias, target in self.aliases.items() if target == name)]
            written = not accesses or any(accesses[user].access != "r" for user in users)
            if content is not None and param is not None and content.dtype != param.dtype:
                raise InvalidArgumentError(name, content.dtype, f"{self.name} has {param.dtype} there")
            if param is not None and param.pointee is not None and name not in self.tables:
                raise InvalidArgumentError(name, type(arguments.get(name)).__name__, "a Table of arrays is needed")
            self.buffers[name] = None if content is None else _Buffer(content, written)

    def arrays(self, copy: bool) -> dict[str, Array | None]:
        """The contents before the launch, by parameter; with `copy` in arrays that may be written."""
        owned = {
            name: None if buffer is None else buffer.before.copy() if copy else buffer.before
            for name, buffer in self.buffers.items()
        }
        return owned | {name: owned[target] for name, target in self.aliases.items()}

    def run(self, names: Sequence[str], grid: Dim3, block: Dim3, shared: int, shift: int) -> None:
        """Copy in, launch, wait."""
        align = {p.name: p.align for p in self.spec.params} if self.spec is not None else {}
        self._upload_entries()
        pointers: dict[str, DevicePtr] = {}
        for name, buffer in self.buffers.items():
            if buffer is None:
                pointers[name] = DevicePtr.NULL
                continue
            users = [name, *(alias for alias, target in self.aliases.items() if target == name)]
            most = max((align.get(user, 1) for user in users), default=1)
            own = shift if shift % max(most, buffer.before.itemsize) == 0 else 0
            content = np.asarray(buffer.before)
            # A backend on the CPU sees what lies beside an allocation, and says who wrote there.
            buffer.device = Output(
                self.gpu,
                content.shape,
                content.dtype,
                content,
                own,
                guard=self.gpu.name == "cuda" and buffer.written,
                label=name,
            )
            pointers[name] = buffer.device.ptr
        pointers |= {name: pointers[target] for name, target in self.aliases.items()}
        args = [pointers[name] if name in pointers else self.scalars[name] for name in names]
        stream = self.gpu.default_stream()
        limit = self.gpu.function_attributes(self.kernel).shared_dynamic_max if shared else 0
        if shared > limit:
            self.gpu.set_kernel_max_dynamic_smem(self.kernel, shared)

        def fire(size: Dim3) -> None:
            self.gpu.launch_typed(self.kernel, size, block, shared, stream, args)
            self.gpu.synchronize(stream)

        self._grid, self._fire = grid, fire
        fire(grid)

    def _upload_entries(self) -> None:
        """The buffers that tables point at, each ending where its allocation ends; their addresses go to the tables."""
        for name, entries in self.tables.items():
            table = self.buffers[name]
            assert table is not None
            for index, content in enumerate(entries):
                if content is None:
                    continue
                label = f"{name}[{index}]"
                device = Output(self.gpu, content.shape, content.dtype, content, guard=False, label=label)
                self._entries.append((label, content, device))
                table.before[index] = device.ptr.address

    def compare(
        self, expected: Mapping[str, Array | None], bounds: Mapping[str, Bound], call: Call
    ) -> list[Difference]:
        """Every buffer against what it should hold now."""
        found: list[Difference] = []
        for name, buffer in self.buffers.items():
            if buffer is None or buffer.device is None:
                continue
            try:
                got = buffer.device.read()
            except AssertionError as error:
                found.append(Difference(self.name, name, str(error)))
                continue
            want = expected[name]
            assert want is not None
            users = [name, *(alias for alias, target in self.aliases.items() if target == name)]
            bound = next((bounds[user] for user in users if user in bounds), bits())
            wrong = bound.difference(got, want.reshape(got.shape), call)
            if wrong is not None:
                found.append(Difference(self.name, name, wrong.text + self._origin(name, got, wrong.at)))
        for label, content, device in self._entries:
            wrong = bits().difference(device.read(), content, call)
            if wrong is not None:
                found.append(Difference(self.name, label, wrong.text))
        return found

    def _origin(self, name: str, got: Array, at: int) -> str:
        """Who wrote the worst element, in words; "" where that cannot be told."""
        buffer = self.buffers[name]
        assert buffer is not None
        if got.tobytes() == buffer.before.tobytes():
            return "; nothing was written"
        if self.gpu.name != "emulated" or not got.size:
            return ""

        def run(size: Dim3) -> Array:
            for each in self.buffers.values():
                if each is not None and each.device is not None:
                    self.gpu.copy_h2d(each.before.reshape(-1).view(np.uint8), each.device.ptr)
            self._fire(size)
            assert buffer is not None
            assert buffer.device is not None
            return buffer.device.read()

        try:
            block = writing_block(run, self._grid, buffer.before, got, at)
        except (SparkError, AssertionError):  # say a kernel that wants one grid and no other
            block = None
        return f"; written by block {block}" if block is not None else ""

    def release(self) -> None:
        """Free the buffers."""
        for _, _, device in self._entries:
            self.gpu.free(device.base)
        for buffer in self.buffers.values():
            if buffer is not None and buffer.device is not None:
                self.gpu.free(buffer.device.base)


@contextmanager
def _launched(
    gpu: GpuBackend, spec: KernelSpec, case: Case, rng: np.random.Generator
) -> Iterator[tuple[_Launch, Callable[[Mapping[str, Array | None]], Call]]]:
    """The case's launch after it ran, and how to see arrays as its call; the buffers go with the context."""
    launch = _Launch(gpu, spec.module, spec.function, spec)
    try:
        arguments = case.arguments(rng)
        names = launch.order(arguments)
        launch.make(arguments, names, rng, case.grid)
        sketch = _catalogue_call(spec, launch.scalars, launch.arrays(False), case.grid, (1, 1, 1), 0, launch.tables)
        geometry = spec.geometry(sketch)
        launch.run(names, *geometry, case.shift)
        yield launch, lambda arrays: _catalogue_call(spec, launch.scalars, arrays, *geometry, launch.tables)
    finally:
        launch.release()


def run_case(gpu: GpuBackend, spec: KernelSpec, case: Case, rng: np.random.Generator) -> list[Difference]:
    """Launch `spec`'s kernel of the backend's set as `case` says, and compare with the reference of `spec`.

    Returns what differs. Errors of the launch (KernelFaultError of a checked backend) are raised.
    """
    with _launched(gpu, spec, case, rng) as (launch, call), np.errstate(all="ignore"):
        expected = launch.arrays(copy=True)
        spec.run(call(expected))
        return launch.compare(expected, case.bounds, call(launch.arrays(False)))


def written_by(gpu: GpuBackend, spec: KernelSpec, case: Case, rng: np.random.Generator) -> dict[str, Array]:
    """What the case's launch leaves in each buffer that the kernel writes, by parameter.

    Two backends give the same for the same state of `rng`, as far as their arithmetic is the same.
    """
    with _launched(gpu, spec, case, rng) as (launch, _):
        return {
            name: buffer.device.read()
            for name, buffer in launch.buffers.items()
            if buffer is not None and buffer.device is not None and buffer.written
        }


class KernelCase:
    """Run a kernel once and assert that its outputs are right; the fixture `kernel_case` is one.

    args = {"input": Normal(), "weight": Normal(), "hidden_size": 100, "eps": 1e-6}
    kernel_case("norm", "rms_norm", grid=3, args=args, bounds={"output": within(1)})
    """

    def __init__(self, gpu: GpuBackend, rng: np.random.Generator) -> None:
        self._gpu, self._rng = gpu, rng

    def __call__(
        self,
        module: str,
        function: str,
        *,
        args: Mapping[str, Argument],
        bounds: Mapping[str, Bound],
        reference: Reference | None = None,
        grid: int | Sequence[int] = 1,
        block: int | Sequence[int] = 1,
        shared: int = 0,
        shift: int = 0,
    ) -> dict[str, Array]:
        """Launch and compare; AssertionError shows the worst element of each output that is wrong.

        Without `reference` the kernel must be in the catalogue, which then gives the expectation, the geometry (`grid`
        carries row counts alone) and the shapes of outputs. `reference(**arguments)` gets every argument by name, as
        NumPy arrays and numbers (a Table as its entries), and returns the expected array of the one parameter in
        `bounds`, or a mapping from parameter to array; parameters that it leaves out must not change. Returns the
        outputs.
        """
        spec = find(module, function) if reference is None else None
        if reference is None and spec is None:
            raise InvalidArgumentError("reference", None, f"{module}::{function} is not in the catalogue: give one")
        launch = _Launch(self._gpu, module, function, spec)
        try:
            names = launch.order(args)
            launch.make(args, names, self._rng, _dims(grid))
            unknown = [name for name in bounds if name not in names]
            if unknown:
                raise InvalidArgumentError("bounds", unknown, f"{launch.name} takes {', '.join(names)}")
            geometry = _dims(grid), _dims(block), shared
            if spec is not None:
                arrays, tables = launch.arrays(False), launch.tables
                sketch = _catalogue_call(spec, launch.scalars, arrays, _dims(grid), (1, 1, 1), 0, tables)
                geometry = spec.geometry(sketch)
            launch.run(names, *geometry, shift)
            expected = launch.arrays(copy=True)
            with np.errstate(all="ignore"):
                if spec is not None:
                    spec.run(_catalogue_call(spec, launch.scalars, expected, *geometry, launch.tables))
                    before = _catalogue_call(spec, launch.scalars, launch.arrays(False), *geometry, launch.tables)
                else:
                    assert reference is not None
                    _apply(reference, launch, expected, bounds)
                    before = _plain_call(launch.scalars, launch.arrays(False) | launch.tables, *geometry)
                found = launch.compare(expected, bounds, before)
            assert not found, "\n".join(map(str, found))
            return {
                name: buffer.device.read()
                for name, buffer in launch.buffers.items()
                if buffer is not None and buffer.device is not None
            }
        finally:
            launch.release()


def _apply(
    reference: Reference, launch: _Launch, expected: dict[str, Array | None], bounds: Mapping[str, Bound]
) -> None:
    """Put what a user's reference returns where the kernel would."""
    result = reference(**launch.scalars, **(launch.arrays(copy=True) | launch.tables))
    if not isinstance(result, Mapping):
        if len(bounds) != 1:
            raise InvalidArgumentError("bounds", sorted(bounds), "with several outputs the reference returns a mapping")
        result = {next(iter(bounds)): result}
    for name, value in result.items():
        target = expected.get(name)
        if target is None:
            raise InvalidArgumentError("reference", name, f"{launch.name} has no such buffer")
        target[...] = np.asarray(value).astype(target.dtype).reshape(target.shape)
