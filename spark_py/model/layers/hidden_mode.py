# SPDX-License-Identifier: AGPL-3.0-only
"""HiddenMode: what a drafter with hyper-connections reads of the target."""

from __future__ import annotations

from enum import Enum

from ...runtime.errors import InvalidArgumentError

__all__ = ["HiddenMode"]


class HiddenMode(Enum):
    """The value is the command line's word.

    REFERENCE: the residual streams before they are collapsed, as DeepSeek's own code; later drafts go on from the
    drafter's streams. COLLAPSED: one hidden row, copied to all streams, as the engine; later drafts go on from the
    drafter's collapsed row. Where all streams are equal, both are the same for a first draft.
    """

    REFERENCE = "reference"
    COLLAPSED = "collapsed"

    @classmethod
    def parse(cls, text: str) -> HiddenMode:
        """The mode called `text`, in any case. InvalidArgumentError for every other word."""
        for mode in cls:
            if mode.value == text.lower():
                return mode
        raise InvalidArgumentError("hidden_mode", text, f"one of {', '.join(mode.value for mode in cls)}")
