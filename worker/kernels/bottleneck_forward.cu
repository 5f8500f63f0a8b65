// Forward of a bottleneck's expanding 1x1 convolution, from 64 to 256 channels, fused with the batch norm and ReLU before
// it and the statistics of the batch norm behind it. The convolution's input is never stored, and its output is not read
// again for the statistics.

#if DTYPE != 0 && defined(WARPGROUPS)

// NORMED: the convolution's input is relu(scale from + bias) instead of `from`.
template <bool NORMED>
__device__ __forceinline__ void widen(const T* from, const float* scale_, const float* bias_, const T* weights, T* y,
                                      const Control* control, u32 pixels, u32 rows, float* partials, u32* counters,
                                      const Norm& behind, const Site& site, u8* room) {
    T* kept = (T*)(((u64)room + 1023) / 1024 * 1024); // the weights: 256 rows of 64
    T* input = kept + 4 * TILE;                       // twice 64 rows of 64
    T* product = input + 2 * TILE;                    // 64 padded rows of 256
    Value value = value_of_thread(EXPANDED);
    u32 number = next_exchange(site, value.active, value.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, group = t % 8, row = t / 8;
    auto load_reduced = [&](u32 tile) {
        u32 r = tile * TILE_ROWS + row;
        return r < rows ? load(from, (u64)r * (REDUCED / 8) + group) : zeros();
    };
    Raw here = load_reduced(blockIdx.x), ahead = load_reduced(blockIdx.x + gridDim.x);
    for (u32 n = row; n < EXPANDED; n += 64)
        copy_aside(piece(kept, EXPANDED, n, group), weights + n * REDUCED + group * 8, true);
    float scale[8], bias[8];
    if (NORMED) {
        load_channels(scale_, group, scale);
        load_channels(bias_, group, bias);
    }
    copies_done();
    // A warpgroup computes 64 of the 256 channels.
    u32 quarter = warp / 4, turn = 0;
    u64 input_now = matrix(input), kept_now = matrix(kept) + quarter * 64 * 64 / 8;
    float s[16] = {};
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        Raw in = here;
        if (NORMED) {
            float v[8];
            unpack(here, v);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = larger(fmaf(v[k], scale[k], bias[k]), 0.0f);
            in = pack(v);
        }
        store(piece(input + turn * TILE, TILE_ROWS, row, group), 0, in);
        written_for_products();
        here = ahead;
        ahead = load_reduced(tile + 2 * gridDim.x);
        __syncthreads();
        float c[32];
        products_begin();
#pragma unroll
        for (int k = 0; k < REDUCED; k += 16)
            multiply_rows_by_64(c, input_now + (turn * TILE + k) / 8, kept_now + k / 8, k > 0);
        products_end();
        products_done<0>();
        T* to = product + (warp % 4 * 16 + lane / 4) * PADDED_ROW(EXPANDED) + quarter * 64 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            *(u32*)(to + j * 8) = pair(c[j * 4], c[j * 4 + 1]);
            *(u32*)(to + j * 8 + 8 * PADDED_ROW(EXPANDED)) = pair(c[j * 4 + 2], c[j * 4 + 3]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            u32 r = i * 16 + warp, at = tile * TILE_ROWS + r;
            Raw out = load(product + r * PADDED_ROW(EXPANDED), lane);
            if (at < rows) store(y, (u64)at * (EXPANDED / 8) + lane, out);
            if (at < valid) add_statistics(out, s);
        }
    }
    __syncthreads();
    double total;
    if (!column_sums(block_sums(s, (float*)product), value, (float*)product, partials, counters, total)) return;
    if (!reduce_over_ranks(total, site, EXPANDED, value.active, value.index, number, true)) return;
    finish_forward_in_block(behind, total, value, stat_rows(control, pixels, rows), true, (double*)product, nullptr);
}

// 32 x 16 threads. Dynamic shared memory: 1024 bytes for alignment, then the arrays at the top of widen().
#define WIDEN(NAME, NORMED)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                              \
        NAME(const T* from, const float* before_scale, const float* before_bias, const T* weights, T* y,              \
             const Control* control, u32 pixels, u32 rows, float* partials, u32* counters, NORM_PARAMETERS,           \
             SITE_PARAMETERS) {                                                                                      \
        enter();                                                                                                     \
        DYNAMIC_SHARED(room);                                                                                        \
        widen<NORMED>(from, before_scale, before_bias, weights, y, control, pixels, rows, partials, counters, NORM,   \
                      SITE, room);                                                                                   \
    }
WIDEN(bottleneck_forward, true)
WIDEN(projection_forward, false)

#endif
