// Batch norm backward of a block's output whose gradient comes through a 1x1 convolution: that gradient is made tile by
// tile on the tensor cores and used where it is made, so that it is never in memory. What it saves is writing and
// reading the largest tensors of a bottleneck network once each.

#if DTYPE != 0

// A block makes tiles of so many rows and channels: 16 x 16 threads, each with eight channels of four rows.
#define TILE_ROWS 64
#define TILE_CHANNELS 128
#define TILE_TURNS (TILE_ROWS / 16)
// Values between rows of a matrix of `n` columns in shared memory: rows that a warp reads together lie in different banks.
#define APART(n) ((n) + 8)

// The first row of dy that a thread copies, and the eight of its channels: `inner` is a power of two from 64 to 256.
struct Copied {
    u32 row, at, step;
    __device__ __forceinline__ Copied(u32 inner) {
        u32 t = thread_in_block(), chunks = inner / 8;
        row = t / chunks;
        at = t % chunks * 8;
        step = 256 / chunks;
    }
};

// The tile of dy from row `first` on; zeros past the real pictures.
__device__ __forceinline__ void copy_rows(T* to, const T* dy, u32 first, u32 valid, u32 inner, const Copied& c) {
    for (u32 r = c.row; r < TILE_ROWS; r += c.step) {
        bool real = first + r < valid;
        copy_aside(to + r * APART(inner) + c.at, dy + (real ? (u64)(first + r) * inner + c.at : 0), real);
    }
}

// A warp's 32 x 32 of rows (64 x inner) times weights (inner x 128), rounded into `product` (64 x 128).
__device__ __forceinline__ void multiply_tile(const T* rows, const T* weights, T* product, u32 inner) {
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32;
    u32 top = warp % 2 * 32, left = warp / 2 * 32;
    const T* a = rows + (top + lane % 16) * APART(inner) + lane / 16 * 8;
    const T* b = weights + lane % 16 * APART(TILE_CHANNELS) + left + lane / 16 * 8;
    float c[2][4][4] = {};
#pragma unroll 4
    for (u32 k = 0; k < inner; k += 16) {
        u32 x[2][4], w[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices(x[i], a + i * 16 * APART(inner) + k);
            load_matrices_transposed(w[i], b + k * APART(TILE_CHANNELS) + i * 16);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_add(c[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
    }
    T* to = product + (top + lane / 4) * APART(TILE_CHANNELS) + left + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            T* at = to + i * 16 * APART(TILE_CHANNELS) + j * 8;
            *(u32*)at = pair(c[i][j][0], c[i][j][1]);
            *(u32*)(at + 8 * APART(TILE_CHANNELS)) = pair(c[i][j][2], c[i][j][3]);
        }
}

// norm_backward_sums_bits_added with dy W in place of dy: dy [rows, inner], W `weights` [inner, channels].
// gridDim.y = channels / 128. Dynamic shared memory: W's columns, two tiles of dy, one of the product.
extern "C" __global__ void __launch_bounds__(256, 2)
    norm_backward_sums_through(const T* x, const T* dy, const T* weights, u32 inner, const T* more, const u8* mask, T* dz,
                               const Control* control, u32 pixels, u32 rows, u32 channels, float* partials,
                               u32* counters, BACKWARD_PARAMETERS, SITE_PARAMETERS) {
    enter();
    DYNAMIC_SHARED(room);
    SHARED(double, pairs, 256);
    T* kept = (T*)room;
    T* copied = kept + inner * APART(TILE_CHANNELS);
    T* product = copied + 2 * TILE_ROWS * APART(inner);
    Value value = value_of_thread(channels);
    Site site = SITE;
    Backward b = BACKWARD;
    u32 number = next_exchange(site, value.active, value.index);
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 groups = channels / 8, group = blockIdx.y * (TILE_CHANNELS / 8) + threadIdx.x;

    for (u32 k = threadIdx.y; k < inner; k += 16)
        copy_aside(kept + k * APART(TILE_CHANNELS) + threadIdx.x * 8, weights + (u64)k * channels + group * 8, true);
    Copied mine(inner);
    copy_rows(copied, dy, blockIdx.x * TILE_ROWS, valid, inner, mine);

    // What the product meets: this thread's values of x, more and the mask, loaded a tile ahead.
    Raw met[TILE_TURNS], added[TILE_TURNS];
    u32 bits[TILE_TURNS];
    auto meet = [&](u32 tile, int i) {
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
    };
#pragma unroll
    for (int i = 0; i < TILE_TURNS; i++) meet(blockIdx.x, i);
    float means[8], s[16] = {};
    load_channels(b.mean, group, means);
    u32 turn = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        copies_done();
        __syncthreads();
        u32 next = tile + gridDim.x;
        if (next < tiles)
            copy_rows(copied + (turn ^ 1) * TILE_ROWS * APART(inner), dy, next * TILE_ROWS, valid, inner, mine);
        multiply_tile(copied + turn * TILE_ROWS * APART(inner), kept, product, inner);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE_TURNS; i++) {
            u32 r = i * 16 + threadIdx.y;
            float v[8], g[8], m[8];
            unpack(load(product + r * APART(TILE_CHANNELS), threadIdx.x), g);
            unpack(added[i], m);
            unpack(met[i], v);
#pragma unroll
            for (int k = 0; k < 8; k++) g[k] = (bits[i] >> k & 1) ? g[k] + m[k] : 0.0f;
            // What is written is what is summed, so that sums and dx agree.
            Raw out = pack(g);
            unpack(out, g);
            if (tile * TILE_ROWS + r < rows) store(dz, (u64)(tile * TILE_ROWS + r) * groups + group, out);
            add_gradient(v, g, means, s);
            if (next < tiles) meet(next, i);
        }
    }
    __syncthreads();
    float* across = (float*)product;
    double total;
    if (!column_sums(block_sums(s, across), value, across, partials, counters, total)) return;
    parameter_gradients(b, total, value);
    if (!settle(total, site, channels, value.active, value.index, number, true)) return;
    finish_backward_in_block(b, total, value, stat_rows(control, pixels, rows), true, pairs, nullptr);
}

#endif
