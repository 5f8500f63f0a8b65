// Batch normalisation backward, including the ReLU before it (in this direction). dz, the gradient of the shortcut, is g.
//
// Per channel, with g the gradient of the ReLU's input (the masked gradient of y):
//   dbeta = sum g,  dgamma = inv_std sum g (x - mean),
//   dx = scale g + slope x + offset,  slope = -scale inv_std^2 sum g (x - mean) / rows,
//   offset = -scale sum g / rows - slope mean.

// Where the gradient of y comes from.
#define DIRECT 0  // dy
#define ADDED 1   // dy + added
#define POOLED 2  // global average pooling: one row of dy per picture, divided by the picture's pixels
// How a kernel knows which values passed the ReLU.
#define ALL 0       // all: there is no ReLU
#define RECOMPUTE 1 // x * scale + bias > 0
#define BITS 2      // from the forward pass's mask

struct Incoming {
    const T *dy, *added;
    const u8* mask;
    u32 pixels;
};

// The values from which g of one row and group of channels is computed. gradient() writes x to v, and g to g, both in float32.
template <int MASK, int SOURCE> struct Loaded {
    Raw x, dy, added;
    u8 bits;

    __device__ __forceinline__ void fetch(const T* x_, const Incoming& in, u32 row, u32 groups, u32 group) {
        u64 at = (u64)row * groups + group;
        x = ::load(x_, at);
        if (SOURCE == POOLED)
            dy = ::load(in.dy, (u64)(row / in.pixels) * groups + group);
        else
            dy = ::load(in.dy, at);
        if (SOURCE == ADDED) added = ::load(in.added, at);
        if (MASK == BITS) bits = in.mask[at];
    }
    __device__ __forceinline__ void clear() {
        x = zeros();
        dy = zeros();
        if (SOURCE == ADDED) added = zeros();
        bits = 0;
    }
    __device__ __forceinline__ void gradient(const float (&scale)[8], const float (&bias)[8], float pool_scale,
                                             float (&v)[8], float (&g)[8]) const {
        unpack(x, v);
        unpack(dy, g);
        float m[8];
        if (SOURCE == ADDED) unpack(added, m);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (SOURCE == ADDED) g[k] += m[k];
            if (SOURCE == POOLED) g[k] *= pool_scale;
            if (MASK == RECOMPUTE) g[k] = fmaf(v[k], scale[k], bias[k]) > 0 ? g[k] : 0.0f;
            if (MASK == BITS) g[k] = (bits >> k & 1) ? g[k] : 0.0f;
        }
    }
};

struct Backward {
    const float *mean, *inv_std, *scale, *bias; // [C], from the forward pass
    float *dgamma, *dbeta;                      // [C], this rank's sums
    u32 accumulate;                             // whether to add to dgamma and dbeta instead of overwriting them
    float *slope, *offset;                      // [C], results of the first pass
};
#define BACKWARD_PARAMETERS \
    const float *mean, const float *inv_std, const float *scale, const float *bias, float *dgamma, float *dbeta, \
        u32 accumulate, float *slope, float *offset
#define BACKWARD \
    Backward { mean, inv_std, scale, bias, dgamma, dbeta, accumulate, slope, offset }

// Gradients of gamma and beta. They are sums over this rank's rows only: call this function before reduce_over_ranks().
__device__ __forceinline__ void parameter_gradients(const Backward& b, double total, const ChannelSum& owned) {
    if (!owned.active) return;
    u32 c = owned.channel;
    float g = owned.sum_index ? (float)(total * b.inv_std[c]) : (float)total;
    float* to = owned.sum_index ? b.dgamma : b.dbeta;
    if (to) to[c] = b.accumulate ? to[c] + g : g;
}

// Computes the slopes and offsets of the block's channels from their sums over `count` rows. Stores them in global memory if `write`, and
// in shared memory unless `coefficients` is null. `block_totals` has 16 * blockDim.x values.
__device__ __forceinline__ void finish_backward_in_block(const Backward& b, double total, const ChannelSum& owned,
                                                         double count, bool write, double* block_totals,
                                                         float* coefficients) {
    u32 t = thread_in_block(), half = 8 * blockDim.x;
    if (owned.sum_index < 2) block_totals[t] = total;
    __syncthreads();
    if (owned.sum_index == 0 && owned.active) {
        u32 c = owned.channel;
        double inv_count = count > 0 ? 1.0 / count : 0.0, scale = b.scale[c], inv_std = b.inv_std[c];
        double slope = -scale * inv_std * inv_std * block_totals[t + half] * inv_count;
        double offset = -scale * block_totals[t] * inv_count - slope * b.mean[c];
        if (write) {
            b.slope[c] = (float)slope;
            b.offset[c] = (float)offset;
        }
        if (coefficients) {
            coefficients[t] = (float)slope;
            coefficients[half + t] = (float)offset;
        }
    }
}

// Adds g and g (x - mean) of eight channels to the sums `s`; v is x.
__device__ __forceinline__ void add_gradient(const float (&v)[8], const float (&g)[8], const float (&mean)[8],
                                             float (&s)[16]) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        s[k] += g[k];
        s[8 + k] = fmaf(g[k], v[k] - mean[k], s[8 + k]);
    }
}

template <int MASK, int SOURCE>
__device__ __forceinline__ void backward_sums(const T* x, const Incoming& in, T* dz, const Backward& b, const GridStride& w,
                                              u32 valid, u32 rows, float (&s)[16]) {
    if (!w.active) return;
    float mean[8], scale[8], bias[8], pool_scale = SOURCE == POOLED ? 1.0f / in.pixels : 1.0f;
    load_channels(b.mean, w.group, mean);
    if (MASK == RECOMPUTE) {
        load_channels(b.scale, w.group, scale);
        load_channels(b.bias, w.group, bias);
    }
    constexpr int U = IN_FLIGHT;
    u32 end = dz ? rows : valid; // padding rows of dz get zeros
    for (u32 r = w.first; r < end; r += U * w.step) {
        Loaded<MASK, SOURCE> row[U];
#pragma unroll
        for (int i = 0; i < U; i++) {
            row[i].clear();
            if (r + i * w.step < valid) row[i].fetch(x, in, r + i * w.step, w.groups, w.group);
        }
#pragma unroll
        for (int i = 0; i < U; i++) {
            float v[8], g[8];
            row[i].gradient(scale, bias, pool_scale, v, g);
            if (dz && r + i * w.step < end) {
                // Sum the rounded values that are stored, so that sums and dx agree.
                Raw out = pack(g);
                unpack(out, g);
                store(dz, (u64)(r + i * w.step) * w.groups + w.group, out);
            }
            // A padding row has g = 0.
            add_gradient(v, g, mean, s);
        }
    }
}

// Sums of g and g (x - mean) per channel, reduced as Reduction::mode says. Stores g to dz, which may be null or alias dy.
template <int MASK, int SOURCE>
__device__ __forceinline__ void sums_kernel(const T* x, const Incoming& in, T* dz, const Control* control, u32 pixels,
                                            u32 rows, u32 channels, float* partials, u32* counters, const Backward& b,
                                            const Reduction& reduction, float* scratch, double* block_totals) {
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    ChannelSum owned = channel_sum_of_thread(channels);
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    float s[16] = {};
    backward_sums<MASK, SOURCE>(x, in, dz, b, w, valid_rows(control, pixels, rows), rows, s);
    double total;
    if (!column_sums(block_sums(s, scratch), owned, scratch, partials, counters, total)) return;
    parameter_gradients(b, total, owned);
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    finish_backward_in_block(b, total, owned, rows_in_statistics(control, pixels, rows), true, block_totals, nullptr);
}

#define SUMS(NAME, MASK, SOURCE) \
    extern "C" __global__ void __launch_bounds__(512, 1) \
        NAME(const T* x, const T* dy, const T* added, const u8* mask, T* dz, const Control* control, u32 pixels, \
             u32 rows, u32 channels, float* partials, u32* counters, BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) { \
        pdl_wait(); \
        SHARED(float, scratch, 16 * 512); \
        SHARED(double, block_totals, 512); \
        sums_kernel<MASK, SOURCE>(x, Incoming{dy, added, mask, pixels}, dz, control, pixels, rows, channels, partials, \
                                  counters, BACKWARD, REDUCTION, scratch, block_totals); \
    }
SUMS(norm_backward_sums_all, ALL, DIRECT)
SUMS(norm_backward_sums_recompute, RECOMPUTE, DIRECT)
SUMS(norm_backward_sums_recompute_added, RECOMPUTE, ADDED)
SUMS(norm_backward_sums_bits, BITS, DIRECT)
SUMS(norm_backward_sums_bits_added, BITS, ADDED)
SUMS(norm_backward_sums_bits_pooled, BITS, POOLED)

// The second half of norm_backward_sums_*, in a kernel of its own: `totals` are the sums of norm_backward_sums_*, or of an all-reduce.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_backward_finish(const float* totals, const Control* control, u32 pixels, u32 rows, u32 channels,
                         BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) {
    pdl_wait();
    SHARED(double, block_totals, 512);
    ChannelSum owned = channel_sum_of_thread(channels);
    Reduction reduction = REDUCTION;
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    double total = owned.active ? totals[owned.index] : 0.0f;
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    finish_backward_in_block(BACKWARD, total, owned, rows_in_statistics(control, pixels, rows), true, block_totals, nullptr);
}

// dx of eight values from x (v) and g.
struct InputGradient {
    float scale[8], slope[8], offset[8];

    __device__ __forceinline__ Raw operator()(const float (&v)[8], const float (&g)[8]) const {
        float d[8];
#pragma unroll
        for (int k = 0; k < 8; k++) d[k] = fmaf(scale[k], g[k], fmaf(slope[k], v[k], offset[k]));
        return pack(d);
    }
};

// dx = scale g + slope x + offset, 0 in padding rows. dx may alias dy.
template <int MASK, int SOURCE>
__device__ __forceinline__ void backward_apply(const T* x, const Incoming& in, const float* scale, const float* bias_,
                                               const float* slope, const float* offset, T* dx, u32 valid, u32 rows,
                                               u32 channels) {
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    if (!w.active) return;
    InputGradient f;
    float bias[8], pool_scale = SOURCE == POOLED ? 1.0f / in.pixels : 1.0f;
    load_channels(scale, w.group, f.scale);
    load_channels(slope, w.group, f.slope);
    load_channels(offset, w.group, f.offset);
    if (MASK == RECOMPUTE) load_channels(bias_, w.group, bias);
    constexpr int U = IN_FLIGHT;
    for (u32 r = w.first; r < rows; r += U * w.step) {
        Loaded<MASK, SOURCE> row[U];
#pragma unroll
        for (int i = 0; i < U; i++)
            if (r + i * w.step < valid) row[i].fetch(x, in, r + i * w.step, w.groups, w.group);
#pragma unroll
        for (int i = 0; i < U; i++) {
            u32 at = r + i * w.step;
            if (at >= rows) continue;
            Raw out = zeros();
            if (at < valid) {
                float v[8], g[8];
                row[i].gradient(f.scale, bias, pool_scale, v, g);
                out = f(v, g);
            }
            store(dx, (u64)at * w.groups + w.group, out);
        }
    }
}

#define BACKWARD_APPLY(NAME, MASK, SOURCE)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        NAME(const T* x, const T* dy, const T* added, const u8* mask, const float* scale, const float* bias, \
             const float* slope, const float* offset, T* dx, const Control* control, u32 pixels, u32 rows,   \
             u32 channels) {                                                                                 \
        pdl_wait();                                                                                          \
        backward_apply<MASK, SOURCE>(x, Incoming{dy, added, mask, pixels}, scale, bias, slope, offset, dx,   \
                                     valid_rows(control, pixels, rows), rows, channels);                     \
    }
BACKWARD_APPLY(norm_backward_apply_all, ALL, DIRECT)
BACKWARD_APPLY(norm_backward_apply_recompute, RECOMPUTE, DIRECT)
BACKWARD_APPLY(norm_backward_apply_recompute_added, RECOMPUTE, ADDED)
BACKWARD_APPLY(norm_backward_apply_bits, BITS, DIRECT)
BACKWARD_APPLY(norm_backward_apply_bits_added, BITS, ADDED)
BACKWARD_APPLY(norm_backward_apply_bits_pooled, BITS, POOLED)

// Both passes in one launch, for small activations; see forward_small().
template <int MASK, int SOURCE>
__device__ __forceinline__ void backward_small(const T* x, const Incoming& in, T* dz, T* dx, const Control* control,
                                               u32 pixels, u32 rows, u32 channels, const Backward& b, const Reduction& reduction,
                                               float* scratch, float* cluster_scratch, double* block_totals, float* coefficients) {
    cluster_arrive();
    u32 part = cluster_rank(), parts = cluster_size();
    GridStride w = rows_of_thread(channels, part, parts);
    ChannelSum owned = channel_sum_of_thread(channels);
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows);
    constexpr int U = IN_FLIGHT;
    float s[16] = {}, mean[8], bias[8], pool_scale = SOURCE == POOLED ? 1.0f / in.pixels : 1.0f;
    InputGradient f;
    Raw x_kept[U], g_kept[U]; // the first rows
    u32 end = w.active ? (dz ? rows : valid) : 0;
    if (w.active) {
        load_channels(b.mean, w.group, mean);
        load_channels(b.scale, w.group, f.scale);
        if (MASK == RECOMPUTE) load_channels(b.bias, w.group, bias);
    }
    {
        Loaded<MASK, SOURCE> row[U];
#pragma unroll
        for (int i = 0; i < U; i++) {
            row[i].clear();
            if (w.active && w.first + i * w.step < valid) row[i].fetch(x, in, w.first + i * w.step, w.groups, w.group);
        }
#pragma unroll
        for (int i = 0; i < U; i++) {
            float v[8], g[8];
            row[i].gradient(f.scale, bias, pool_scale, v, g);
            x_kept[i] = row[i].x;
            g_kept[i] = pack(g);
            unpack(g_kept[i], g); // sum the rounded values
            if (dz && w.first + i * w.step < end) store(dz, (u64)(w.first + i * w.step) * w.groups + w.group, g_kept[i]);
            if (w.active) add_gradient(v, g, mean, s);
        }
    }
    // The other rows, fewer at a time: the first rows occupy registers.
    constexpr int V = U / 2;
    for (u32 first = w.first + U * w.step; first < end; first += V * w.step) {
        Loaded<MASK, SOURCE> row[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            row[i].clear();
            if (first + i * w.step < valid) row[i].fetch(x, in, first + i * w.step, w.groups, w.group);
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            float v[8], g[8];
            row[i].gradient(f.scale, bias, pool_scale, v, g);
            if (dz && first + i * w.step < end) {
                Raw out = pack(g);
                unpack(out, g);
                store(dz, (u64)(first + i * w.step) * w.groups + w.group, out);
            }
            add_gradient(v, g, mean, s);
        }
    }
    double total = cluster_sums(block_sums(s, scratch), owned, cluster_scratch);
    bool leader = part == 0;
    if (leader) parameter_gradients(b, total, owned);
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, leader)) return;
    finish_backward_in_block(b, total, owned, rows_in_statistics(control, pixels, rows), leader, block_totals, coefficients);
    __syncthreads();
    if (!w.active) return;
    load_channels(coefficients, threadIdx.x, f.slope);
    load_channels(coefficients + 8 * blockDim.x, threadIdx.x, f.offset);
#pragma unroll
    for (int i = 0; i < U; i++) {
        u32 at = w.first + i * w.step;
        if (at >= rows) continue;
        float v[8], g[8];
        unpack(x_kept[i], v);
        unpack(g_kept[i], g);
        store(dx, (u64)at * w.groups + w.group, at < valid ? f(v, g) : zeros());
    }
    for (u32 first = w.first + U * w.step; first < rows; first += V * w.step) {
        Loaded<MASK, SOURCE> row[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            u32 at = first + i * w.step;
            if (at >= valid) continue;
            row[i].clear();
            if (dz) {
                row[i].x = load(x, (u64)at * w.groups + w.group);
                row[i].dy = load(dz, (u64)at * w.groups + w.group);
            } else {
                row[i].fetch(x, in, at, w.groups, w.group);
            }
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            u32 at = first + i * w.step;
            if (at >= rows) continue;
            Raw out = zeros();
            if (at < valid) {
                float v[8], g[8];
                if (dz) {
                    unpack(row[i].x, v);
                    unpack(row[i].dy, g);
                } else {
                    row[i].gradient(f.scale, bias, pool_scale, v, g);
                }
                out = f(v, g);
            }
            store(dx, (u64)at * w.groups + w.group, out);
        }
    }
}

#define BACKWARD_SMALL(NAME, MASK, SOURCE)                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                            \
        NAME(const T* x, const T* dy, const T* added, const u8* mask, T* dz, T* dx, const Control* control,         \
             u32 pixels, u32 rows, u32 channels, BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) {                       \
        pdl_wait();                                                                                                 \
        SHARED(float, scratch, 16 * 16 * SMALL_GROUPS);                                                             \
        SHARED(float, cluster_scratch, 9 * 16 * SMALL_GROUPS);                                                      \
        SHARED(double, block_totals, 16 * SMALL_GROUPS);                                                            \
        SHARED(float, coefficients, 16 * SMALL_GROUPS);                                                             \
        backward_small<MASK, SOURCE>(x, Incoming{dy, added, mask, pixels}, dz, dx, control, pixels, rows, channels, \
                                     BACKWARD, REDUCTION, scratch, cluster_scratch, block_totals, coefficients);    \
    }
BACKWARD_SMALL(norm_backward_small_all, ALL, DIRECT)
BACKWARD_SMALL(norm_backward_small_recompute, RECOMPUTE, DIRECT)
BACKWARD_SMALL(norm_backward_small_recompute_added, RECOMPUTE, ADDED)
BACKWARD_SMALL(norm_backward_small_bits, BITS, DIRECT)
BACKWARD_SMALL(norm_backward_small_bits_added, BITS, ADDED)
BACKWARD_SMALL(norm_backward_small_bits_pooled, BITS, POOLED)
