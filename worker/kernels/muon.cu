// Muon over flat buffers, laid out as in optimizer.cu. The filters of a convolution are a matrix with a row for each output channel.
// Newton-Schulz iterations orthogonalise them as in the CPU engine's `orthogonal.rs`, with matrices in bfloat16 and sums in float32.

// The matrix of a convolution.
struct Filter {
    u64 offset; // of the first value in the flat buffers
    u32 rows, columns;
    u64 gram; // of the first value in the buffers of Gram matrices

    // Rows of the smaller Gram matrix.
    __device__ __forceinline__ u32 side() const { return min(rows, columns); }
    __device__ __forceinline__ bool is_wide() const { return rows <= columns; }
};
// How a parameter is updated: learning rate as a multiple of the step's learning rate, weight decay, and the index of the parameter's
// filter, or NO_FILTER.
struct Policy {
    float rate, decay;
    u32 filter, pad;
};
#define NO_FILTER 0xffffffffu
// 1 / norm of the prepared update, and the factor that makes the norm of the weights sqrt(rows).
struct FilterNorms {
    float inverse, scale;
};

typedef u16 bf16;
__device__ __forceinline__ bf16 to_bf16(float v) { return (bf16)(bfloat_pair(v, 0.0f) & 0xffffu); }
__device__ __forceinline__ float from_bf16(bf16 v) { return __uint_as_float((u32)v << 16); }

// v = m v + g and, as a matrix in bfloat16, the update g + m v, where v is the velocity and m the momentum. Partial sums of squares as
// in lamb_moments: of the weights and of the update.
extern "C" __global__ void __launch_bounds__(256)
    muon_prepare(const float* weights, float* velocity, bf16* matrices, GRADIENT_PARAMETERS, const Scaler* scaler, float momentum,
                 const Filter* filters, double* partials) {
    pdl_wait();
    SHARED(double, warps, 8);
    if (!scaler->apply) return;
    Gradients gradients = GRADIENTS;
    Filter f = filters[blockIdx.y];
    float inverse = scaler->inverse;
    Squares squares = {0, 0};
    u64 groups = (u64)f.rows * f.columns / 8, step = (u64)NORM_PARTS * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        u64 at = f.offset / 8 + i;
        float w[8], v[8], g[8], ws = 0, us = 0;
        gradients.get(at, g);
        load_channels(weights, at, w);
        load_channels(velocity, at, v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            g[k] *= inverse;
            v[k] = fmaf(momentum, v[k], g[k]);
            g[k] = fmaf(momentum, v[k], g[k]);
            ws = fmaf(w[k], w[k], ws);
            us = fmaf(g[k], g[k], us);
        }
        store_channels(velocity, at, v);
        ((uint4*)matrices)[at] = {bfloat_pair(g[0], g[1]), bfloat_pair(g[2], g[3]), bfloat_pair(g[4], g[5]), bfloat_pair(g[6], g[7])};
        squares.weights += ws;
        squares.others += us;
    }
    store_squares(squares, warps, partials);
}

// Each filter's FilterNorms, from the partial sums of its squares. One thread per filter.
extern "C" __global__ void __launch_bounds__(128)
    muon_norms(const Scaler* scaler, const double* partials, const Filter* filters, u32 count, FilterNorms* norms) {
    pdl_wait();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (!scaler->apply || i >= count) return;
    Squares squares = squares_of(partials, i);
    norms[i].inverse = (float)(1 / (sqrt(squares.others) + MUON_EPSILON));
    norms[i].scale = squares.weights > 0 ? (float)(sqrt((double)filters[i].rows) / sqrt(squares.weights)) : 1.0f;
}

// c (16 x 8) += a (16 x 16) b (16 x 8), a and b in bfloat16, c in float32; fragments as in the PTX manual for mma.m16n8k16.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One factor of a matrix product: value (row, depth) is at row * row_step + depth * depth_step. One of the steps is 1.
struct Factor {
    const bf16* at;
    u32 row_step, depth_step;
};

#define MUON_TILE 64u
#define MUON_DEPTH 32u
#define MUON_STAGES 3u
// A tile in shared memory has rows of MUON_DEPTH values if the factor's values lie along the depth, and else MUON_DEPTH rows of MUON_TILE
// values. Rows are padded by 8 values, so that ldmatrix reads its eight rows from different banks.
#define MUON_ROW 40u
#define MUON_COLUMN 72u
#define MUON_SIZE (MUON_TILE * MUON_ROW)

// Starts to copy values (first_row + 0..63, first_depth + 0..31) to `tile`; zeros outside the factor.
__device__ __forceinline__ void load_factor(const Factor& f, u32 rows, u32 depth, u32 first_row, u32 first_depth, bf16* tile) {
    bool by_depth = f.depth_step == 1;
    // Whether memory and the factor's end are divided into whole groups of 8 values.
    bool grouped = ((by_depth ? f.row_step | depth : f.depth_step | rows) & 7) == 0;
    for (u32 i = threadIdx.x; i < MUON_TILE * MUON_DEPTH / 8; i += blockDim.x) {
        // Neighbouring threads copy neighbouring groups.
        u32 r = by_depth ? i / (MUON_DEPTH / 8) : i % (MUON_TILE / 8) * 8, d = by_depth ? i % (MUON_DEPTH / 8) * 8 : i / (MUON_TILE / 8);
        bf16* to = tile + (by_depth ? r * MUON_ROW + d : d * MUON_COLUMN + r);
        const bf16* from = f.at + (u64)(first_row + r) * f.row_step + (u64)(first_depth + d) * f.depth_step;
        bool inside = first_row + r < rows && first_depth + d < depth;
        if (grouped) {
            cp_async16(to, inside ? from : f.at, inside);
            continue;
        }
        u32 end = by_depth ? depth - min(depth, first_depth + d) : rows - min(rows, first_row + r);
#pragma unroll
        for (u32 k = 0; k < 8; k++) to[k] = inside && k < end ? from[k] : (bf16)0;
    }
}

// Loads four 8 x 8 matrices. Eight lanes give, in `at`, the addresses of the eight rows of one matrix.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* at) {
    u32 address = (u32)__cvta_generic_to_shared(at);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address));
}

// The fragments of 16 rows and 16 depths of a tile: 8 x 8 matrices (row 0, depth 0), (8, 0), (0, 8), (8, 8), or with `depth_first` (0, 0),
// (0, 8), (8, 0), (8, 8).
__device__ __forceinline__ void fragments(u32 (&to)[4], const bf16* tile, bool by_depth, u32 row, u32 depth, bool depth_first) {
    u32 lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    row += depth_first ? high : low;
    depth += depth_first ? low : high;
    if (by_depth)
        load_matrices<false>(to, tile + (row + lane % 8) * MUON_ROW + depth);
    else
        load_matrices<true>(to, tile + (depth + lane % 8) * MUON_COLUMN + row);
}

// Calls finish(row, column, sum over depth of p(row, depth) q(column, depth)) for the values of tile blockIdx.x of a matrix of rows x
// columns values. A block has four warps, each of which computes 32 x 32 values. `symmetric`: p is q, and only values on and above the
// diagonal are passed.
template <class Finish>
__device__ __forceinline__ void product(const Factor& p, const Factor& q, u32 rows, u32 columns, u32 depth, bool symmetric, Finish finish) {
    SHARED(bf16, tiles, MUON_STAGES * 2 * MUON_SIZE);
    u32 across = (columns + MUON_TILE - 1) / MUON_TILE;
    u32 first_row = blockIdx.x / across * MUON_TILE, first_column = blockIdx.x % across * MUON_TILE;
    if (first_row >= rows || symmetric && first_column < first_row) return;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
    u32 warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    u32 count = (depth + MUON_DEPTH - 1) / MUON_DEPTH;
    auto load = [&](u32 number) {
        bf16* to = tiles + number % MUON_STAGES * 2 * MUON_SIZE;
        if (number < count) {
            load_factor(p, rows, depth, first_row, number * MUON_DEPTH, to);
            load_factor(q, columns, depth, first_column, number * MUON_DEPTH, to + MUON_SIZE);
        }
        cp_async_commit_group();
    };
    for (u32 number = 0; number + 1 < MUON_STAGES; number++) load(number);
    float c[2][4][4] = {};
    for (u32 number = 0; number < count; number++) {
        cp_async_wait_group<MUON_STAGES - 2>();
        __syncthreads();
        // Overwrites the tiles of the preceding iteration, which all warps have read.
        load(number + MUON_STAGES - 1);
        const bf16 *p_tile = tiles + number % MUON_STAGES * 2 * MUON_SIZE, *q_tile = p_tile + MUON_SIZE;
#pragma unroll
        for (u32 k = 0; k < MUON_DEPTH; k += 16) {
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) fragments(a[m], p_tile, p.depth_step == 1, warp_row + m * 16, k, false);
#pragma unroll
            for (int n = 0; n < 2; n++) fragments(b[n], q_tile, q.depth_step == 1, warp_column + n * 16, k, true);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) mma_m16n8k16(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
    cp_async_wait_all();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first_row + warp_row + m * 16 + g + i / 2 * 8, column = first_column + warp_column + n * 8 + t + i % 2;
                if (row < rows && column < columns && (!symmetric || row <= column)) finish(row, column, c[m][n][i]);
            }
}

// The smaller Gram matrix of filter blockIdx.y. In the first iteration (`first`), the filter is divided by its norm.
extern "C" __global__ void __launch_bounds__(128)
    muon_gram(const Scaler* scaler, const bf16* matrices, const Filter* filters, const FilterNorms* norms, u32 first, bf16* grams) {
    pdl_wait();
    if (!scaler->apply) return;
    Filter f = filters[blockIdx.y];
    u32 side = f.side(), depth = max(f.rows, f.columns);
    float inverse = first ? norms[blockIdx.y].inverse : 1.0f;
    Factor x = {matrices + f.offset, f.is_wide() ? f.columns : 1u, f.is_wide() ? 1u : f.columns};
    bf16* to = grams + f.gram;
    product(x, x, side, side, depth, true, [&](u32 row, u32 column, float sum) {
        to[row * side + column] = to[column * side + row] = to_bf16(sum * inverse * inverse);
    });
}

// b G + c G G for each Gram matrix G, which is symmetric.
extern "C" __global__ void __launch_bounds__(128)
    muon_polynomial(const Scaler* scaler, const bf16* grams, const Filter* filters, bf16* factors) {
    pdl_wait();
    if (!scaler->apply) return;
    Filter f = filters[blockIdx.y];
    u32 side = f.side();
    const bf16* gram = grams + f.gram;
    bf16* to = factors + f.gram;
    Factor x = {gram, side, 1};
    product(x, x, side, side, side, true, [&](u32 row, u32 column, float sum) {
        bf16 value = to_bf16(fmaf(QUINTIC_C, sum, QUINTIC_B * from_bf16(gram[row * side + column])));
        to[row * side + column] = to[column * side + row] = value;
    });
}

// X = a X + F X for each filter X with the result F of muon_polynomial, or a X + X F if X has more rows than columns. In the first
// iteration, X is divided by its norm.
extern "C" __global__ void __launch_bounds__(128)
    muon_multiply(const Scaler* scaler, const bf16* matrices, const bf16* factors, const Filter* filters, const FilterNorms* norms,
                  u32 first, bf16* results) {
    pdl_wait();
    if (!scaler->apply) return;
    Filter f = filters[blockIdx.y];
    u32 side = f.side(), columns = f.columns;
    float inverse = first ? norms[blockIdx.y].inverse : 1.0f;
    const bf16* x = matrices + f.offset;
    bf16* to = results + f.offset;
    Factor factor = {factors + f.gram, side, 1}, by_row = {x, columns, 1}, by_column = {x, 1, columns};
    auto finish = [&](u32 row, u32 column, float sum) {
        u64 at = (u64)row * columns + column;
        to[at] = to_bf16(inverse * fmaf(QUINTIC_A, from_bf16(x[at]), sum));
    };
    if (f.is_wide())
        product(factor, by_column, f.rows, columns, side, false, finish);
    else
        product(by_row, factor, f.rows, columns, side, false, finish);
}

// Filters: w = scale w - lr u, with the orthogonalised u in `matrices`. Other parameters: v = m v + (g + d w),
// w -= lr rate (g + d w + m v).
extern "C" __global__ void __launch_bounds__(256)
    muon_update(float* weights, float* velocity, T* low_precision, GRADIENT_PARAMETERS, const Control* control, const Scaler* scaler,
                float momentum, const Segment* segments, u32 count, const Policy* policies, const FilterNorms* norms,
                const bf16* matrices) {
    pdl_wait();
    if (!scaler->apply) return;
    Gradients gradients = GRADIENTS;
    FlatWeights flat = {weights, low_precision, first_length};
    float lr = control->lr, inverse = scaler->inverse;
    FOR_ITEMS(i, length / 8) {
        u32 number = segment_of(segments, count, i);
        // Padding between two parameters is not updated.
        if (i * 8 >= segments[number].offset + segments[number].length) continue;
        Policy policy = policies[number];
        float w[8];
        flat.get(i, w);
        if (policy.filter != NO_FILTER) {
            float scale = norms[policy.filter].scale;
            uint4 u = ((const uint4*)matrices)[i];
            const u32* pairs = &u.x;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                w[2 * k] = scale * w[2 * k] - lr * __uint_as_float(pairs[k] << 16);
                w[2 * k + 1] = scale * w[2 * k + 1] - lr * __uint_as_float(pairs[k] & 0xffff0000u);
            }
        } else {
            float v[8], g[8], rate = lr * policy.rate;
            gradients.get(i, g);
            load_channels(velocity, i, v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float d = fmaf(policy.decay, w[k], g[k] * inverse);
                v[k] = fmaf(momentum, v[k], d);
                w[k] -= rate * fmaf(momentum, v[k], d);
            }
            store_channels(velocity, i, v);
        }
        flat.set(i, w);
    }
}
