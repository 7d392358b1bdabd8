# SPDX-License-Identifier: AGPL-3.0-only
"""What a draft of DeepSeek-V4-Flash's MTP module costs, part by part, at its shapes and in its formats.

Weights are random: E4M3 projections with block scales, 256 MXFP4 experts, BF16 tables; the window is full. A row says
how many microseconds a part takes on the GPU (a graph, replayed one time after the other), how many bytes of weights
and latents it must read, and which share of the read bandwidth that is. "draft" is all parts of a step in the reference
mode, one behind the other in one graph; what fits the L2 cache of a part alone is read from there.

Beside it, where transformers is there, the time of `DeepseekV4DecoderLayer` with BF16 weights on the same card in the
same run, a token with an empty cache, by the host's clock. One JSON object on stdout.

    python tools/bench_v4.py [--shapes v4-flash] [--backend cuda] [--rows 1,4] [--repeats 25]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.bench.timing import read_bandwidth
from spark_py.bench.v4_parts import V4_SHAPES, v4_rows
from spark_py.bench.v4_peer import v4_layer_rows
from spark_py.runtime import open_backend


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v4-flash", choices=tuple(V4_SHAPES))
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--rows", default="1,4", help="sequences at once (default 1,4)")
    parser.add_argument("--repeats", type=int, default=25, help="measurements that count (default 25)")
    options = parser.parse_args()
    shapes, counts = V4_SHAPES[options.shapes], [int(each) for each in options.rows.split(",")]
    about: dict[str, Any] = {"shapes": options.shapes, "repeats": options.repeats}
    with open_backend(options.backend) as gpu:
        about["device"] = gpu.device_name()
        if (bandwidth := read_bandwidth(gpu)) is not None:
            about |= bandwidth.numbers()
        found = [row for rows in counts for row in v4_rows(gpu, shapes, rows, options.repeats, bandwidth)]
    if options.backend == "cuda":
        found += [{"rows": rows} | row for rows in counts for row in v4_layer_rows(shapes, rows, options.repeats)]
    json.dump(about | {"rows": found}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
