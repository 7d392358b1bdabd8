# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py bench --plot`: microseconds over the bytes that must be read, and the line that no draft can be below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spark_py.runtime.errors import UnsupportedError

__all__ = ["draw", "require_matplotlib"]

_MARKERS = "osD^vPX*"
_ALLOWED = (1.10, 1.35)


def require_matplotlib() -> Any:
    """`matplotlib.figure`, or UnsupportedError with the line that installs it."""
    try:
        from matplotlib import figure
    except ImportError:
        raise UnsupportedError(
            "--plot: matplotlib is not installed; run: pip install 'spark-py[bench]' (or pip install 'matplotlib>=3.8')"
        ) from None
    return figure


def draw(found: dict[str, Any], file: Path) -> None:
    """A roofline picture of a result of `run_bench`: a colour for each shape and mode, a marker for each path, hollow
    for torch, a bar from the shortest to the longest time. The floor is drawn where the result has one."""
    rows = found["rows"]
    figure = require_matplotlib().Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    heads = list(dict.fromkeys((row["shape"], row["mode"]) for row in rows))
    paths = list(dict.fromkeys((row["by"], row["path"]) for row in rows))
    bytes_of = [row["MB"] for row in rows]
    low, high = min(bytes_of) / 1.5, max(bytes_of) * 1.5
    if "read_GB_per_s" in found:
        per_mb = 1e3 / found["read_GB_per_s"]
        axes.plot([low, high], [low * per_mb, high * per_mb], color="black", label=f"{found['read_GB_per_s']:.0f} GB/s")
        for factor, style in zip(_ALLOWED, ("--", ":"), strict=True):
            line = [low * per_mb * factor, high * per_mb * factor]
            axes.plot([low, high], line, style, color="grey", label=f"{factor:.2f} x floor")
    for row in rows:
        colour, marker = f"C{heads.index((row['shape'], row['mode'])) % 10}", paths.index((row["by"], row["path"]))
        spread = [[row["us"] - row["min_us"]], [row["max_us"] - row["us"]]]
        axes.errorbar(
            row["MB"], row["us"], yerr=spread, color=colour, marker=_MARKERS[marker % len(_MARKERS)], markersize=8,
            markerfacecolor="white" if row["by"] == "torch" else colour, capsize=3, linestyle="none",
        )  # fmt: skip
    for i, (shape, mode) in enumerate(heads):
        axes.plot([], [], color=f"C{i % 10}", linewidth=6, label=f"{shape}, {mode}")
    for i, (by, path) in enumerate(paths):
        face = "white" if by == "torch" else "dimgrey"
        shown = _MARKERS[i % len(_MARKERS)]
        label = path if by == "spark_py" else f"{by}, {path}"
        axes.plot([], [], marker=shown, color="dimgrey", markerfacecolor=face, linestyle="none", label=label)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="MB that must be read", ylabel="µs a propose, median")
    axes.set_title(f"Drafts on {found['device']}: the time of a propose and that of reading its weights")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(file, dpi=130)
