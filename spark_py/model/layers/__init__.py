# SPDX-License-Identifier: AGPL-3.0-only
"""Layers and draft heads, under the names of the Rust files they port."""
