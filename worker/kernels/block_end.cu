// The end of a bottleneck block with 256 channels, fused with the next 1x1 convolution, to 64 channels, and the statistics
// of that convolution's batch norm. The block's output is stored, but not read again by this kernel.

#if DTYPE != FLOAT32 && defined(HAS_WGMMA)

// y = relu(scale x + bias + shortcut), computed by Apply; z = y W^T.
struct BlockEnd {
    const T* x;                             // [rows, 256]
    const float *scale, *bias;              // [256]
    const T* shortcut;                      // [rows, 256]
    const float *shortcut_scale, *shortcut_bias; // [256], read if ADD is 2
    T* y;                                   // [rows, 256]
    u8* mask;                               // one bit per value of y
    const T* weights;                       // [64, 256]
    T* z;                                   // [rows, 64]
};

template <int ADD>
__device__ __forceinline__ void end_block(const BlockEnd& p, const Control* control, u32 pixels, u32 rows,
                                          float* partials, u32* counters, const Norm& after, const Reduction& reduction,
                                          u8* smem) {
    T* weights_smem = (T*)(((u64)smem + 1023) / 1024 * 1024); // 64 rows of 256
    T* input = weights_smem + 4 * TILE;                       // the convolution's input: 64 rows of 256
    T* product = input + 4 * TILE;                            // 64 padded rows of 64
    T* stages = product + TILE_ROWS * PADDED_ROW(REDUCED);    // two tiles of x and of the shortcut, in thread order
    float* coefficients = (float*)(stages + 16 * TILE);       // scale and bias of x, then of the shortcut
    ChannelSum owned = channel_sum_of_thread(REDUCED);
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, group = t % 8, row = t / 8;
    auto copy_expanded = [&](u32 tile, u32 stage) { copy_pair(p.x, p.shortcut, tile, rows, stages, stage); };
    for (u32 n = warp; n < REDUCED; n += 16)
        cp_async16(swizzled(weights_smem, 64, n, lane), p.weights + n * EXPANDED + lane * 8, true);
    copy_expanded(blockIdx.x, 0);
    copy_expanded(blockIdx.x + gridDim.x, 1);
    if (t < EXPANDED) {
        coefficients[t] = p.scale[t];
        coefficients[EXPANDED + t] = p.bias[t];
        if (ADD == 2) {
            coefficients[2 * EXPANDED + t] = p.shortcut_scale[t];
            coefficients[3 * EXPANDED + t] = p.shortcut_bias[t];
        }
    }
    __syncthreads();

    // A warpgroup computes 16 of the 64 channels.
    u32 quarter = warp / 4, stage = 0;
    u64 input_desc = wgmma_descriptor(input), weights_desc = wgmma_descriptor(weights_smem) + quarter * 16 * 64 / 8;
    float s[16] = {};
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, stage ^= 1) {
        cp_async_wait_group<1>();
        Raw out[ROWS_PER_THREAD];
        u32 positive[ROWS_PER_THREAD];
        {
            Apply<ADD> f = apply_of<ADD>(coefficients, coefficients + EXPANDED, lane, coefficients + 2 * EXPANDED,
                                         coefficients + 3 * EXPANDED, lane, true);
#pragma unroll
            for (int i = 0; i < ROWS_PER_THREAD; i++) {
                const T* from = stages + ((stage * ROWS_PER_THREAD + i) * 2 * 512 + t) * 8;
                positive[i] = f(load(from, 0), load(from, 512), out[i]);
                store(swizzled(input, TILE_ROWS, i * 16 + warp, lane), 0, out[i]);
            }
        }
        // The fence waits for all copies and stores in flight: start the next copies after it.
        fence_proxy_async();
        copy_expanded(tile + 2 * gridDim.x, stage);
        __syncthreads();
        float c[8];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < EXPANDED / 16; k++) {
            u32 at = (k / 4 * TILE + k % 4 * 16) / 8;
            wgmma_m64n16k16(c, input_desc + at, weights_desc + at, k > 0);
        }
        wgmma_commit_group();
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            u32 r = tile * TILE_ROWS + i * 16 + warp;
            if (r < rows) {
                store(p.y, (u64)r * (EXPANDED / 8) + lane, out[i]);
                p.mask[(u64)r * (EXPANDED / 8) + lane] = (u8)positive[i];
            }
        }
        wgmma_wait_group<0>();
        put_product(c, warp, lane, product);
        __syncthreads();
        u32 at = tile * TILE_ROWS + row;
        Raw z = load(product + row * PADDED_ROW(REDUCED), group);
        if (at < rows) store(p.z, (u64)at * (REDUCED / 8) + group, z);
        if (at < valid) add_statistics(z, s);
    }
    cp_async_wait_all();
    __syncthreads();
    double total;
    if (!column_sums(block_sums(s, (float*)input), owned, (float*)input, partials, counters, total)) return;
    if (!reduce_over_ranks(total, reduction, REDUCED, owned.active, owned.index, exchange, true)) return;
    finish_forward_in_block(after, total, owned, rows_in_statistics(control, pixels, rows), true, (double*)input, nullptr);
}

// 8 x 64 threads. Dynamic shared memory: 1024 bytes for alignment, then the arrays at the top of end_block().
#define END_BLOCK(NAME, ADD)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                             \
        NAME(const T* x, const float* wide_scale, const float* wide_bias, const T* shortcut,                         \
             const float* shortcut_scale, const float* shortcut_bias, T* y, u8* mask, const T* weights, T* z,        \
             const Control* control, u32 pixels, u32 rows, float* partials, u32* counters, NORM_PARAMETERS,          \
             REDUCTION_PARAMETERS) {                                                                                 \
        pdl_wait();                                                                                                  \
        DYNAMIC_SHARED(smem);                                                                                        \
        end_block<ADD>(BlockEnd{x, wide_scale, wide_bias, shortcut, shortcut_scale, shortcut_bias, y, mask, weights, \
                                z},                                                                                  \
                       control, pixels, rows, partials, counters, NORM, REDUCTION, smem);                            \
    }
END_BLOCK(block_end_add, 1)
END_BLOCK(block_end_add_norm, 2)

#endif
