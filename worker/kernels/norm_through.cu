// Batch norm backward of a block's output whose gradient comes through a 1x1 convolution. Tensor cores compute the
// gradient tile by tile, and the block that computed a tile consumes it, so the gradient is never stored. This saves one
// write and one read of the largest tensors of a bottleneck network.

#if DTYPE != 0 && defined(WARPGROUPS)

// A block of 32 x 16 threads computes tiles of TILE_ROWS rows and TILE_CHANNELS channels; a thread owns eight channels of
// four rows.
#define TURNS (TILE_ROWS / 16)
// Values of a 64 x 64 tile of a wgmma operand.
#define TILE (64 * 64)
// Row pitch, in values, of a tile of `n` columns; padding puts rows that a warp reads together into different banks.
#define PADDED_ROW(n) ((n) + ROW_PADDING)

// Address of chunk `group` (eight values) of a row of a swizzled wgmma operand with `tall` rows and 64 n columns.
__device__ __forceinline__ T* piece(T* matrices, u32 tall, u32 row, u32 group) {
    return matrices + group / 8 * tall * 64 + row * 64 + ((group ^ row) & 7) * 8;
}

// norm_backward_sums_bits_added with dy W in place of dy: dy [rows, inner], W = `weights` [inner, channels]. `inner` is a
// multiple of 64, `channels` of 256; gridDim.y = channels / 256. Dynamic shared memory: 1024 bytes for alignment, W's
// columns, a tile of dy, a tile of the product.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_backward_sums_through(const T* x, const T* dy, const T* weights, u32 inner, const T* more, const u8* mask,
                               T* dz, const Control* control, u32 pixels, u32 rows, u32 channels, float* partials,
                               u32* counters, BACKWARD_PARAMETERS, SITE_PARAMETERS) {
    enter();
    DYNAMIC_SHARED(room);
    T* kept = (T*)(((u64)room + 1023) / 1024 * 1024);
    T* copied = kept + inner * TILE_CHANNELS;
    T* product = copied + inner * TILE_ROWS;
    Value value = value_of_thread(channels);
    Site site = SITE;
    Backward b = BACKWARD;
    u32 number = next_exchange(site, value.active, value.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 groups = channels / 8, group = blockIdx.y * (TILE_CHANNELS / 8) + threadIdx.x;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, pieces = inner / 8;

    for (u32 k = threadIdx.y; k < inner; k += 16)
        copy_aside(piece(kept, inner, k, threadIdx.x), weights + (u64)k * channels + group * 8, true);
    auto copy_rows = [&](u32 tile) {
        for (u32 i = t; i < TILE_ROWS * pieces; i += 512) {
            u32 r = i / pieces, at = i - r * pieces;
            bool real = tile * TILE_ROWS + r < valid;
            u64 from = real ? (u64)(tile * TILE_ROWS + r) * inner + at * 8 : 0;
            copy_aside(piece(copied, TILE_ROWS, r, at), dy + from, real);
        }
    };
    // This thread's values of x, `more` and the mask in one tile.
    Raw met[TURNS], added[TURNS];
    u32 bits[TURNS];
    auto meet = [&](u32 tile) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            u32 r = tile * TILE_ROWS + i * 16 + threadIdx.y;
            met[i] = zeros();
            added[i] = zeros();
            bits[i] = 0;
            if (r < valid) {
                u64 at = (u64)r * groups + group;
                met[i] = load(x, at);
                if (more) added[i] = load(more, at);
                bits[i] = mask[at];
            }
        }
    };
    float means[8], s[16] = {};
    load_channels(b.mean, group, means);
    // A warpgroup computes 64 channels of the product.
    u32 quarter = warp / 4;
    u64 rows_now = matrix(copied), kept_now = matrix(kept) + quarter * inner * 64 / 8;
    copy_rows(blockIdx.x);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        copies_done();
        // The fence waits for all loads in flight: start the next loads after it.
        written_for_products();
        meet(tile);
        __syncthreads();
        float c[32];
        products_begin();
        for (u32 k = 0; k < inner; k += 64)
#pragma unroll
            for (u32 i = 0; i < 64; i += 16)
                multiply_rows_by_columns(c, rows_now + (k * TILE_ROWS + i) / 8, kept_now + (k + i) * 64 / 8, k + i > 0);
        products_end();
        products_done<0>();
        T* to = product + (warp % 4 * 16 + lane / 4) * PADDED_ROW(TILE_CHANNELS) + quarter * 64 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            *(u32*)(to + j * 8) = pair(c[j * 4], c[j * 4 + 1]);
            *(u32*)(to + j * 8 + 8 * PADDED_ROW(TILE_CHANNELS)) = pair(c[j * 4 + 2], c[j * 4 + 3]);
        }
        __syncthreads();
        if (tile + gridDim.x < tiles) copy_rows(tile + gridDim.x);
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            u32 r = i * 16 + threadIdx.y;
            float v[8], g[8], m[8];
            unpack(load(product + r * PADDED_ROW(TILE_CHANNELS), threadIdx.x), g);
            unpack(added[i], m);
            unpack(met[i], v);
#pragma unroll
            for (int k = 0; k < 8; k++) g[k] = (bits[i] >> k & 1) ? g[k] + m[k] : 0.0f;
            // Sum the rounded values that are stored, so that sums and dx agree.
            Raw out = pack(g);
            unpack(out, g);
            if (tile * TILE_ROWS + r < rows) store(dz, (u64)(tile * TILE_ROWS + r) * groups + group, out);
            add_gradient(v, g, means, s);
        }
    }
    __syncthreads();
    float* across = (float*)product;
    double total;
    if (!column_sums(block_sums(s, across), value, across, partials, counters, total)) return;
    parameter_gradients(b, total, value);
    if (!reduce_over_ranks(total, site, channels, value.active, value.index, number, true)) return;
    finish_backward_in_block(b, total, value, stat_rows(control, pixels, rows), true, (double*)product, nullptr);
}

#endif
