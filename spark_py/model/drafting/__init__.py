# SPDX-License-Identifier: AGPL-3.0-only
"""What a scheduler decides about drafts, without a device: how many, of which sequences, by which kernels, from which
rows."""
