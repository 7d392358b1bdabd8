# SPDX-License-Identifier: AGPL-3.0-only
"""Models: configuration, weights, draft heads and the targets that verify their drafts.

Everything here works through `GpuBackend` and the launchers of `spark_py.ops`; no module knows which backend runs.
"""
