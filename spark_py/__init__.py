# SPDX-License-Identifier: AGPL-3.0-only
"""spark_py: the GpuBackend runtime and the multi-token-prediction draft proposers of the Atlas engine, in Python.

Importing the package touches no GPU; `spark_py.runtime.open_backend` opens a device.
"""

__version__ = "0.1.0"
