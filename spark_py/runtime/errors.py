# SPDX-License-Identifier: AGPL-3.0-only
"""Every error that spark_py raises, under one base class.

Each error carries the values a person needs to act on as attributes (sizes, names, device, the compiler's log) and
says them in its message. The Rust runtime has untyped messages only; the situations are those of its fault table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class SparkError(Exception):
    """Base class of every error raised by spark_py."""


class InvalidArgumentError(SparkError, ValueError):
    """A value outside its documented range. `name`, `value` and `limit` say which, what and the bound."""

    def __init__(self, name: str, value: object, limit: str) -> None:
        self.name, self.value, self.limit = name, value, limit
        super().__init__(f"{name} is {value!r}: {limit}")


class InvalidPointerError(SparkError, ValueError):
    """DevicePtr arithmetic that leaves 0 .. 2**64-1, starts at NULL, or uses something that is no integer."""


class BackendUnavailableError(SparkError):
    """The backend asked for cannot run on this machine; the message says what is missing and how to get it."""


class BackendClosedError(SparkError):
    """An operation on a backend after its teardown."""


class UnsupportedError(SparkError):
    """A request that this backend or device does not offer."""


# ---------------------------------------------------------------- memory


class OutOfDeviceMemoryError(SparkError, MemoryError):
    """Allocation failed. `requested`, `free` and `total` are bytes."""

    def __init__(self, requested: int, free: int, total: int, device: str, detail: str = "") -> None:
        self.requested, self.free, self.total, self.device = requested, free, total, device
        tail = f" ({detail})" if detail else ""
        super().__init__(f"out of memory on {device}: requested {requested} bytes, {free} free of {total}{tail}")


class PointerError(SparkError):
    """A device address that is not usable for what was asked. `address` is the number."""

    def __init__(self, message: str, address: int) -> None:
        self.address = address
        super().__init__(message)


class UnknownPointerError(PointerError):
    """The address lies in no live allocation of this backend."""


class FreedPointerError(UnknownPointerError):
    """The address lies in an allocation that was freed."""


class DoubleFreeError(PointerError):
    """`free` of an allocation that was freed before, or of an address inside an allocation."""


class OutOfBoundsError(PointerError):
    """A range that starts inside a live allocation and runs past its end. Sizes are bytes."""

    def __init__(self, message: str, address: int, nbytes: int, base: int, size: int) -> None:
        self.nbytes, self.base, self.size = nbytes, base, size
        super().__init__(message, address)


class MisalignedPointerError(PointerError):
    """The address is not a multiple of what the kernel's wide loads need (`alignment`, bytes)."""

    def __init__(self, message: str, address: int, alignment: int) -> None:
        self.alignment = alignment
        super().__init__(message, address)


class RedZoneError(PointerError):
    """Bytes beside an allocation were overwritten; found when it was freed or checked."""


class LeakError(SparkError):
    """Allocations were alive at teardown of a backend opened with `on_leak="raise"`."""


# ---------------------------------------------------------------- buffers, scratch and the KV cache


class CapacityError(InvalidArgumentError):
    """A count or length beyond what a buffer arena or a layout was built for. `capacity` is the limit as a number."""

    def __init__(self, name: str, value: int, capacity: int, what: str) -> None:
        self.capacity = capacity
        super().__init__(name, value, f"the limit is {capacity}, {what}")


class ReleasedError(SparkError):
    """A buffer arena, scratch lease or KV pool that was used after its release."""


class ScratchOverlapError(SparkError):
    """A scratch region that would run into a region on live lease. Both are (name, offset, nbytes) in bytes."""

    def __init__(self, region: tuple[str, int, int], held: tuple[str, int, int]) -> None:
        self.region, self.held = region, held
        wanted, live = (f"{name} [{at}, {at + size})" for name, at, size in (region, held))
        super().__init__(f"scratch region {wanted} runs into {live}, which is on lease: release that first")


class ScratchBoundsError(SparkError):
    """A scratch region that ends past the scratch buffer. `region` is (name, offset, nbytes), `size` the buffer's."""

    def __init__(self, region: tuple[str, int, int], size: int) -> None:
        self.region, self.size = region, size
        name, at, nbytes = region
        super().__init__(f"scratch region {name} [{at}, {at + nbytes}) does not fit in {size} bytes of scratch")


class KvCacheError(SparkError):
    """Base of what goes wrong between a sequence and the blocks of a KV pool. State is unchanged when it is raised."""


class KvCacheExhausted(KvCacheError):  # noqa: N818 - the state of a pool, and the engine's word for it
    """A pool has fewer free blocks than asked for. `need` and `free` count blocks; nothing was taken."""

    def __init__(self, need: int, free: int) -> None:
        self.need, self.free = need, free
        super().__init__(f"KV cache exhausted: {free or 'no'} free blocks, {need} needed")


class KvBlockError(KvCacheError):
    """An operation on a block that does not allow it. `block` is its index."""

    def __init__(self, message: str, block: int) -> None:
        self.block = block
        super().__init__(message)


class KvBlockRangeError(KvBlockError):
    """A block index outside the pool. `num_blocks` is the pool's size."""

    def __init__(self, block: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        have = f"blocks 0 .. {num_blocks - 1}" if num_blocks else "no blocks, since it was released"
        super().__init__(f"KV block {block}: the pool has {have}", block)


class KvBlockFreeError(KvBlockError):
    """A reference is added to a block that nobody holds."""


class KvDoubleFreeError(KvBlockError):
    """More references of a block are dropped than are held."""


# ---------------------------------------------------------------- handles


class HandleError(SparkError):
    """A kernel, graph, stream or event handle that cannot be used."""


class NullHandleError(HandleError):
    """Handle 0: an optional kernel or graph that was never resolved."""


class ForeignHandleError(HandleError):
    """The handle belongs to another backend or device."""


class ReleasedHandleError(HandleError):
    """The handle was destroyed, or its backend was closed."""


# ---------------------------------------------------------------- launches


class LaunchError(SparkError):
    """A launch that was refused. Nothing ran. `kernel` is "module::function", `parameter` the one at fault or ""."""

    def __init__(self, kernel: str, message: str, parameter: str = "") -> None:
        self.kernel, self.parameter = kernel, parameter
        where = f"{kernel}: parameter '{parameter}': " if parameter else f"{kernel}: "
        super().__init__(where + message)


class ArityError(LaunchError):
    """More or fewer arguments than the kernel has parameters."""


class ArgumentTypeError(LaunchError, TypeError):
    """An argument whose type or width is not the parameter's."""


class ArgumentRangeError(LaunchError, ValueError):
    """A number that does not fit the parameter."""


class ArgumentPointerError(LaunchError):
    """A pointer argument that lies in no live allocation, or whose range or alignment is wrong for the kernel."""


class GeometryError(LaunchError, ValueError):
    """Grid, block or shared memory of zero or beyond the device's or the kernel's limit."""


# ---------------------------------------------------------------- capture and graphs


class CaptureError(SparkError):
    """Base of capture errors."""


class IllegalDuringCaptureError(CaptureError):
    """An operation that a capturing stream does not allow; refused before the driver saw it."""

    def __init__(self, operation: str, way_out: str) -> None:
        self.operation, self.way_out = operation, way_out
        super().__init__(f"{operation} is not allowed while a stream captures: {way_out}")


class CaptureStateError(CaptureError):
    """begin, end or abort of a capture in a state that does not allow it."""


# ---------------------------------------------------------------- kernel sets and compiling


class KernelSetError(SparkError):
    """Base of what goes wrong between a kernel folder and a loaded function."""


class ManifestError(KernelSetError):
    """kernels.toml or KERNEL.toml is missing, is not valid TOML, or names what does not exist. `path` is the file."""

    def __init__(self, path: Path | str, message: str) -> None:
        self.path = Path(path)
        super().__init__(f"{path}: {message}")


class ModuleNotFoundInSetError(KernelSetError, LookupError):
    """The kernel set has no module of that name. `present` lists those it has."""

    def __init__(self, module: str, present: Sequence[str], source: str) -> None:
        self.module, self.present = module, tuple(present)
        super().__init__(f"no module '{module}' in {source}; present: {', '.join(present) or 'none'}")


class FunctionNotFoundError(KernelSetError, LookupError):
    """The module has no such `extern "C"` entry. `present` lists those it has."""

    def __init__(self, module: str, function: str, present: Sequence[str], source: str, hint: str = "") -> None:
        self.module, self.function, self.present = module, function, tuple(present)
        tail = f"; {hint}" if hint else ""
        super().__init__(
            f"no function '{function}' in module '{module}' ({source}); present: {', '.join(present) or 'none'}{tail}"
        )


class CompileError(KernelSetError):
    """The compiler refused a source. `path`, `line` (0 when unknown), `arch` and the whole `log`."""

    def __init__(self, path: Path | str, arch: str, log: str, line: int = 0, summary: str = "") -> None:
        self.path, self.arch, self.log, self.line = Path(path), arch, log, line
        where = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{where}: does not compile for {arch}: {summary or 'see log'}\n{log}".rstrip())


class HeaderNotFoundError(CompileError):
    """A header was not found. `header`, the `folders` that were searched, and the optional `package` that would bring
    it, where that is not installed."""

    def __init__(
        self,
        path: Path | str,
        arch: str,
        log: str,
        line: int,
        header: str,
        folders: Sequence[str],
        versions: str,
        package: str = "",
    ) -> None:
        self.header, self.folders, self.package = header, tuple(folders), package
        super().__init__(
            path, arch, log, line, f"header '{header}' not found in {', '.join(folders) or 'no folder'} ({versions})"
        )


class ToolkitMismatchError(KernelSetError):
    """The headers come from another CUDA toolkit than the compiler in use. Both versions are attributes."""

    def __init__(self, message: str, nvrtc: tuple[int, int], headers: tuple[int, int]) -> None:
        self.nvrtc, self.headers = nvrtc, headers
        super().__init__(message)


class ImageError(KernelSetError):
    """A PTX or cubin that is empty, truncated, or that the driver refused. `path` and `arch` say which."""

    def __init__(self, path: Path | str, arch: str, message: str, log: str = "") -> None:
        self.path, self.arch, self.log = Path(path), arch, log
        super().__init__(f"{path} ({arch}): {message}" + (f"\n{log}" if log else ""))


class ArchMismatchError(KernelSetError):
    """The kernel needs another architecture than the device has. `compiled` and `device` are sm names."""

    def __init__(self, compiled: str, device: str, message: str) -> None:
        self.compiled, self.device = compiled, device
        super().__init__(message)


class SignatureMismatchError(KernelSetError):
    """A parameter list differs from the catalogue's, or the source text's from the PTX's."""


# ---------------------------------------------------------------- driver


class CudaError(SparkError):
    """A CUDA call failed. `operation`, `code` and `name` are the driver's."""

    def __init__(self, operation: str, code: int, name: str, detail: str = "") -> None:
        self.operation, self.code, self.name = operation, code, name
        super().__init__(f"{operation} failed: {name} ({code})" + (f": {detail}" if detail else ""))


class DeviceLostError(CudaError):
    """A sticky fault: the context is dead and every later call fails with the same reason."""


# ---------------------------------------------------------------- weights


class WeightError(SparkError):
    """Base of what goes wrong between a checkpoint's files and its tensors on the device."""


class WeightFileError(WeightError):
    """A checkpoint file or folder that is missing, damaged, unreadable or changed. `path` is the file, `tensor` the
    tensor at fault or "" where the whole file is."""

    def __init__(self, path: Path | str, message: str, tensor: str = "") -> None:
        self.path, self.tensor = Path(path), tensor
        super().__init__(f"{path}: " + (f"tensor {tensor!r}: " if tensor else "") + message)


class WeightIndexError(WeightFileError):
    """An index file that is damaged, or that the shards contradict. `path` is the index."""


class DuplicateWeightError(WeightFileError):
    """Two shards hold a tensor of one name and differ in dtype, shape or bytes. `path` and `other` are the shards."""

    def __init__(self, path: Path | str, other: Path | str, tensor: str, message: str) -> None:
        self.other = Path(other)
        super().__init__(path, message, tensor)


class UnsupportedWeightDtypeError(WeightFileError):
    """A tensor whose safetensors dtype has no place on the device. `dtype` is its name in the header."""

    def __init__(self, path: Path | str, tensor: str, dtype: str, supported: Sequence[str]) -> None:
        self.dtype = dtype
        super().__init__(path, f"dtype {dtype} is not supported; supported: {', '.join(supported)}", tensor)


class MissingWeightError(WeightError, LookupError):
    """Tensors that no file holds. `missing` lists them all; `near` maps some of them to names that look alike."""

    def __init__(self, missing: Sequence[str], near: Mapping[str, Sequence[str]], source: str, hint: str = "") -> None:
        self.missing, self.near = tuple(missing), {name: tuple(names) for name, names in near.items()}
        lines = [
            f"  {name!r}" + (f" (there is {', '.join(map(repr, self.near[name]))})" if self.near.get(name) else "")
            for name in self.missing
        ]
        # The first line stands alone where only one is shown.
        count = "1 tensor is" if len(lines) == 1 else f"{len(lines)} tensors are"
        some = ", ".join(map(repr, self.missing[:3])) + (", ..." if len(lines) > 3 else "")
        super().__init__("\n".join([f"{count} not in {source}: {some}", *lines, *([hint] if hint else [])]))


class WeightNotLoadedError(WeightError, LookupError):
    """A tensor that a file holds and that was not uploaded, or was removed since. `tensor` is its name."""

    def __init__(self, tensor: str, path: Path | str) -> None:
        self.tensor, self.path = tensor, Path(path)
        super().__init__(f"tensor {tensor!r} is in {path} but not on the device: pass its name to load")


class WeightFormatError(WeightError):
    """A tensor of a checkpoint whose type, shape or scales make no weight that can be read. `tensor` is its name."""

    def __init__(self, tensor: str, message: str) -> None:
        self.tensor = tensor
        super().__init__(f"tensor {tensor!r}: {message}")


class MissingScaleError(WeightFormatError, LookupError):
    """A quantised tensor without its scale. `looked_for` lists the names that one would have."""

    def __init__(self, tensor: str, dtype: str, looked_for: Sequence[str]) -> None:
        self.dtype, self.looked_for = dtype, tuple(looked_for)
        names = " or ".join(map(repr, looked_for))
        super().__init__(tensor, f"it is {dtype} and has no scale: {names} is needed")


class AmbiguousScaleError(WeightFormatError):
    """Several tensors of which one alone can be right: scales, or forms of one weight. `found` lists them."""

    def __init__(self, tensor: str, found: Sequence[str]) -> None:
        self.found = tuple(found)
        super().__init__(tensor, f"only one of {', '.join(map(repr, found))} can belong to it")


class WeightScaleError(WeightFormatError):
    """A scale that does not fit its tensor. `scale` is its name."""

    def __init__(self, tensor: str, scale: str, message: str) -> None:
        self.scale = scale
        super().__init__(tensor, f"scale {scale!r} {message}")


class ScaleDtypeError(WeightScaleError):
    """A scale whose type is not one that the tensor's format has. `dtype` is its type."""

    def __init__(self, tensor: str, scale: str, dtype: str, needed: str) -> None:
        self.dtype = dtype
        super().__init__(tensor, scale, f"is {dtype}: {needed} is needed")


class ScaleShapeError(WeightScaleError):
    """A scale of a shape that does not fit the tensor's. `shape` is its own, `allowed` lists those that would do."""

    def __init__(
        self,
        tensor: str,
        weight: tuple[int, ...],
        scale: str,
        shape: tuple[int, ...],
        allowed: Sequence[tuple[int, ...]],
    ) -> None:
        self.shape, self.allowed = shape, tuple(allowed)
        fits = " or ".join(str(list(one)) for one in allowed)
        super().__init__(tensor, scale, f"has shape {list(shape)}: {fits} is needed for a weight {list(weight)}")


class ScaleValueError(WeightScaleError):
    """A scale that holds a number which no scale is: NaN, infinite, negative, or one of the opposite convention (a
    divisor where a multiplier belongs). `value` is the number."""

    def __init__(self, tensor: str, scale: str, value: float, message: str) -> None:
        self.value = value
        super().__init__(tensor, scale, message)


class IgnoredModuleError(WeightFormatError):
    """A quantised tensor of a module that the checkpoint's configuration excludes from quantisation. `pattern` is the
    entry that covers it."""

    def __init__(self, tensor: str, dtype: str, pattern: str) -> None:
        self.dtype, self.pattern = dtype, pattern
        super().__init__(tensor, f"it is {dtype}, but ignore_modules has {pattern!r}, which keeps it BF16")


class UnreadScaleError(WeightError):
    """Scales of a checkpoint that nothing applied: the weights that they belong to were read as something else.
    `tensors` lists them all."""

    def __init__(self, tensors: Sequence[str], source: str) -> None:
        self.tensors = tuple(tensors)
        some = ", ".join(map(repr, self.tensors[:8])) + (", ..." if len(self.tensors) > 8 else "")
        super().__init__(f"{len(self.tensors)} scales in {source} were not applied to any weight: {some}")


# ---------------------------------------------------------------- models


class ConfigError(SparkError, ValueError):
    """A config.json that cannot be used. `source` is the file, `field` the one at fault or "", `value` its value."""

    def __init__(self, source: Path | str, message: str, field: str = "", value: object = None) -> None:
        self.source, self.field, self.value = source, field, value
        super().__init__(f"{source}: {message}")


class ProposerStateError(SparkError):
    """A draft proposer was asked for something that the state of the sequence does not allow; nothing changed."""


# ---------------------------------------------------------------- what a kernel did wrong, as the CPU emulation sees it


@dataclass(frozen=True, slots=True)
class FaultAccess:
    """One side of a fault: `block` and `thread` as (x, y, z), `verb` ("reads", "writes", "updates" or ""), and `line`
    as "file:line" of the source, "" where it is not known."""

    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    verb: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        verb = f" {self.verb}" if self.verb else ""
        return f"block {self.block} thread {self.thread}{verb}{where}"


class KernelFaultError(SparkError):
    """A kernel did what CUDA leaves undefined; the launch was ended, the backend goes on.

    `kernel` is "module::function". `access` is who did it and `other` the second thread where two are concerned.
    `buffer` names the memory ("" where none is), `offset` (None without a buffer) and `nbytes` say which bytes of it.
    """

    def __init__(
        self,
        kernel: str,
        message: str,
        *,
        access: FaultAccess | None = None,
        other: FaultAccess | None = None,
        buffer: str = "",
        offset: int | None = None,
        nbytes: int = 0,
        address: int = 0,
    ) -> None:
        self.kernel, self.access, self.other = kernel, access, other
        self.buffer, self.offset, self.nbytes, self.address = buffer, offset, nbytes, address
        parts = [f"{kernel}: {message}"]
        if access is not None:
            parts.append(str(access))
        if other is not None:
            parts.append(f"against {other}")
        if buffer:
            parts.append(f"byte {offset} of {buffer}")
        elif address:
            parts.append(f"address {address:#x}, near no buffer")
        super().__init__("; ".join(parts))


class DataRaceError(KernelFaultError):
    """Two threads of a block use the same bytes, one of them writes, and no barrier or __syncwarp is between."""


class BlockOverlapError(KernelFaultError):
    """Two blocks use the same bytes of a buffer and one of them writes: their order is nobody's to say."""


class KernelBoundsError(KernelFaultError):
    """A read or write outside of every live allocation, or past the end of shared memory or an array."""


class KernelAlignmentError(KernelFaultError):
    """An access to an address that is no multiple of what its type needs."""


class UninitializedSharedError(KernelFaultError):
    """A read of shared memory that no thread of the block has written."""


class BarrierDivergenceError(KernelFaultError):
    """Not all threads of a block come to the same barrier."""


class KernelDeadlockError(KernelFaultError):
    """No thread of a block can go on; the message says who waits where."""


class WarpMaskError(KernelFaultError):
    """Lanes of a warp call different collectives, or one whose mask or source lane does not fit who takes part."""


class KernelTimeoutError(KernelFaultError):
    """A launch that ran longer than the backend allows: an endless loop, or a wait for what no other thread does."""


class KernelCrashError(KernelFaultError):
    """A kernel used memory that is not there, divided by zero, or overflowed its stack."""


class KernelTrapError(KernelFaultError):
    """A kernel called __trap(), or an assert of it failed."""


class KernelResourceError(KernelFaultError):
    """The CPU emulation has no memory for a launch; nothing ran."""


class DependenceError(KernelFaultError):
    """A kernel of a `dependent` module stores, reads what is no weight, or ends before it waits for those before it."""
