# SPDX-License-Identifier: AGPL-3.0-only
"""What proposers of one module and of several refuse, in the same words."""

from __future__ import annotations

from ...runtime.errors import CapacityError, InvalidArgumentError, ProposerStateError
from ...runtime.gpu import DevicePtr
from ...runtime.sizes import count, integer

__all__ = ["check_address", "check_last_row", "check_position", "check_token", "check_verdict", "require_verdict"]


def check_address(name: str, ptr: DevicePtr) -> None:
    """InvalidArgumentError, under `name`, for NULL and for what is no DevicePtr."""
    if not isinstance(ptr, DevicePtr) or ptr.is_null:
        raise InvalidArgumentError(name, ptr, "a device address is needed")


def check_token(name: str, token: object, rows: int) -> int:
    """`token`; InvalidArgumentError unless the embedding table of `rows` rows has it."""
    number = integer(name, token)
    if not 0 <= number < rows:
        raise InvalidArgumentError(name, number, f"0 to {rows - 1}, the rows of the embedding table")
    return number


def check_position(position: int, drafts: int, max_seq_len: int) -> int:
    """`position`; CapacityError unless the sequence has a place for so many drafts after it."""
    number = count("position", position)
    if (last := number + drafts) >= max_seq_len:
        raise CapacityError("position of the last draft", last, max_seq_len - 1, "the last of a sequence")
    return number


def check_last_row(first: int, rows: int, max_seq_len: int) -> int:
    """Position of the last of `rows` rows that are fed from position `first` on, less than `first` where there are
    none; CapacityError unless the sequence has a place for it."""
    if (last := first + rows - 1) >= max_seq_len:
        raise CapacityError("position of the last row", last, max_seq_len - 1, "the last of a sequence")
    return last


def require_verdict(drafted: int, what: str) -> None:
    """ProposerStateError while the verdict on `drafted` drafts is outstanding; 0: on none."""
    if drafted:
        raise ProposerStateError(f"{what} before the verdict on the last {drafted} drafts: call after_verify first")


def check_verdict(num_accepted: int, drafted: int) -> int:
    """`num_accepted`; ProposerStateError where no verdict is outstanding, InvalidArgumentError for more than were
    drafted."""
    accepted = count("num_accepted", num_accepted, 0)
    if drafted == 0:
        raise ProposerStateError("after_verify without drafts to verify: propose comes first, and each counts once")
    if accepted > drafted:
        raise InvalidArgumentError("num_accepted", accepted, f"at most the {drafted} drafts of the last propose")
    return accepted
