// Backward of a 1x1 convolution from 64 to 256 channels, fused with the batch norms on both sides. One pass applies the
// batch norm after the convolution (dy = scale g + slope x + offset), computes the gradients of the convolution's input
// and weights, and takes the sums of the batch norm before the convolution. dy is never stored, and the tensors with 256
// channels, the largest of a bottleneck network, are read once.

#if DTYPE != FLOAT32 && defined(HAS_WGMMA)

struct Bottleneck {
    const T *x, *g;                      // [rows, 256]
    const float *scale, *slope, *offset; // [256]
    const T* weights;                    // [256, 64]
    const T* from;                       // [rows, 64]: the convolution's input; if NORMED, the input of `before`
    T* dfrom;                            // [rows, 64]: the gradient of the convolution's input
    float* dweights;                     // [gridDim.x, 256, 64]
};

// Copies this thread's values of a tile of two tensors [rows, 256] to one of the two stages of `stages`: zeros from row `end` on. Two
// tiles are in flight at any time. A thread copies only values that it reads itself.
__device__ __forceinline__ void copy_pair(const T* a, const T* b, u32 tile, u32 end, T* stages, u32 stage) {
    u32 t = thread_in_block();
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
        u32 r = tile * TILE_ROWS + i * 16 + t / 32;
        u64 from = r < end ? (u64)r * EXPANDED + t % 32 * 8 : 0;
        T* to = stages + ((stage * ROWS_PER_THREAD + i) * 2 * 512 + t) * 8;
        cp_async16(to, a + from, r < end);
        cp_async16(to + 512 * 8, b + from, r < end);
    }
    cp_async_commit_group();
}

// NORMED: `from` is the input of a batch norm with a ReLU, `before`, whose output the convolution reads.
template <bool NORMED>
__device__ __forceinline__ void bottleneck(const Bottleneck& p, const Control* control, u32 pixels, u32 rows,
                                           float* partials, u32* counters, const Backward& before, const Reduction& reduction,
                                           u8* smem) {
    T* weights_smem = (T*)(((u64)smem + 1023) / 1024 * 1024); // transposed: 64 rows of 256
    T* dy = weights_smem + 4 * TILE;                          // 64 rows of 256
    T* input = dy + 4 * TILE;                                 // 64 rows of 64
    T* product = input + TILE;                                // 64 padded rows of 64
    T* stages = product + TILE_ROWS * PADDED_ROW(REDUCED);    // two tiles of x and g, in thread order
    float* expanded_coefficients = (float*)(stages + 16 * TILE);        // scale, slope and offset
    float* reduced_coefficients = expanded_coefficients + 3 * EXPANDED; // scale, bias and mean
    ChannelSum owned = channel_sum_of_thread(REDUCED);
    u32 exchange = NORMED ? next_exchange(reduction, owned.active, owned.index) : 0;
    u32 valid = valid_rows(control, pixels, rows), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    u32 t = thread_in_block(), lane = t % 32, warp = t / 32, group = t % 8, row = t / 8;

    auto copy_expanded = [&](u32 tile, u32 stage) { copy_pair(p.x, p.g, tile, valid, stages, stage); };
    auto load_reduced = [&](u32 tile) {
        u32 r = tile * TILE_ROWS + row;
        return r < valid ? load(p.from, (u64)r * (REDUCED / 8) + group) : zeros();
    };
    copy_expanded(blockIdx.x, 0);
    copy_expanded(blockIdx.x + gridDim.x, 1);
    Raw current = load_reduced(blockIdx.x), next = load_reduced(blockIdx.x + gridDim.x);
    for (u32 k = row; k < EXPANDED; k += 64) {
        Raw w = load(p.weights + k * REDUCED, group);
        const T* values = (const T*)&w;
#pragma unroll
        for (int i = 0; i < 8; i++) swizzled(weights_smem, 64, group * 8 + i, k / 8)[k % 8] = values[i];
    }
    if (t < EXPANDED) {
        expanded_coefficients[t] = p.scale[t];
        expanded_coefficients[EXPANDED + t] = p.slope[t];
        expanded_coefficients[2 * EXPANDED + t] = p.offset[t];
    }
    if (NORMED && t < REDUCED) {
        reduced_coefficients[t] = before.scale[t];
        reduced_coefficients[REDUCED + t] = before.bias[t];
        reduced_coefficients[2 * REDUCED + t] = before.mean[t];
    }
    __syncthreads();

    // A warpgroup computes 16 channels of the input's gradient and 64 rows of the weights' gradient.
    u32 quarter = warp / 4, stage = 0;
    u64 dy_desc = wgmma_descriptor(dy), input_desc = wgmma_descriptor(input);
    u64 weights_desc = wgmma_descriptor(weights_smem) + quarter * 16 * 64 / 8;
    float d[32] = {}, s[16] = {};
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, stage ^= 1) {
        u32 passed = 0; // bit k: value k passes the ReLU
        {
            Raw out = current;
            if (NORMED) {
                float v[8], scale[8], bias[8];
                load_channels(reduced_coefficients, group, scale);
                load_channels(reduced_coefficients + REDUCED, group, bias);
                unpack(current, v);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    float y = fmaf(v[k], scale[k], bias[k]);
                    passed |= y > 0 ? 1u << k : 0u;
                    v[k] = max_nan(y, 0.0f);
                }
                out = pack(v);
            }
            store(swizzled(input, TILE_ROWS, row, group), 0, out);
        }
        cp_async_wait_group<1>();
        {
            InputGradient f;
            load_channels(expanded_coefficients, lane, f.scale);
            load_channels(expanded_coefficients + EXPANDED, lane, f.slope);
            load_channels(expanded_coefficients + 2 * EXPANDED, lane, f.offset);
#pragma unroll
            for (int i = 0; i < ROWS_PER_THREAD; i++) {
                u32 r = i * 16 + warp;
                const T* from = stages + ((stage * ROWS_PER_THREAD + i) * 2 * 512 + t) * 8;
                float v[8], w[8];
                unpack(load(from, 0), v);
                unpack(load(from, 512), w);
                Raw out = f(v, w);
                if (tile * TILE_ROWS + r >= valid) out = zeros();
                store(swizzled(dy, TILE_ROWS, r, lane), 0, out);
            }
        }
        // The fence waits for all copies in flight: start the next copies after it.
        fence_proxy_async();
        copy_expanded(tile + 2 * gridDim.x, stage);
        Raw after_next = load_reduced(tile + 2 * gridDim.x);
        __syncthreads();
        float c[8];
#pragma unroll
        for (int i = 0; i < 8; i++) c[i] = 0;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < EXPANDED / 16; k++) {
            u32 at = (k / 4 * TILE + k % 4 * 16) / 8;
            wgmma_m64n16k16(c, dy_desc + at, weights_desc + at, k > 0);
        }
        wgmma_commit_group();
#pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; k++)
            wgmma_m64n64k16_mn_mn(d, dy_desc + (quarter * TILE + k * 16 * 64) / 8, input_desc + k * 16 * 64 / 8, 1);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        put_product(c, warp, lane, product);
        __syncthreads();
        Raw out = load(product + row * PADDED_ROW(REDUCED), group);
        if (tile * TILE_ROWS + row < rows) store(p.dfrom, (u64)(tile * TILE_ROWS + row) * (REDUCED / 8) + group, out);
        if (NORMED) {
            float v[8], w[8], mean[8];
            load_channels(reduced_coefficients + 2 * REDUCED, group, mean);
            unpack(current, v);
            unpack(out, w);
#pragma unroll
            for (int k = 0; k < 8; k++) w[k] = (passed >> k & 1) ? w[k] : 0.0f;
            add_gradient(v, w, mean, s);
        }
        current = next;
        next = after_next;
        wgmma_wait_group<0>();
        __syncthreads();
    }
    cp_async_wait_all();
    float* to = p.dweights + ((u64)blockIdx.x * EXPANDED + warp * 16 + lane / 4) * REDUCED + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        *(uint2*)(to + j * 8) = {__float_as_uint(d[j * 4]), __float_as_uint(d[j * 4 + 1])};
        *(uint2*)(to + j * 8 + 8 * REDUCED) = {__float_as_uint(d[j * 4 + 2]), __float_as_uint(d[j * 4 + 3])};
    }
    if (!NORMED) return;
    float* scratch = (float*)dy;
    double total;
    if (!column_sums(block_sums(s, scratch), owned, scratch, partials, counters, total)) return;
    parameter_gradients(before, total, owned);
    if (!reduce_over_ranks(total, reduction, REDUCED, owned.active, owned.index, exchange, true)) return;
    double* block_totals = (double*)dy;
    finish_backward_in_block(before, total, owned, rows_in_statistics(control, pixels, rows), true, block_totals, nullptr);
}

// 8 x 64 threads. Each thread owns eight channels of four rows of the 256-channel tensors and of one row of the 64-channel tensors.
// Dynamic shared memory: 1024 bytes for alignment, then the arrays at the top of bottleneck().
#define BOTTLENECK(NAME, NORMED)                                                                                  \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                          \
        NAME(const T* x, const T* g, const float* wide_scale, const float* wide_slope, const float* wide_offset,  \
             const T* weights, const T* from, T* dfrom, float* dweights, const Control* control, u32 pixels,      \
             u32 rows, float* partials, u32* counters, BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) {               \
        pdl_wait();                                                                                               \
        DYNAMIC_SHARED(smem);                                                                                     \
        bottleneck<NORMED>(Bottleneck{x, g, wide_scale, wide_slope, wide_offset, weights, from, dfrom, dweights}, \
                           control, pixels, rows, partials, counters, BACKWARD, REDUCTION, smem);                 \
    }
BOTTLENECK(bottleneck_backward, true)
BOTTLENECK(projection_backward, false)

// to [length] = the sum of `partial` [blocks, length] over the blocks, in block order. 32 x 8 threads; a thread loads four values.
extern "C" __global__ void __launch_bounds__(256)
    sum_weight_gradients(const float* partial, T* to, u32 blocks, u32 length) {
    pdl_wait();
    SHARED(float4, scratch, 256);
    u32 quad = blockIdx.x * 32 + threadIdx.x;
    bool active = quad < length / 4;
    float4 s = {0, 0, 0, 0};
    if (active)
#pragma unroll 4
        for (u32 b = threadIdx.y; b < blocks; b += 8) {
            float4 v = ((const float4*)(partial + (u64)b * length))[quad];
            s.x += v.x;
            s.y += v.y;
            s.z += v.z;
            s.w += v.w;
        }
    scratch[thread_in_block()] = s;
    __syncthreads();
    if (threadIdx.y || !active) return;
    for (u32 w = 1; w < 8; w++) {
        float4 v = scratch[w * 32 + threadIdx.x];
        s.x += v.x;
        s.y += v.y;
        s.z += v.z;
        s.w += v.w;
    }
    *(uint2*)(to + (u64)quad * 4) = {pair(s.x, s.y), pair(s.z, s.w)};
}

#endif
