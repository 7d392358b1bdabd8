# SPDX-License-Identifier: AGPL-3.0-only
"""What each kernel computes, in NumPy: one file a kernel family, under the name of its .cu file.

Functions take and give arrays (BF16 as `ml_dtypes.bfloat16`), compute in FP32 or FP64, and round to BF16 (nearest, ties
to even) where the kernel stores. They know nothing of devices, pointers or launches. Inputs are never written to.
"""
