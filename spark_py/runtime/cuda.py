# SPDX-License-Identifier: AGPL-3.0-only
"""CudaBackend: the runtime on an NVIDIA GPU, through CuPy.

Twin of `AtlasCudaBackend` in `gpu_impl.rs`. Memory comes from cudaMalloc without a pool, streams are the backend's
own, captures are relaxed. The only file that imports CuPy for more than its compiler.

In a capture, kernels of a `dependent` module are launched so that they may start while the one before them still runs
(compute capability 9.0 and CUDA 12.3 of the driver); `SPARK_PY_DEPENDENT=0` leaves that out.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import catalog
from ._driver import dependent_launcher
from .arch import arch_of
from .audit import KernelAudit
from .checked import CheckedBackend
from .compiled import CompiledModule
from .cubin_cache import CubinCache
from .cuda_images import Image, load_image
from .cuda_query import DEVICE_ATTRIBUTES, MAX_DYNAMIC_SHARED, device_limits, function_attributes
from .device import Dim3, Launcher, LoadedKernel, RawDevice
from .errors import (
    BackendUnavailableError,
    CudaError,
    DeviceLostError,
    ImageError,
    InvalidArgumentError,
    OutOfDeviceMemoryError,
    SparkError,
    UnsupportedError,
)
from .gpu import FunctionAttributes
from .manifest import KernelSet
from .modules import compile_module, function_not_found
from .plan import Layout
from .signature import Signature
from .staging import StagingPool
from .toolkit import check_one_cupy, install_line

__all__ = ["CudaBackend", "CudaDevice", "probe"]

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_ATTACH_GLOBAL = 1
_HOST_ALLOC_FLAGS = 3  # portable and mapped
_DEPENDENT = "SPARK_PY_DEPENDENT"
_DEPENDENT_MAJOR = 9
_DEPENDENT_DRIVER = 12030  # CUDA 12.3: the first with programmatic dependences in graphs


class _Api:
    """CuPy's driver and runtime, imported on first use."""

    def __init__(self) -> None:
        check_one_cupy()
        try:
            import cupy
            from cupy_backends.cuda.api import driver, runtime
        except ImportError as error:
            raise BackendUnavailableError(
                f"CuPy cannot be imported ({error}): {install_line('cuda12')} (or cuda13)"
            ) from None
        self.cupy, self.driver, self.runtime = cupy, driver, runtime
        self.errors = (runtime.CUDARuntimeError, driver.CUDADriverError)


def _device_count(api: _Api) -> int:
    try:
        return int(api.runtime.getDeviceCount())
    except api.errors as error:
        raise BackendUnavailableError(f"no usable NVIDIA driver or GPU: {error}") from None


def probe() -> dict[str, Any]:
    """What `doctor` tells about CUDA: driver_version, devices (name, arch, memory in bytes, dependent: whether captures
    use dependent launches), error ("" when fine)."""
    from ._driver import driver_version

    found: dict[str, Any] = {"driver_version": None, "devices": [], "error": ""}
    version = driver_version()
    found["driver_version"] = ".".join(map(str, version)) if version else None
    try:
        api = _Api()
        for ordinal in range(_device_count(api)):
            properties = api.runtime.getDeviceProperties(ordinal)
            arch = arch_of((int(properties["major"]), int(properties["minor"])))
            memory = int(properties["totalGlobalMem"])
            dependent = _dependent_launches(int(properties["major"]), int(api.runtime.driverGetVersion()))
            device = {"name": properties["name"].decode(), "arch": arch, "memory": memory, "dependent": dependent}
            found["devices"].append(device)
    except SparkError as error:
        found["error"] = str(error)
    return found


def _dependent_launches(major: int, driver: int) -> bool:
    """Whether captures use dependent launches on a device of this major capability with this driver (12090: 12.9)."""
    value = os.environ.get(_DEPENDENT, "")
    if value not in ("", "0", "1"):
        raise InvalidArgumentError(_DEPENDENT, value, "0 or 1 is needed")
    return value != "0" and major >= _DEPENDENT_MAJOR and driver >= _DEPENDENT_DRIVER


def _arguments(kernel: LoadedKernel) -> tuple[Callable[..., None], bytearray, Any]:
    """(what packs a launch's values, the buffer it packs them into, the table of the arguments' addresses there)."""
    layout = Layout(kernel.signature)
    buffer = bytearray(max(layout.packed.size, 8))
    base = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
    table = (ctypes.c_void_p * max(len(layout.starts), 1))(*(base + start for _, start in layout.starts))
    return layout.packed.pack_into, buffer, table


class CudaDevice(RawDevice):
    """One GPU without checks."""

    name = "cuda"

    def __init__(self, ordinal: int, kernels: Path | str | None) -> None:
        self._api = _Api()
        self._runtime, self._driver = self._api.runtime, self._api.driver
        count = _device_count(self._api)
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or not 0 <= ordinal < count:
            raise InvalidArgumentError("ordinal", ordinal, f"this machine has {count} CUDA devices, 0 .. {count - 1}")
        self.ordinal = ordinal
        self._lost: DeviceLostError | None = None
        self._several = count > 1
        self._bound = threading.local()
        self._set = KernelSet.open(kernels)
        self._cache = CubinCache()
        self._driver_version = int(self._runtime.driverGetVersion())
        self._compiled: dict[Path, CompiledModule] = {}
        self._loaded: dict[Path, Image] = {}
        self._load_lock = threading.Lock()
        self.activate()
        self._major, self._minor = self._attribute("ComputeCapabilityMajor"), self._attribute("ComputeCapabilityMinor")
        self.dependent_launches = _dependent_launches(self._major, self._driver_version)
        self.limits = device_limits(self._attribute)
        self._staging = StagingPool(self)

    # ------------------------------------------------------------ calls and faults

    def activate(self) -> None:
        if self._several or not getattr(self._bound, "done", False):
            self._call("cudaSetDevice", self._runtime.setDevice, self.ordinal)
            self._bound.done = True

    def _call(self, operation: str, function: Callable[..., Any], *args: Any) -> Any:
        if self._lost is not None:
            raise self._lost
        try:
            return function(*args)
        except self._api.errors as error:
            raise self._error(operation, error) from None

    def _error(self, operation: str, error: Any) -> CudaError:
        """The typed error of a failed call. Whether the context is lost is decided by asking the device, never by the
        code: a query that works after the failure means an isolated one."""
        code, (name, _, detail) = int(error.status), str(error).partition(": ")
        try:
            self._runtime.memGetInfo()
        except self._api.errors:
            if self._lost is None:
                self._lost = DeviceLostError(operation, code, name, f"{detail}; the device is lost to this process")
            return self._lost
        return CudaError(operation, code, name, detail)

    def _attribute(self, name: str) -> int:
        number = DEVICE_ATTRIBUTES[name]
        return int(self._call("cudaDeviceGetAttribute", self._runtime.deviceGetAttribute, number, self.ordinal))

    # ------------------------------------------------------------ memory

    def _allocate(self, operation: str, function: Callable[..., Any], nbytes: int, *args: Any) -> int:
        try:
            return int(self._call(operation, function, nbytes, *args))
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = self.memory_info()
            raise OutOfDeviceMemoryError(nbytes, free, total, self._where(), operation) from None

    def _where(self) -> str:
        return f"cuda:{self.ordinal}"

    def alloc(self, nbytes: int) -> int:
        return self._allocate("cudaMalloc", self._runtime.malloc, nbytes)

    def alloc_managed(self, nbytes: int) -> int:
        return self._allocate("cudaMallocManaged", self._runtime.mallocManaged, nbytes, _ATTACH_GLOBAL)

    def free(self, address: int) -> None:
        self._call("cudaFree", self._runtime.free, address)

    def alloc_host(self, nbytes: int) -> int:
        address = self._allocate("cudaHostAlloc", self._runtime.hostAlloc, nbytes, _HOST_ALLOC_FLAGS)
        ctypes.memset(address, 0, nbytes)
        return address

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", self._runtime.freeHost, address)

    def host_to_device(self, address: int) -> int:
        attributes = self._call("cudaPointerGetAttributes", self._runtime.pointerGetAttributes, address)
        return int(attributes.devicePointer)

    # ------------------------------------------------------------ copies

    def h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        kind = self._runtime.memcpyHostToDevice
        self._call("cudaMemcpyAsync H2D", self._runtime.memcpyAsync, dst, src, nbytes, kind, stream)

    def h2d_staged(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._staging.upload(dst, src, nbytes, stream)

    def d2h(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        kind = self._runtime.memcpyDeviceToHost
        self._call("cudaMemcpyAsync D2H", self._runtime.memcpyAsync, dst, src, nbytes, kind, stream)

    def d2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        kind = self._runtime.memcpyDeviceToDevice
        self._call("cudaMemcpyAsync D2D", self._runtime.memcpyAsync, dst, src, nbytes, kind, stream)

    def d2d_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        kind = self._runtime.memcpyDeviceToDevice
        copy = self._runtime.memcpy2DAsync
        self._call("cudaMemcpy2DAsync", copy, dst, dst_pitch, src, src_pitch, width, height, kind, stream)

    def memset(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        self._call("cudaMemsetAsync", self._runtime.memsetAsync, dst, value, nbytes, stream)

    # ------------------------------------------------------------ streams and events

    def create_stream(self) -> int:
        flags = self._runtime.streamNonBlocking
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.streamCreateWithFlags, flags))

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", self._runtime.streamDestroy, stream)

    def sync_stream(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", self._runtime.streamSynchronize, stream)

    def create_event(self, timing: bool) -> int:
        flags = self._runtime.eventDefault if timing else self._runtime.eventDisableTiming
        return int(self._call("cudaEventCreateWithFlags", self._runtime.eventCreateWithFlags, flags))

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", self._runtime.eventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", self._runtime.eventRecord, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", self._runtime.streamWaitEvent, stream, event)

    def sync_event(self, event: int) -> None:
        self._call("cudaEventSynchronize", self._runtime.eventSynchronize, event)

    def query_event(self, event: int) -> bool:
        if self._lost is not None:
            raise self._lost
        try:
            # CuPy gives the status in some versions and raises in others.
            return not self._runtime.eventQuery(event)
        except self._api.errors as error:
            if error.status == _NOT_READY:
                return False
            raise self._error("cudaEventQuery", error) from None

    def elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("cudaEventElapsedTime", self._runtime.eventElapsedTime, start, end))

    # ------------------------------------------------------------ kernels

    def has_module(self, module: str) -> bool:
        return module in self._set.modules

    def known_kernels(self) -> Sequence[tuple[str, str]]:
        return self._set.known_kernels()

    def is_loaded(self, module: str, function: str) -> bool:
        source = self._set.modules.get(module)
        return source is not None and source.holding(function).path in self._loaded

    def load(self, module: str, function: str) -> LoadedKernel:
        files = self._set.module(module).files
        source = files[0].holding(function)
        with self._load_lock:
            if source.path not in self._loaded:
                arch = arch_of(self.compute_capability())
                compiled = compile_module(source, arch, self._cache, driver_version=self._driver_version)
                self._compiled[source.path] = compiled
                self._loaded[source.path] = self._load_image(source.path, compiled)
            compiled, image = self._compiled[source.path], self._loaded[source.path]
        if function not in compiled.signatures:
            present = {*compiled.signatures, *(name for file in files for name in file.functions)}
            raise function_not_found(source, function, sorted(present))
        signature = compiled.signatures[function]
        raw = self._call(f"cuModuleGetFunction {module}::{function}", image.module.get_function, function)
        attributes = self._function_attributes(raw.ptr)
        nullable = self._nullable(module, signature)
        dynamic = attributes.shared_dynamic_max
        return LoadedKernel(module, function, signature, raw, attributes, dynamic, nullable, dependent=source.dependent)

    def _load_image(self, path: Path, compiled: CompiledModule) -> Image:
        def load(image: bytes) -> Any:
            module = self._api.cupy.cuda.function.Module()
            try:
                module.load(image)
            except self._api.errors as error:
                raise ImageError(path, compiled.arch, f"the driver refused the {compiled.kind}: {error}") from None
            return module

        return load_image(self.ordinal, compiled.image, load)

    def _nullable(self, module: str, signature: Signature) -> tuple[bool, ...]:
        """Which pointers may be NULL: as the catalogue says, and any where it does not know the kernel."""
        spec = catalog.find(module, signature.function)
        if spec is None or len(spec.params) != len(signature.params):
            return (True,) * len(signature.params)
        return tuple(p.optional for p in spec.params)

    def _function_attributes(self, function: int) -> FunctionAttributes:
        def get(number: int) -> int:
            return int(self._call("cuFuncGetAttribute", self._driver.funcGetAttribute, number, function))

        return function_attributes(get)

    def plan(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool) -> Launcher:
        """A closure that packs one launch's values and queues it; its argument buffer is reused under a lock."""
        pack, buffer, table = _arguments(kernel)
        tail = (ctypes.addressof(table),) if cooperative else (ctypes.addressof(table), 0)
        call = self._driver.launchCooperativeKernel if cooperative else self._driver.launchKernel
        lock, errors = threading.Lock(), self._api.errors
        before = (kernel.raw.ptr, *grid, *block, shared)
        several, bound = self._several, self._bound
        # The module and the argument table live as long as the closure.
        keep = (kernel.raw, table)

        def launch(stream: int, pointers: Sequence[int], scalars: Sequence[Any], _keep: object = keep) -> None:
            if several or not getattr(bound, "done", False):
                self.activate()
            with lock:
                pack(buffer, 0, *pointers, *scalars)
                try:
                    call(*before, stream, *tail)
                except errors as error:
                    raise self._error(f"launch of {kernel.name} (grid {grid}, block {block})", error) from None

        return launch

    def plan_dependent(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int) -> Launcher | None:
        if not self.dependent_launches:
            return None
        pack, buffer, table = _arguments(kernel)
        operation = f"launch of {kernel.name} (grid {grid}, block {block})"
        call = dependent_launcher(operation, kernel.raw.ptr, (*grid, *block, shared), ctypes.addressof(table))
        lock, keep = threading.Lock(), (kernel.raw, table)

        def launch(stream: int, pointers: Sequence[int], scalars: Sequence[Any], _keep: object = keep) -> None:
            self.activate()
            with lock:
                pack(buffer, 0, *pointers, *scalars)
                call(stream)

        return launch

    def set_max_dynamic(self, kernel: LoadedKernel, nbytes: int) -> None:
        self._call("cuFuncSetAttribute", self._driver.funcSetAttribute, kernel.raw.ptr, MAX_DYNAMIC_SHARED, nbytes)

    def max_cooperative_blocks(self, kernel: LoadedKernel, threads: int, shared: int) -> int:
        occupancy = self._driver.occupancyMaxActiveBlocksPerMultiprocessor
        each = self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", occupancy, kernel.raw.ptr, threads, shared)
        return int(each) * self.sm_count()

    # ------------------------------------------------------------ graphs

    def begin_capture(self, stream: int) -> None:
        mode = self._runtime.streamCaptureModeRelaxed
        self._call("cudaStreamBeginCapture", self._runtime.streamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = self._call("cudaStreamEndCapture", self._runtime.streamEndCapture, stream)
        try:
            return int(self._call("cudaGraphInstantiate", self._runtime.graphInstantiate, graph))
        finally:
            self._call("cudaGraphDestroy", self._runtime.graphDestroy, graph)

    def is_capturing(self, stream: int) -> bool:
        return bool(self._call("cudaStreamIsCapturing", self._runtime.streamIsCapturing, stream))

    def abort_capture(self, stream: int) -> None:
        try:
            graph = self._runtime.streamEndCapture(stream)
        except self._api.errors:
            return  # an invalidated capture has no graph to drop
        if graph:
            self._call("cudaGraphDestroy", self._runtime.graphDestroy, graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", self._runtime.graphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", self._runtime.graphExecDestroy, graph)

    # ------------------------------------------------------------ information and interop

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("cudaMemGetInfo", self._runtime.memGetInfo)
        return int(free), int(total)

    def integrated(self) -> bool:
        return bool(self._attribute("Integrated"))

    def sm_count(self) -> int:
        return self._attribute("MultiProcessorCount")

    def compute_capability(self) -> tuple[int, int]:
        return self._major, self._minor

    def device_name(self) -> str:
        properties = self._call("cudaGetDeviceProperties", self._runtime.getDeviceProperties, self.ordinal)
        return str(properties["name"].decode())

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        cupy = self._api.cupy
        if address == 0:
            return cupy.empty(shape, dtype)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        memory = cupy.cuda.UnownedMemory(address, nbytes, self, self.ordinal)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def foreign_range(self, array: Any) -> tuple[int, int]:
        cupy = self._api.cupy
        if hasattr(array, "__dlpack__"):
            try:
                view = cupy.from_dlpack(array)
            except TypeError as error:  # FP8, for one
                raise InvalidArgumentError("array", type(array).__name__, f"{error}; view it as uint8") from None
        elif hasattr(array, "__cuda_array_interface__"):
            view = cupy.asarray(array)
        else:
            kinds = "an array with DLPack or __cuda_array_interface__"
            raise InvalidArgumentError("array", type(array).__name__, kinds)
        if view.device.id != self.ordinal:
            raise UnsupportedError(f"the array is on cuda:{view.device.id}, this backend on {self._where()}")
        if not view.flags.c_contiguous:
            raise InvalidArgumentError("array", f"strides {view.strides}", "must be C-contiguous")
        # Both protocols order the producer's work before CuPy's current stream; the backend's streams do not wait
        # for that one.
        cupy.cuda.get_current_stream().synchronize()
        return int(view.data.ptr), int(view.nbytes)

    def close(self) -> None:
        self._loaded.clear()
        self._compiled.clear()
        if self._lost is None:
            self._staging.close()


class CudaBackend(CheckedBackend):
    """The GPU backend."""

    _device: CudaDevice

    def __init__(
        self,
        ordinal: int = 0,
        kernels: Path | str | None = None,
        on_leak: str = "warn",
        debug_sync_kernels: bool = False,
    ) -> None:
        super().__init__(CudaDevice(ordinal, kernels), KernelAudit(), on_leak, debug_sync_kernels)
