# SPDX-License-Identifier: AGPL-3.0-only
"""Fixtures of the parity tests: the checkpoint that a seed gives, their layout, and what Hugging Face's code gives."""
