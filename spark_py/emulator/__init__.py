# SPDX-License-Identifier: AGPL-3.0-only
"""CUDA C++ on the CPU: the kernels' own sources, compiled by the host's C++ compiler and run by a small runtime.

`shim/` gives the language to the compiler, `rt/` runs a grid: threads are fibres, barriers and warp collectives switch
between them. `compiler.py` finds what is needed, `build.py` makes and keeps the libraries, `launch.py` loads and runs
them, `faults.py` turns what a kernel did wrong into an exception.
"""
