// Forward of a bottleneck's expanding 1x1 convolution, from 64 to 256 channels, fused with the batch norm and ReLU before
// it and the statistics of the batch norm after it. The convolution's input is never stored, and its output is not read
// again for the statistics.

#if DTYPE != FLOAT32 && defined(HAS_WGMMA)

// NORMED: the convolution's input is relu(scale from + bias) instead of `from`.
template <bool NORMED>
__device__ __forceinline__ void expand(const T* from, const float* scale_, const float* bias_, const T* weights, T* y,
                                      const Control* control, u32 pixels, u32 rows, float* partials, u32* counters,
                                      const Norm& after, const Reduction& reduction, u8* smem) {
    T* weights_smem = (T*)(((u64)smem + 1023) / 1024 * 1024); // 256 rows of 64
    T* input = weights_smem + 4 * TILE;                       // two stages of 64 rows of 64
    T* product = input + 2 * TILE;                            // 64 padded rows of 256
    ChannelSum owned = channel_sum_of_thread(EXPANDED);
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, group = t % 8, row = t / 8;
    auto load_reduced = [&](u32 tile) {
        u32 r = tile * TILE_ROWS + row;
        return r < rows ? load(from, (u64)r * (REDUCED / 8) + group) : zeros();
    };
    Raw current = load_reduced(blockIdx.x), next = load_reduced(blockIdx.x + gridDim.x);
    for (u32 n = row; n < EXPANDED; n += 64)
        cp_async16(swizzled(weights_smem, EXPANDED, n, group), weights + n * REDUCED + group * 8, true);
    float scale[8], bias[8];
    if (NORMED) {
        load_channels(scale_, group, scale);
        load_channels(bias_, group, bias);
    }
    cp_async_wait_all();
    // A warpgroup computes 64 of the 256 channels.
    u32 quarter = warp / 4, stage = 0;
    u64 input_desc = wgmma_descriptor(input), weights_desc = wgmma_descriptor(weights_smem) + quarter * 64 * 64 / 8;
    float s[16] = {};
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, stage ^= 1) {
        Raw in = current;
        if (NORMED) {
            float v[8];
            unpack(current, v);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = max_nan(fmaf(v[k], scale[k], bias[k]), 0.0f);
            in = pack(v);
        }
        store(swizzled(input + stage * TILE, TILE_ROWS, row, group), 0, in);
        fence_proxy_async();
        current = next;
        next = load_reduced(tile + 2 * gridDim.x);
        __syncthreads();
        float c[32];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < REDUCED; k += 16)
            wgmma_m64n64k16_k_k(c, input_desc + (stage * TILE + k) / 8, weights_desc + k / 8, k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        put_product(c, warp, lane, product);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            u32 r = i * 16 + warp, at = tile * TILE_ROWS + r;
            Raw out = load(product + r * PADDED_ROW(EXPANDED), lane);
            if (at < rows) store(y, (u64)at * (EXPANDED / 8) + lane, out);
            if (at < valid) add_statistics(out, s);
        }
    }
    __syncthreads();
    double total;
    if (!column_sums(block_sums(s, (float*)product), owned, (float*)product, partials, counters, total)) return;
    if (!reduce_over_ranks(total, reduction, EXPANDED, owned.active, owned.index, exchange, true)) return;
    finish_forward_in_block(after, total, owned, rows_in_statistics(control, pixels, rows), true, (double*)product, nullptr);
}

// 32 x 16 threads. Dynamic shared memory: 1024 bytes for alignment, then the arrays at the top of expand().
#define EXPAND(NAME, NORMED)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                             \
        NAME(const T* from, const float* before_scale, const float* before_bias, const T* weights, T* y,             \
             const Control* control, u32 pixels, u32 rows, float* partials, u32* counters, NORM_PARAMETERS,          \
             REDUCTION_PARAMETERS) {                                                                                 \
        pdl_wait();                                                                                                  \
        DYNAMIC_SHARED(smem);                                                                                        \
        expand<NORMED>(from, before_scale, before_bias, weights, y, control, pixels, rows, partials, counters, NORM, \
                      REDUCTION, smem);                                                                              \
    }
EXPAND(bottleneck_forward, true)
EXPAND(projection_forward, false)

#endif
