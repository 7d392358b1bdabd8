# SPDX-License-Identifier: AGPL-3.0-only
"""Which thread block wrote an element: found by launching less and less of the grid.

Blocks run independently of each other, so a grid that ends before the block in question leaves the element as it was.
"""

from __future__ import annotations

from collections.abc import Callable

from ..catalog.spec import Dim3
from .inputs import Array

__all__ = ["writing_block"]


def _first(most: int, written: Callable[[int], bool]) -> int:
    """The smallest count from 1 to `most` with which the element is written, given that it is with `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if written(middle):
            high = middle
        else:
            low = middle + 1
    return low


def writing_block(run: Callable[[Dim3], Array], grid: Dim3, before: Array, after: Array, at: int) -> Dim3 | None:
    """The block that gave element `at` (flat) its value, the last one if several did; None where that cannot be told.

    `run` launches a smaller grid on the same inputs and returns what the buffer then holds; `before` and `after` are
    the buffer without and with the whole grid. A kernel whose blocks share out the work by the size of the grid has no
    answer, nor has an element that kept its bits.
    """
    x, y, z = grid
    width = after.itemsize
    value = after.tobytes()[at * width : (at + 1) * width]
    if before.tobytes()[at * width : (at + 1) * width] == value:
        return None
    if grid == (1, 1, 1):
        return 0, 0, 0
    if run((1, 1, 1)).tobytes() == after.tobytes():
        return None

    def written(size: Dim3) -> bool:
        return run(size).tobytes()[at * width : (at + 1) * width] == value

    planes = _first(z, lambda n: written((x, y, n)))
    rows = _first(y, lambda n: written((x, n, planes)))
    blocks = _first(x, lambda n: written((n, rows, planes)))
    return blocks - 1, rows - 1, planes - 1
