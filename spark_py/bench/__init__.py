# SPDX-License-Identifier: AGPL-3.0-only
"""What a draft costs, beside what reading its weights must cost: the parts of `spark-py bench`.

Stands on top of the rest: nothing else in the package imports it, and only `torch_peer` and `timing` import torch, when
they are asked to.
"""
