# SPDX-License-Identifier: AGPL-3.0-only
"""What a build for the CPU has of a source, as text."""

from __future__ import annotations

import pytest

from spark_py.runtime.source_text import emulated_text

CASES = {
    "not emulated": ("#ifndef SPARK_EMULATED\nasm;\n#endif\nmore\n", ["more"]),
    "not emulated, else": ("#ifndef SPARK_EMULATED\nasm;\n#else\nplain;\n#endif\n", ["plain;"]),
    "emulated": ("#ifdef SPARK_EMULATED\nplain;\n#else\nasm;\n#endif\n", ["plain;"]),
    "another condition": ("#ifdef OTHER\none\n#else\ntwo\n#endif\n", ["one", "two"]),
    "an expression": ("#if __CUDA_ARCH__ >= 900\none\n#elif X\ntwo\n#else\nthree\n#endif\n", ["one", "two", "three"]),
    "inside of one that is gone": ("#ifndef SPARK_EMULATED\n#if X\none\n#else\ntwo\n#endif\nthree\n#endif\n", []),
    "inside of one that stays": ("#ifdef SPARK_EMULATED\n#if X\none\n#endif\n#else\ntwo\n#endif\n", ["one"]),
    "else-if is not decided": ("#ifndef SPARK_EMULATED\none\n#elif X\ntwo\n#else\nthree\n#endif\n", ["two", "three"]),
    "spaces": (" # ifndef  SPARK_EMULATED \nasm;\n # endif\n", []),
    "another name": ("#ifndef SPARK_EMULATED_TOO\nasm;\n#endif\n", ["asm;"]),
    "an end too many": ("#endif\none\n", ["one"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_an_emulated_build(name: str) -> None:
    text, wanted = CASES[name]
    found = emulated_text(text)
    assert [line for line in found.splitlines() if line and not line.lstrip().startswith("#")] == wanted
    assert found.count("\n") == text.count("\n")
