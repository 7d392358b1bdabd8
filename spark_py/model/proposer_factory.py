# SPDX-License-Identifier: AGPL-3.0-only
"""ProposerFactory: what makes the draft heads of a checkpoint, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..runtime.errors import InvalidArgumentError
from .layer import DraftProposer
from .layers.hidden_mode import HiddenMode
from .layers.mtp_head import MtpQuantization
from .levers import ModelLevers

__all__ = ["ProposerFactory"]


class ProposerFactory(ABC):
    """Makes a family's draft heads. Each has a KV pool of its own, and lives until the checkpoint is closed."""

    def quantizations(self) -> tuple[MtpQuantization, ...]:
        """What a head of the checkpoint may be quantised to, BF16 first; none where heads stay as they are stored."""
        return ()

    def hidden_modes(self) -> tuple[HiddenMode, ...]:
        """Which of the target's rows a head may read, the default first; none where there is nothing to choose."""
        return ()

    @abstractmethod
    def __call__(
        self,
        levers: ModelLevers,
        quantization: MtpQuantization | None = None,
        hidden_mode: HiddenMode | None = None,
    ) -> DraftProposer:
        """A head; None asks for what the family has by default, and a quantisation that the checkpoint forces wins.

        Its tensors are read here: a WeightError names what is missing or damaged, UnsupportedError what is not offered,
        InvalidArgumentError a choice that the family does not have.
        """

    def _refuse_quantization(self, quantization: MtpQuantization | None) -> None:
        if quantization is not None:
            raise InvalidArgumentError(
                "quantization", quantization.value, "these heads stay as the checkpoint has them"
            )

    def _refuse_hidden_mode(self, hidden_mode: HiddenMode | None) -> None:
        if hidden_mode is not None:
            raise InvalidArgumentError(
                "hidden_mode", hidden_mode.value, "these heads read one hidden row, and no other"
            )
