// SPDX-License-Identifier: AGPL-3.0-only
// Module gemm, the tensor-core kernel: C = A W^T by BF16 MMA m16n8k16 with FP32 accumulators, written with CuTe.
// Kept apart from gemm.cu, so that only this file needs the headers of nvidia-cutlass.

#include <cute/tensor.hpp>

#include "spark_common.cuh"

using namespace cute;

using Element = cutlass::bfloat16_t;
using Chunk = uint128_t;  // what one thread moves at a time: 8 elements

constexpr int TILE = 128;       // rows of A, and of B, to a block
constexpr int TILE_K = 32;      // elements of k to a stage
constexpr int STAGES = 3;       // 3 x 16 KiB: all the shared memory that a launch gets without asking
constexpr int CHUNK = 8;
constexpr int GEMM_THREADS = 256;

// Rows of 64 bytes; the 16-byte chunks of a row change places with the row, so that ldmatrix meets no bank twice.
using SharedAtom = decltype(composition(Swizzle<2, 3, 3>{}, Layout<Shape<_8, _32>, Stride<_32, _1>>{}));
using SharedTile = decltype(tile_to_shape(SharedAtom{}, Shape<Int<TILE>, Int<TILE_K>, Int<STAGES>>{}));

// Eight warps, two by four: each has 64 x 32 of the block's 128 x 128.
using Mma = decltype(make_tiled_mma(SM80_16x8x16_F32BF16BF16F32_TN{}, Layout<Shape<_2, _4, _1>>{},
                                    Tile<_32, _64, _16>{}));
using FromShared = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
using AsyncCopy = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>;
using FromGlobal = decltype(make_tiled_copy(Copy_Atom<AsyncCopy, Element>{}, Layout<Shape<_64, _4>, Stride<_4, _1>>{},
                                            Layout<Shape<_1, _8>>{}));

// One operand's way into shared memory: 128 rows, from `row` on, of a matrix [rows, depth].
// WIDE moves 16 bytes at a time, asynchronously; depth is a multiple of 8 then and every row starts on a 16-byte address.
// Otherwise elements are read singly. Beyond the matrix, either way, zeros are stored.
template <bool WIDE>
struct Loader {
    const Element* matrix;
    int64_t rows;
    int64_t row;
    int64_t depth;

    template <class Stage>
    __device__ void load(Stage const& stage, int64_t k) const {
        // Where this thread's chunks lie in a tile, as (row, first element).
        const auto slice = FromGlobal{}.get_slice(threadIdx.x);
        const auto places = slice.partition_D(make_identity_tensor(Shape<Int<TILE>, Int<TILE_K>>{}));
        auto to = slice.partition_D(stage);
        CUTE_UNROLL
        for (int m = 0; m < size<1>(to); ++m) {
            const int64_t at_row = row + get<0>(places(0, m, 0));
            const int64_t at_k = k + get<1>(places(0, m, 0));
            load_chunk(to(_, m, 0), at_row, at_k);
        }
    }

    template <class Target>
    __device__ void load_chunk(Target&& to, int64_t at_row, int64_t at_k) const {
        const bool inside = at_row < rows && at_k < depth;
        const Element* from = inside ? matrix + at_row * depth + at_k : matrix;
        if constexpr (WIDE) {
            const auto chunk = make_tensor(make_gmem_ptr(from), Layout<Shape<_8>>{});
            copy(Copy_Atom<AsyncCopy, Element>{}.with(inside), chunk, to);
        } else {
            CUTE_UNROLL
            for (int i = 0; i < CHUNK; ++i) {
                to(i) = inside && at_k + i < depth ? from[i] : Element(0.0f);
            }
        }
    }
};

template <bool WIDE, class Accumulators>
__device__ __forceinline__ void multiply(Loader<WIDE> const& a, Loader<WIDE> const& b, Element* a_storage,
                                         Element* b_storage, Accumulators& sums) {
    const auto a_stages = make_tensor(make_smem_ptr(a_storage), SharedTile{});
    const auto b_stages = make_tensor(make_smem_ptr(b_storage), SharedTile{});
    const auto mma = Mma{};
    const auto thread = mma.get_slice(threadIdx.x);
    const auto a_copy = make_tiled_copy_A(FromShared{}, mma).get_slice(threadIdx.x);
    const auto b_copy = make_tiled_copy_B(FromShared{}, mma).get_slice(threadIdx.x);
    const auto a_shared = a_copy.partition_S(a_stages);
    const auto b_shared = b_copy.partition_S(b_stages);
    auto a_part = thread.partition_fragment_A(a_stages(_, _, 0));
    auto b_part = thread.partition_fragment_B(b_stages(_, _, 0));
    auto a_view = a_copy.retile_D(a_part);
    auto b_view = b_copy.retile_D(b_part);
    const int64_t tiles = (a.depth + TILE_K - 1) / TILE_K;

    CUTE_UNROLL
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        a.load(a_stages(_, _, stage), int64_t(stage) * TILE_K);
        b.load(b_stages(_, _, stage), int64_t(stage) * TILE_K);
        cp_async_fence();
    }
    int reading = 0;
    int filling = STAGES - 1;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        // This tile's copies have landed for every thread, and the stage to fill next has been read by all.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int64_t ahead = (tile + STAGES - 1) * TILE_K;
        if (ahead < a.depth) {
            a.load(a_stages(_, _, filling), ahead);
            b.load(b_stages(_, _, filling), ahead);
        }
        cp_async_fence();
        CUTE_UNROLL
        for (int step = 0; step < size<2>(a_part); ++step) {
            copy(FromShared{}, a_shared(_, _, step, reading), a_view(_, _, step));
            copy(FromShared{}, b_shared(_, _, step, reading), b_view(_, _, step));
            gemm(mma, a_part(_, _, step), b_part(_, _, step), sums);
        }
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        filling = filling + 1 == STAGES ? 0 : filling + 1;
    }
    cp_async_wait<0>();
}

// C[m, n] = bf16(sum over k of A[m, k] * B[n, k]), summed in FP32 in the order of the tensor cores: not bit-equal to
// dense_gemm_bf16. Grid (ceil(N / 128), ceil(M / 128)), block 256. Any M, N and K; rows that do not lie on 16-byte
// addresses are read an element at a time.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    dense_gemm_bf16_pipelined(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                              __nv_bfloat16* __restrict__ C, unsigned int M, unsigned int N, unsigned int K) {
    __shared__ __align__(16) Element a_storage[cosize_v<SharedTile>];
    __shared__ __align__(16) Element b_storage[cosize_v<SharedTile>];
    const int64_t first_m = int64_t(blockIdx.y) * TILE;
    const int64_t first_n = int64_t(blockIdx.x) * TILE;
    auto sums = partition_fragment_C(Mma{}, Shape<Int<TILE>, Int<TILE>>{});
    clear(sums);
    const Element* a = reinterpret_cast<const Element*>(A);
    const Element* b = reinterpret_cast<const Element*>(B);
    if (K % CHUNK == 0u && spark_aligned(A, sizeof(Chunk)) && spark_aligned(B, sizeof(Chunk))) {
        multiply(Loader<true>{a, M, first_m, K}, Loader<true>{b, N, first_n, K}, a_storage, b_storage, sums);
    } else {
        multiply(Loader<false>{a, M, first_m, K}, Loader<false>{b, N, first_n, K}, a_storage, b_storage, sums);
    }
    const auto places = Mma{}.get_slice(threadIdx.x).partition_C(make_identity_tensor(Shape<Int<TILE>, Int<TILE>>{}));
    // A thread's outputs come in neighbouring pairs: one store each, where every pair lies on its address.
    const bool paired = N % 2u == 0u && spark_aligned(C, 4u);
    CUTE_UNROLL
    for (int i = 0; i < size(sums); i += 2) {
        const int64_t m = first_m + get<0>(places(i));
        const int64_t n = first_n + get<1>(places(i));
        __nv_bfloat16* to = C + m * N + n;
        if (m < M && n + 1 < N && paired) {
            *reinterpret_cast<unsigned*>(to) = spark_pack(sums(i), sums(i + 1));
        } else if (m < M && n < N) {
            spark_store(to, sums(i));
            if (n + 1 < N) {
                spark_store(to + 1, sums(i + 1));
            }
        }
    }
}
