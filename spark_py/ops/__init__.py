# SPDX-License-Identifier: AGPL-3.0-only
"""Host launchers: one file a kernel family, under the name of its .cu file.

A launcher checks the numbers it is given, works out the geometry and queues one launch; names and argument order are
those of the Rust `layers::ops`. Where Rust takes a weight struct, a DevicePtr or anything with `.weight` does. A count
of 0 raises InvalidArgumentError: nothing is skipped in silence.
"""
