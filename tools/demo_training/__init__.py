# SPDX-License-Identifier: AGPL-3.0-only
"""The parts of tools/train_demo.py: corpus, model, training, evaluation, files. Needs torch and safetensors."""
