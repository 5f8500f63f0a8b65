// Fuses two backward passes: of the 1x1 convolution that follows a residual block (the gradient of its input), and of the batch norm at
// the end of that residual block. Tensor cores compute the first gradient tile by tile, and the thread block that computed a tile uses it
// at once for the second, so the first gradient is never stored. This saves one write and one read of the largest tensors of a bottleneck
// network.

#if DTYPE != FLOAT32 && defined(HAS_WGMMA)

// A block of 32 x 16 threads computes tiles of TILE_ROWS rows and TILE_CHANNELS channels; a thread owns eight channels of
// four rows.
#define ROWS_PER_THREAD (TILE_ROWS / 16)
// Number of values of a 64 x 64 tile of a wgmma operand.
#define TILE (64 * 64)
// Row pitch, in values, of a tile of `n` columns; padding puts rows that a warp reads together into different banks.
#define PADDED_ROW(n) ((n) + ROW_PADDING)

// Address of the eight values of group `group` in row `row` of a swizzled wgmma operand with `height` rows and 64 n columns.
__device__ __forceinline__ T* swizzled(T* matrices, u32 height, u32 row, u32 group) {
    return matrices + group / 8 * height * 64 + row * 64 + ((group ^ row) & 7) * 8;
}

// Stores the product that a block's four warpgroups have computed, 64 padded rows of 8 N columns. Each warpgroup has 2 N columns; `c`
// are the sums of one thread, in wgmma's order.
template <int N> __device__ __forceinline__ void put_product(const float (&c)[N], u32 warp, u32 lane, T* product) {
    T* to = product + (warp % 4 * 16 + lane / 4) * PADDED_ROW(8 * N) + warp / 4 * 2 * N + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        *(u32*)(to + j * 8) = pair(c[j * 4], c[j * 4 + 1]);
        *(u32*)(to + j * 8 + 8 * PADDED_ROW(8 * N)) = pair(c[j * 4 + 2], c[j * 4 + 3]);
    }
}

// Computes what norm_backward_sums_bits_added computes, for the gradient `dy` x `weights`. Here `dy` [rows, inner] is the gradient of the
// convolution's output, and `weights` is [inner, channels]. `inner` is a multiple of 64, `channels` of 256; gridDim.y = channels / 256.
// Dynamic shared memory: 1024 bytes for alignment, columns of the weights, a tile of dy, a tile of the product.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_backward_sums_through(const T* x, const T* dy, const T* weights, u32 inner, const T* added, const u8* mask,
                               T* dz, const Control* control, u32 pixels, u32 rows, u32 channels, float* partials,
                               u32* counters, BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) {
    pdl_wait();
    DYNAMIC_SHARED(smem);
    T* weights_smem = (T*)(((u64)smem + 1023) / 1024 * 1024);
    T* dy_smem = weights_smem + inner * TILE_CHANNELS;
    T* product = dy_smem + inner * TILE_ROWS;
    ChannelSum owned = channel_sum_of_thread(channels);
    Reduction reduction = REDUCTION;
    Backward b = BACKWARD;
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 groups = channels / 8, group = blockIdx.y * (TILE_CHANNELS / 8) + threadIdx.x;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, dy_groups = inner / 8;

    for (u32 k = threadIdx.y; k < inner; k += 16)
        cp_async16(swizzled(weights_smem, inner, k, threadIdx.x), weights + (u64)k * channels + group * 8, true);
    // Copies a tile of dy in groups of eight values.
    auto copy_dy = [&](u32 tile) {
        for (u32 i = t; i < TILE_ROWS * dy_groups; i += 512) {
            u32 r = i / dy_groups, at = i - r * dy_groups;
            bool real = tile * TILE_ROWS + r < valid;
            u64 from = real ? (u64)(tile * TILE_ROWS + r) * inner + at * 8 : 0;
            cp_async16(swizzled(dy_smem, TILE_ROWS, r, at), dy + from, real);
        }
    };
    // This thread's values of x, `added` and the mask in one tile.
    Raw x_tile[ROWS_PER_THREAD], added_tile[ROWS_PER_THREAD];
    u32 mask_tile[ROWS_PER_THREAD];
    auto load_tile = [&](u32 tile) {
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            u32 r = tile * TILE_ROWS + i * 16 + threadIdx.y;
            x_tile[i] = zeros();
            added_tile[i] = zeros();
            mask_tile[i] = 0;
            if (r < valid) {
                u64 at = (u64)r * groups + group;
                x_tile[i] = load(x, at);
                if (added) added_tile[i] = load(added, at);
                mask_tile[i] = mask[at];
            }
        }
    };
    float means[8], s[16] = {};
    load_channels(b.mean, group, means);
    // A warpgroup computes 64 channels of the product.
    u32 quarter = warp / 4;
    u64 dy_desc = wgmma_descriptor(dy_smem), weights_desc = wgmma_descriptor(weights_smem) + quarter * inner * 64 / 8;
    copy_dy(blockIdx.x);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        cp_async_wait_all();
        // The fence waits for all loads in flight: start the next loads after it.
        fence_proxy_async();
        load_tile(tile);
        __syncthreads();
        float c[32];
        wgmma_fence();
        for (u32 k = 0; k < inner; k += 64)
#pragma unroll
            for (u32 i = 0; i < 64; i += 16)
                wgmma_m64n64k16_k_mn(c, dy_desc + (k * TILE_ROWS + i) / 8, weights_desc + (k + i) * 64 / 8, k + i > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        put_product(c, warp, lane, product);
        __syncthreads();
        if (tile + gridDim.x < tiles) copy_dy(tile + gridDim.x);
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            u32 r = i * 16 + threadIdx.y;
            float v[8], g[8], added8[8]; // v: x, g: the gradient
            unpack(load(product + r * PADDED_ROW(TILE_CHANNELS), threadIdx.x), g);
            unpack(added_tile[i], added8);
            unpack(x_tile[i], v);
#pragma unroll
            for (int k = 0; k < 8; k++) g[k] = (mask_tile[i] >> k & 1) ? g[k] + added8[k] : 0.0f;
            // Sum the rounded values, so that the sums agree with dx, which is computed later from the stored dz.
            Raw out = pack(g);
            unpack(out, g);
            if (tile * TILE_ROWS + r < rows) store(dz, (u64)(tile * TILE_ROWS + r) * groups + group, out);
            add_gradient(v, g, means, s);
        }
    }
    __syncthreads();
    float* scratch = (float*)product;
    double total;
    if (!column_sums(block_sums(s, scratch), owned, scratch, partials, counters, total)) return;
    parameter_gradients(b, total, owned);
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    finish_backward_in_block(b, total, owned, rows_in_statistics(control, pixels, rows), true, (double*)product, nullptr);
}

#endif
