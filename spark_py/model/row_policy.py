# SPDX-License-Identifier: AGPL-3.0-only
"""Which rows a drafter keeps after a verify, and which it is fed again. Pure arithmetic, twin of `speculative.rs`.

Words: `position` p is how many tokens of the sequence the target has processed. Pair key k is the drafter's KV row of
(embedding of token k + 1, hidden of token k), rotated at position k + 1. A propose at p with nd drafts writes keys
p - 1 .. p + nd - 2: the first from the target's hidden, the others from the drafter's own. After na of them are
accepted the next propose is at p + na + 1 and begins with key p + na.
"""

from __future__ import annotations

from enum import Enum

from ..runtime.errors import InvalidArgumentError
from ..runtime.sizes import count

__all__ = ["RowPolicy", "catchup_range", "mtp_rows_to_trim", "rows_to_keep"]


class RowPolicy(Enum):
    """How many of the nd rows of a propose stay when na drafts were accepted; the value is the command line's word.

    SEED: min(nd, na), the engine's rule. Key p + na - 1 is missing from then on; for na < nd its row was there.
    VERIFIED: min(nd, na + 1), all whose token is confirmed. Key p + nd - 1 is missing where na = nd.

    With refeed, one row stays (SEED: none where na = 0), since the others come from the drafter's own hidden. The
    caller then feeds the keys of `catchup_range` from the target's hidden rows. VERIFIED with refeed has no gap, ever.
    """

    SEED = "seed"
    VERIFIED = "verified"


def mtp_rows_to_trim(num_drafted: int, num_accepted: int, refeed: bool) -> int:
    """Rows that the engine drops: the rejected ones, and with refeed all that came from the drafter's hidden."""
    return min(num_drafted, max(num_drafted - num_accepted, 0) + (max(num_accepted - 1, 0) if refeed else 0))


def rows_to_keep(policy: RowPolicy, num_drafted: int, num_accepted: int, refeed: bool) -> int:
    """Rows of the last propose that stay; see RowPolicy. InvalidArgumentError for more accepted than drafted."""
    nd, na = count("num_drafted", num_drafted), count("num_accepted", num_accepted, 0)
    if na > nd:
        raise InvalidArgumentError("num_accepted", na, f"at most the {nd} drafts of the last propose")
    if policy is RowPolicy.SEED:
        return nd - mtp_rows_to_trim(nd, na, refeed)
    return 1 if refeed else min(nd, na + 1)


def catchup_range(last_pair_key: int | None, position: int, start: int, num_hidden: int) -> tuple[int, int] | None:
    """(first key, keys) to feed before a propose at `position`, or None where nothing can or need be fed.

    The caller holds hidden rows of tokens `start` .. `start + num_hidden - 1`. The keys follow the drafter's last one
    and end before position - 1, which the propose itself writes. Feed tokens first .. first + keys (one more than
    rows), the hidden row of token first, row_base = the drafter's rows, pos_base = first + 1. A drafter without rows is
    not fed.
    """
    if last_pair_key is None:
        return None
    first, last = max(last_pair_key + 1, start), min(position - 2, start + num_hidden - 1)
    return (first, last - first + 1) if first <= last else None
