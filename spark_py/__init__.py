# SPDX-License-Identifier: AGPL-3.0-only
"""spark_py: the GpuBackend runtime of the Atlas inference engine and CUDA kernels with its launch ABI, in Python.

Importing the package touches no GPU; `spark_py.runtime.open_backend` opens a device.
"""

__version__ = "0.1.0"
