# SPDX-License-Identifier: AGPL-3.0-only
"""Environments of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """This process's environment with `folders` before everything else that it imports from, and `more` set.

    What is on the path already stays there: the package's dependencies may be nowhere else.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]), **more}
