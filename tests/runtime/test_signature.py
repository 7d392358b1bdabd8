# SPDX-License-Identifier: AGPL-3.0-only
"""Parameter lists: what is read from PTX and from source, and how lists are held against each other."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

from spark_py.catalog import all_kernels
from spark_py.runtime.errors import ImageError, SignatureMismatchError
from spark_py.runtime.manifest import ModuleSource
from spark_py.runtime.signature import (
    Kind,
    Param,
    Signature,
    compare,
    kernel_spec_signature,
    parse_ptx,
    parse_source,
    reconcile,
)

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy_backends") is None, reason="CuPy, which reaches NVRTC, is not installed"
)

PTX = """
.version 8.8
.target sm_90a
.address_size 64
// .entry commented_out(.param .u32 a)
/* .entry also_out() */
.visible .entry f(
	.param .u64 .ptr .global .align 16 f_param_0,
	.param .u64 .ptr .align 1 f_param_1, // the second
	.param .u64 f_param_2,
	.param .u32 f_param_3,
	.param .f32 f_param_4,
	.param .f64 f_param_5,
	.param .u8 f_param_6,
	.param .u16 f_param_7,
	.param .align 64 .b8 f_param_8[128]
)
.maxntid 128, 1, 1
{ ret; }
.entry none()
{ ret; }
.weak .entry bare
{ ret; }
.visible .func helper(.param .u32 x) { ret; }
"""


def ctypes_of(text: str, function: str = "f") -> list[str] | None:
    found = parse_source(text).get(function)
    return None if found is None else [f"{p.ctype} {p.name}" for p in found.params]


# ---------------------------------------------------------------- PTX


def test_ptx_entries_kinds_and_sizes() -> None:
    found = parse_ptx(PTX)
    assert list(found) == ["f", "none", "bare"]
    assert [(p.kind, p.size) for p in found["f"].params] == [
        (Kind.PTR, 8),
        (Kind.PTR, 8),
        (Kind.W64, 8),
        (Kind.W32, 4),
        (Kind.F32, 4),
        (Kind.F64, 8),
        (Kind.W8, 1),
        (Kind.W16, 2),
        (Kind.BYTES, 128),
    ]
    assert found["f"].params[0].align == 16
    assert found["f"].params[8].align == 64
    assert found["f"].params[3].name == "param_3"
    assert found["none"].params == found["bare"].params == ()


def test_ptx_parameter_that_cannot_be_read_names_file_function_and_text() -> None:
    with pytest.raises(ImageError) as error:
        parse_ptx(".entry g(.param .u32 a, .param .texref t)", "k.ptx")
    assert "k.ptx" in str(error.value)
    assert "g: cannot read parameter 1" in str(error.value)
    assert ".texref t" in str(error.value)


# ---------------------------------------------------------------- source


@pytest.mark.parametrize(
    "head",
    [
        'extern "C" __global__ void f(',
        'extern "C" __global__ void __launch_bounds__(256) f(',
        'extern "C" __global__ __launch_bounds__(256, 2) void f(',
        'extern "C" __global__ __launch_bounds__(TM * (TN / 2)) void f(',
        'extern "C" __global__ void __launch_bounds__(128) __cluster_dims__(2, 1, 1) f(',
        'extern "C" \n __global__ \n void \n f \n (',
        '__global__ extern "C" void f(',
        'extern "C" /* why */ __global__ // here\n void f(',
        'extern "C" __attribute__((used)) __global__ void f(',
    ],
)
def test_source_forms_of_the_head(head: str) -> None:
    assert ctypes_of(head + "const float* __restrict__ a, int n) { }") == ["const f32* a", "i32 n"]


def test_source_blocks_namespaces_and_what_is_not_extern_c() -> None:
    text = """
    __global__ void outside(int n) {}
    extern "C" { namespace inner { __global__ void f(unsigned n) { if (n) { n = 1; } } }
      static __device__ int helper(int x) { return x; }
      struct S { int a; };
      __global__ void g() {}
    }
    extern "C" { extern "C++" { __global__ void cxx(int n) {} } }
    namespace lone { extern "C" __global__ void h(void) {} __global__ void mangled(int n) {} }
    template <int N> __global__ void t(int n) {}
    __constant__ int table[2] = {1, 2};
    extern "C" __global__ void declared_only(int n);
    extern "C" __device__ void device_only(int n) {}
    extern "C" __global__ void last(int n) {}
    """
    assert list(parse_source(text)) == ["f", "g", "h", "last"]
    assert parse_source(text)["g"].params == ()


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("const __nv_bfloat16* __restrict__ x", "const bf16* x"),
        ("__nv_bfloat16 const *x", "const bf16* x"),
        ("const __nv_bfloat16 *const __restrict__ x", "const bf16* x"),
        ("nv_bfloat16* x", "bf16* x"),
        ("__half* x", "f16* x"),
        ("const unsigned char* x", "const u8* x"),
        ("const uint8_t* x", "const u8* x"),
        ("const __nv_fp8_e4m3* x", "const u8* x"),
        ("const unsigned long long* x", "const u64* x"),
        ("const long long* x", "const i64* x"),
        ("const float* const* x", "const f32** x"),
        ("float x[]", "f32* x"),
        ("void* x", "void* x"),
        ("const Foo* x", "const Foo* x"),
        ("unsigned int x", "u32 x"),
        ("unsigned x", "u32 x"),
        ("const unsigned int x", "u32 x"),
        ("std::uint32_t x", "u32 x"),
        ("uint32_t x", "u32 x"),
        ("long unsigned int x", "u64 x"),
        ("size_t x", "u64 x"),
        ("int x", "i32 x"),
        ("signed x", "i32 x"),
        ("long x", "i64 x"),
        ("long long int x", "i64 x"),
        ("unsigned short x", "u16 x"),
        ("short int x", "i16 x"),
        ("signed char x", "i8 x"),
        ("char x", "i8 x"),
        ("bool x", "bool x"),
        ("float x", "f32 x"),
        ("double x", "f64 x"),
        ("__nv_bfloat16 x", "bf16 x"),
        ("const __grid_constant__ CUtensorMap x", "tensormap x"),
        ("[[maybe_unused]] int x", None),
        ("int __attribute__((unused)) x", "i32 x"),
        ("float", "f32 param_0"),
        ("const int&  x", None),
        ("Struct x", None),
        ("dim3 x", None),
        ("int (*x)(int)", None),
    ],
)
def test_source_type_spellings(declaration: str, expected: str | None) -> None:
    found = ctypes_of(f'extern "C" __global__ void f({declaration}) {{}}')
    assert found == (None if expected is None else [expected])


def test_source_aliases_are_followed() -> None:
    text = """
    typedef unsigned int u32;
    using bf16 = __nv_bfloat16;
    #define WORD u32
    extern "C" __global__ void f(const bf16* a, WORD n, u32 m) {}
    """
    assert ctypes_of(text) == ["const bf16* a", "u32 n", "u32 m"]


def test_source_alias_with_two_meanings_has_none() -> None:
    text = "#ifdef A\ntypedef int idx;\n#else\ntypedef long long idx;\n#endif\n"
    assert ctypes_of(text + 'extern "C" __global__ void f(idx n) {}') is None


def test_source_alias_that_names_itself_ends() -> None:
    assert ctypes_of('#define a b\n#define b a\nextern "C" __global__ void f(a x) {}') is None


def test_source_comments_strings_and_raw_strings_hide_nothing_and_show_nothing() -> None:
    text = r"""
    // extern "C" __global__ void no1(int n) {}
    /* extern "C" __global__ void no2(int n) {} */
    const char* s = "extern \"C\" __global__ void no3(int n) { \" }";
    const char* r = R"x( } extern "C" __global__ void no4(int n) {} )x";
    const char c = '{';
    extern "C" __global__ void f(int n /* , int m */, // float z
        float y) { const char* b = "}"; }
    extern "C" __global__ void g(int n) {}
    """
    assert list(parse_source(text)) == ["f", "g"]
    assert ctypes_of(text) == ["i32 n", "f32 y"]


def test_source_preprocessor() -> None:
    text = """
    #if 0
    extern "C" __global__ void hidden(int n) {}
    #else
    extern "C" __global__ void shown(int n) {}
    #endif
    #define MAKE(name) extern "C" __global__ void name##_k(int n) \\
        { }
    MAKE(made)
    #ifdef A
    extern "C" __global__ void either(int n) {}
    #else
    extern "C" __global__ void either(int n, int m) {}
    #endif
    extern "C" __global__ void inside(int n
    #ifdef B
        , int m
    #endif
    ) {}
    #ifdef A
    extern "C" __global__ void same(int n) { n = 1; }
    #else
    extern "C" __global__ void same(int n) { n = 2; }
    #endif
    """
    assert list(parse_source(text)) == ["shown", "same"]


def test_source_random_lists_round_trip(rng: np.random.Generator) -> None:
    spellings = {
        "u32": ["unsigned", "unsigned int", "uint32_t", "const unsigned int"],
        "i64": ["long long", "int64_t", "long"],
        "f32": ["float", "const float"],
        "const bf16*": ["const __nv_bfloat16*", "const __nv_bfloat16 * __restrict__", "__nv_bfloat16 const*"],
        "u8*": ["unsigned char*", "uint8_t* __restrict__"],
    }
    names = list(spellings)
    for _ in range(50):
        wanted = [names[i] for i in rng.integers(0, len(names), rng.integers(0, 12))]
        text = ", ".join(f"{rng.choice(spellings[ctype])} p{i}" for i, ctype in enumerate(wanted))
        found = parse_source(f'extern "C" __global__ void f({text}) {{ }}')["f"]
        assert [p.ctype for p in found.params] == wanted


# ---------------------------------------------------------------- reconcile and compare


def signature(*params: tuple[str, Kind, int, str]) -> Signature:
    return Signature("f", tuple(Param(*param) for param in params))


A = signature(("x", Kind.PTR, 8, "const bf16*"), ("n", Kind.U32, 4, "u32"), ("m", Kind.U32, 4, "u32"))


def test_reconcile_takes_names_from_the_source_and_widths_from_the_ptx() -> None:
    ptx = signature(("p0", Kind.W64, 8, ""), ("p1", Kind.W32, 4, ""), ("p2", Kind.W32, 4, ""))
    assert reconcile(A, ptx) == A
    aligned = dataclasses.replace(ptx, params=(Param("p0", Kind.PTR, 8, "", 16), *ptx.params[1:]))
    assert reconcile(A, aligned).params[0].align == 16


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([("p0", Kind.W64, 8, ""), ("p1", Kind.W32, 4, "")], ["3 parameters", "PTX 2"]),
        (
            [("p0", Kind.W64, 8, ""), ("p1", Kind.W64, 8, ""), ("p2", Kind.W32, 4, "")],
            ["f: parameter 1", "u32 n", "4 bytes", "8 bytes"],
        ),
        (
            [("p0", Kind.W64, 8, ""), ("p1", Kind.W32, 4, ""), ("p2", Kind.F32, 4, "")],
            ["f: parameter 2", "u32 m", "f32"],
        ),
    ],
)
def test_reconcile_disagreement_names_both_sides(params: list[tuple[str, Kind, int, str]], says: list[str]) -> None:
    with pytest.raises(SignatureMismatchError) as error:
        reconcile(A, signature(*params))
    for part in says:
        assert part in str(error.value)


def changed(number: int, **fields: object) -> Signature:
    params = list(A.params)
    params[number] = dataclasses.replace(params[number], **fields)  # type: ignore[arg-type]
    return Signature("f", tuple(params))


def test_compare_accepts_what_a_call_does_not_notice() -> None:
    assert compare(A, A) is None
    assert compare(A, changed(0, ctype="bf16*")) is None  # const
    assert compare(A, changed(0, ctype="void*")) is None
    assert compare(A, changed(0, ctype="")) is None  # PTX only
    assert compare(A, changed(1, name="rows")) is None  # another name
    assert compare(A, changed(1, kind=Kind.W32, ctype="")) is None
    table = changed(0, ctype="const bf16**")
    assert compare(table, changed(0, ctype="const u64*")) is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Signature("f", A.params[:2]), "3 parameters against 2"),
        (Signature("f", (A.params[0], A.params[2], A.params[1])), "'n' stands at 2"),  # two u32 swapped
        (changed(0, ctype="const f32*"), "const f32*"),
        (changed(0, kind=Kind.U64, ctype="u64"), "parameter 0"),
        (changed(1, kind=Kind.I32, ctype="i32"), "i32 n"),
        (changed(1, kind=Kind.F32, ctype="f32"), "f32 n"),
        (changed(1, kind=Kind.U64, size=8, ctype="u64"), "u64 n"),
        (changed(1, kind=Kind.W64, size=8, ctype=""), "parameter 1"),
    ],
)
def test_compare_tells_every_real_difference(other: Signature, says: str) -> None:
    text = compare(A, other)
    assert text is not None
    assert says in text
    assert compare(other, A) is not None


def test_struct_sizes_are_compared() -> None:
    a, b = (signature(("s", Kind.BYTES, size, "")) for size in (128, 64))
    assert compare(a, a) is None
    assert compare(a, b) is not None
    with pytest.raises(SignatureMismatchError):
        reconcile(a, b)


def test_every_catalogue_row_has_a_signature() -> None:
    for spec in all_kernels():
        found = kernel_spec_signature(spec)
        assert [p.name for p in found.params] == [p.name for p in spec.params]
        assert compare(found, found) is None


@needs_nvrtc
def test_what_the_compiler_says_agrees_with_the_text(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from spark_py.runtime.modules import compile_module

    path = tmp_path / "k.cu"
    path.write_text(
        "#include <cuda_bf16.h>\n"
        "struct Big { int a[32]; };\n"
        'extern "C" __global__ void f(const __nv_bfloat16* __restrict__ a, signed char c, short s, unsigned n,'
        " long long l, float x, double d, bool b, __nv_bfloat16 h) { }\n"
        'extern "C" __global__ void g(Big b, int n) { }\n'
        '#define MAKE(x) extern "C" __global__ void x(float* p, int n) { p[n] = 0; }\nMAKE(made)\n'
    )
    found = compile_module(ModuleSource("k", path), "sm_90a", None).signatures
    assert str(found["f"]) == ("f(const bf16* a, i8 c, i16 s, u32 n, i64 l, f32 x, f64 d, bool b, bf16 h)")
    assert [p.size for p in found["f"].params] == [8, 1, 2, 4, 8, 4, 8, 1, 2]
    assert [(p.kind, p.size) for p in found["g"].params] == [(Kind.BYTES, 128), (Kind.W32, 4)]
    assert [(p.kind, p.size) for p in found["made"].params] == [(Kind.W64, 8), (Kind.W32, 4)]
