// Batch normalisation forward: statistics, scale and bias of each channel, and the pass that applies scale and bias,
// adds the shortcut and applies the ReLU.

// Per-channel float32 arrays.
struct Norm {
    const float *gamma, *beta;
    float *running_mean, *running_var; // null: not updated
    float *mean, *inv_std;             // of this batch, for backward
    float *scale, *bias;               // y = scale x + bias
    float running_momentum;            // share of this batch in the running statistics
};
#define NORM_PARAMETERS \
    const float *gamma, const float *beta, float *running_mean, float *running_var, float *mean, float *inv_std, \
        float *scale, float *bias, float running_momentum
#define NORM \
    Norm { gamma, beta, running_mean, running_var, mean, inv_std, scale, bias, running_momentum }

// Scale and bias of channel `c` from its sums of x and x * x over `count` rows. Stores Norm's results only if `write`.
__device__ __forceinline__ void finish_forward(const Norm& n, u32 c, double sum, double square, double count,
                                               bool write, float& scale, float& bias) {
    double inv_count = count > 0 ? 1.0 / count : 0.0;
    double mean = sum * inv_count, var = square * inv_count - mean * mean;
    if (var < 0) var = 0; // unlike max(), this keeps a NaN
    float inv_std = 1.0f / sqrtf((float)(var + EPSILON));
    scale = n.gamma[c] * inv_std;
    bias = (float)(n.beta[c] - mean * scale);
    if (!write) return;
    n.scale[c] = scale;
    n.bias[c] = bias;
    n.mean[c] = (float)mean;
    n.inv_std[c] = inv_std;
    // A float16 step with non-finite values is skipped, including its running statistics.
    if (n.running_mean && count > 0 && (DTYPE != FLOAT16 || var - var == 0)) {
        double unbias = count / (count > 2 ? count - 1.0 : 1.0); // as in PyTorch, the running variance is unbiased
        float share = n.running_momentum, kept = 1.0f - share;
        n.running_mean[c] = kept * n.running_mean[c] + share * (float)mean;
        n.running_var[c] = kept * n.running_var[c] + share * (float)(var * unbias);
    }
}

// finish_forward() for the block's channels. `block_totals` has 16 * blockDim.x values: the sums of x of the block's
// 8 * blockDim.x channels, then the sums of x * x.
__device__ __forceinline__ void finish_forward_in_block(const Norm& n, double total, const ChannelSum& owned, double count,
                                                        bool write, double* block_totals, float* coefficients) {
    u32 t = thread_in_block(), half = 8 * blockDim.x;
    if (owned.sum_index < 2) block_totals[t] = total;
    __syncthreads();
    if (owned.sum_index == 0 && owned.active) {
        float scale, bias;
        finish_forward(n, owned.channel, block_totals[t], block_totals[t + half], count, write, scale, bias);
        if (coefficients) {
            coefficients[t] = scale;
            coefficients[half + t] = bias;
        }
    }
}

// Adds x and x * x of eight channels to the sums `s`.
__device__ __forceinline__ void add_statistics(const Raw& raw, float (&s)[16]) {
    float v[8];
    unpack(raw, v);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        s[k] += v[k];
        s[8 + k] = fmaf(v[k], v[k], s[8 + k]);
    }
}

// Sums of x and x * x per channel over the rows that are not padding (a row is one pixel), reduced over the ranks as
// Reduction::mode (peers.cu) says.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_statistics(const T* x, const Control* control, u32 pixels, u32 rows, u32 channels, float* partials,
                    u32* counters, NORM_PARAMETERS, REDUCTION_PARAMETERS) {
    pdl_wait();
    SHARED(float, scratch, 16 * 512);
    SHARED(double, block_totals, 512);
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    ChannelSum owned = channel_sum_of_thread(channels);
    Reduction reduction = REDUCTION;
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows);
    float s[16] = {};
    constexpr int U = 2 * IN_FLIGHT;
    if (w.active)
        for (u32 r = w.first; r < valid; r += U * w.step) {
            Raw raw[U];
#pragma unroll
            for (int i = 0; i < U; i++) {
                raw[i] = zeros();
                if (r + i * w.step < valid) raw[i] = load(x, (u64)(r + i * w.step) * w.groups + w.group);
            }
#pragma unroll
            for (int i = 0; i < U; i++) add_statistics(raw[i], s);
        }
    double total;
    if (!column_sums(block_sums(s, scratch), owned, scratch, partials, counters, total)) return;
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    finish_forward_in_block(NORM, total, owned, rows_in_statistics(control, pixels, rows), true, block_totals, nullptr);
}

// The second half of norm_statistics, for sums that an all-reduce or a convolution's epilogue has computed.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_finish(const float* sum, const float* square, const Control* control, u32 pixels, u32 rows, u32 channels,
                NORM_PARAMETERS, REDUCTION_PARAMETERS) {
    pdl_wait();
    SHARED(double, block_totals, 512);
    ChannelSum owned = channel_sum_of_thread(channels);
    Reduction reduction = REDUCTION;
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    double total = owned.active ? (owned.sum_index ? square : sum)[owned.channel] : 0.0f;
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    finish_forward_in_block(NORM, total, owned, rows_in_statistics(control, pixels, rows), true, block_totals, nullptr);
}

// Scale and bias from the running statistics, for inference. One thread per channel.
extern "C" __global__ void norm_to_scale_and_bias(const float* gamma, const float* beta, const float* running_mean,
                                                  const float* running_var, float* scale, float* bias, u32 channels) {
    pdl_wait();
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    float s = gamma[c] / sqrtf((float)(running_var[c] + EPSILON));
    scale[c] = s;
    bias[c] = (float)(beta[c] - (double)running_mean[c] * s);
}

// Applies a batch norm to eight values of a row, and returns a mask: bit k is set if result k is positive. ADD: 0 adds nothing, 1 the
// shortcut, 2 the shortcut after its own scale and bias (the batch norm of a projection).
template <int ADD> struct Apply {
    float scale[8], bias[8], shortcut_scale[8], shortcut_bias[8];
    float floor; // 0 for ReLU, else minus infinity

    __device__ __forceinline__ u32 operator()(const Raw& x, const Raw& shortcut, Raw& y) const {
        float v[8], s[8];
        unpack(x, v);
        if (ADD) unpack(shortcut, s);
        u32 positive = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = fmaf(v[k], scale[k], bias[k]);
            if (ADD == 1) v[k] += s[k];
            if (ADD == 2) v[k] += fmaf(s[k], shortcut_scale[k], shortcut_bias[k]);
            v[k] = max_nan(v[k], floor);
            positive |= v[k] > 0 ? 1u << k : 0u;
        }
        y = pack(v);
        return positive;
    }
};

// `group`: the group of the thread's channels in `scale` and `bias`; `shortcut_group`: in the shortcut's scale and bias.
template <int ADD>
__device__ __forceinline__ Apply<ADD> apply_of(const float* scale, const float* bias, u32 group, const float* shortcut_scale,
                                               const float* shortcut_bias, u32 shortcut_group, u32 relu) {
    Apply<ADD> f;
    load_channels(scale, group, f.scale);
    load_channels(bias, group, f.bias);
    if (ADD == 2) {
        load_channels(shortcut_scale, shortcut_group, f.shortcut_scale);
        load_channels(shortcut_bias, shortcut_group, f.shortcut_bias);
    }
    f.floor = relu ? 0.0f : __uint_as_float(0xff800000u);
    return f;
}

// y = [relu](x * scale + bias [+ shortcut]); mask: bit k of byte [row, group] is set if y of channel 8 * group + k is positive.
template <int ADD>
__device__ __forceinline__ void apply(const Apply<ADD>& f, const GridStride& w, const T* x, const T* shortcut, T* y, u8* mask,
                                      u32 rows) {
    constexpr int U = IN_FLIGHT;
    for (u32 r = w.first; r < rows; r += U * w.step) {
        Raw raw[U], added[U];
#pragma unroll
        for (int i = 0; i < U; i++)
            if (r + i * w.step < rows) {
                u64 at = (u64)(r + i * w.step) * w.groups + w.group;
                raw[i] = load(x, at);
                if (ADD) added[i] = load(shortcut, at);
            }
#pragma unroll
        for (int i = 0; i < U; i++)
            if (r + i * w.step < rows) {
                u64 at = (u64)(r + i * w.step) * w.groups + w.group;
                Raw out;
                u32 positive = f(raw[i], added[i], out);
                store(y, at, out);
                if (mask) mask[at] = (u8)positive;
            }
    }
}

#define APPLY(NAME, ADD) \
    extern "C" __global__ void __launch_bounds__(256, ADD == 2 ? 2 : 3) \
        NAME(const T* x, const float* scale, const float* bias, const T* shortcut, const float* shortcut_scale, \
             const float* shortcut_bias, T* y, u8* mask, u32 relu, u32 rows, u32 channels) { \
        pdl_wait(); \
        GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x); \
        if (!w.active) return; \
        Apply<ADD> f = apply_of<ADD>(scale, bias, w.group, shortcut_scale, shortcut_bias, w.group, relu); \
        apply(f, w, x, shortcut, y, mask, rows); \
    }
APPLY(norm_apply, 0)
APPLY(norm_apply_add, 1)
APPLY(norm_apply_add_norm, 2)

// norm_finish (without an exchange between ranks) and norm_apply in one kernel: every block computes its channels' scale and bias from the sums.
#define FINISH_APPLY(NAME, ADD) \
    extern "C" __global__ void __launch_bounds__(256, ADD == 2 ? 2 : 3) \
        NAME(const T* x, const float* sum, const float* square, const T* shortcut, const float* shortcut_scale, \
             const float* shortcut_bias, T* y, u8* mask, u32 relu, const Control* control, u32 pixels, u32 rows, \
             u32 channels, NORM_PARAMETERS) { \
        pdl_wait(); \
        SHARED(float, coefficients, 512); \
        u32 t = thread_in_block(), half = 8 * blockDim.x, c = blockIdx.y * half + t; \
        if (t < half && c < channels) \
            finish_forward(NORM, c, sum[c], square[c], rows_in_statistics(control, pixels, rows), blockIdx.x == 0, \
                           coefficients[t], coefficients[half + t]); \
        __syncthreads(); \
        GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x); \
        if (!w.active) return; \
        Apply<ADD> f = apply_of<ADD>(coefficients, coefficients + half, threadIdx.x, shortcut_scale, shortcut_bias, w.group, \
                                     relu); \
        apply(f, w, x, shortcut, y, mask, rows); \
    }
FINISH_APPLY(norm_finish_apply, 0)
FINISH_APPLY(norm_finish_apply_add, 1)
FINISH_APPLY(norm_finish_apply_add_norm, 2)

// Statistics and application in one launch, for small activations. A cluster owns 8 * bx channels; its blocks
// (blockIdx.x) divide the rows, and each thread keeps its first rows in registers. No block waits for another
// cluster of this GPU. If ranks exchange sums, a cluster waits for the same cluster of the other ranks, so all clusters must be
// resident at once: the launcher limits the grid to fewer blocks than multiprocessors and leaves multiprocessors for a
// concurrent collective.
template <int ADD>
__device__ __forceinline__ void forward_small(const T* x, const T* shortcut, const float* shortcut_scale,
                                              const float* shortcut_bias, T* y, u8* mask, u32 relu,
                                              const Control* control, u32 pixels, u32 rows, u32 channels, const Norm& n,
                                              const Reduction& reduction, float* scratch, float* cluster_scratch, double* block_totals,
                                              float* coefficients) {
    cluster_arrive();
    u32 part = cluster_rank(), parts = cluster_size();
    GridStride w = rows_of_thread(channels, part, parts);
    ChannelSum owned = channel_sum_of_thread(channels);
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    u32 valid = valid_rows(control, pixels, rows);
    constexpr int U = IN_FLIGHT;
    Raw raw[U], added[U];
    float s[16] = {};
#pragma unroll
    for (int i = 0; i < U; i++) {
        u32 r = w.first + i * w.step;
        raw[i] = zeros();
        if (w.active && r < rows) {
            raw[i] = load(x, (u64)r * w.groups + w.group);
            if (ADD) added[i] = load(shortcut, (u64)r * w.groups + w.group);
        }
    }
#pragma unroll
    for (int i = 0; i < U; i++)
        if (w.first + i * w.step < valid) add_statistics(raw[i], s);
    if (w.active)
        for (u32 r = w.first + U * w.step; r < valid; r += U * w.step) {
            Raw next[U];
#pragma unroll
            for (int i = 0; i < U; i++) {
                next[i] = zeros();
                if (r + i * w.step < valid) next[i] = load(x, (u64)(r + i * w.step) * w.groups + w.group);
            }
#pragma unroll
            for (int i = 0; i < U; i++) add_statistics(next[i], s);
        }
    double total = cluster_sums(block_sums(s, scratch), owned, cluster_scratch);
    bool leader = part == 0;
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, leader)) return;
    finish_forward_in_block(n, total, owned, rows_in_statistics(control, pixels, rows), leader, block_totals, coefficients);
    __syncthreads();
    if (!w.active) return;
    Apply<ADD> f = apply_of<ADD>(coefficients, coefficients + 8 * blockDim.x, threadIdx.x, shortcut_scale, shortcut_bias,
                                 w.group, relu);
    for (u32 first = w.first; first < rows; first += U * w.step) {
        if (first != w.first)
#pragma unroll
            for (int i = 0; i < U; i++) {
                u32 r = first + i * w.step;
                if (r < rows) {
                    raw[i] = load(x, (u64)r * w.groups + w.group);
                    if (ADD) added[i] = load(shortcut, (u64)r * w.groups + w.group);
                }
            }
#pragma unroll
        for (int i = 0; i < U; i++) {
            u32 r = first + i * w.step;
            if (r < rows) {
                u64 at = (u64)r * w.groups + w.group;
                Raw out;
                u32 positive = f(raw[i], added[i], out);
                store(y, at, out);
                if (mask) mask[at] = (u8)positive;
            }
        }
    }
}

#define FORWARD_SMALL(NAME, ADD) \
    extern "C" __global__ void __launch_bounds__(512, 1) \
        NAME(const T* x, const T* shortcut, const float* shortcut_scale, const float* shortcut_bias, T* y, u8* mask, \
             u32 relu, const Control* control, u32 pixels, u32 rows, u32 channels, NORM_PARAMETERS, \
             REDUCTION_PARAMETERS) { \
        pdl_wait(); \
        SHARED(float, scratch, 16 * 16 * SMALL_GROUPS); \
        SHARED(float, cluster_scratch, 9 * 16 * SMALL_GROUPS); \
        SHARED(double, block_totals, 16 * SMALL_GROUPS); \
        SHARED(float, coefficients, 16 * SMALL_GROUPS); \
        forward_small<ADD>(x, shortcut, shortcut_scale, shortcut_bias, y, mask, relu, control, pixels, rows, \
                           channels, NORM, REDUCTION, scratch, cluster_scratch, block_totals, coefficients); \
    }
FORWARD_SMALL(norm_forward_small, 0)
FORWARD_SMALL(norm_forward_small_add, 1)
FORWARD_SMALL(norm_forward_small_add_norm, 2)
