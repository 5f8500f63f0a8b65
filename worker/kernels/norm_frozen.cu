// Backward of a frozen batch norm, which normalises with its running statistics during training: mean and variance do not
// depend on x, so dx = scale g, and gamma and beta have no gradients.

// g is the gradient of the norm's output, after the mask. dz = g (unless dz is null) and dx = scale * g; both are 0 in padding rows.
// dx may alias x.
template <int MASK, int SOURCE>
__device__ __forceinline__ void backward_frozen(const T* x, const Incoming& in, const float* scale_, const float* bias_,
                                                T* dz, T* dx, u32 valid, u32 rows, u32 channels) {
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    if (!w.active) return;
    float scale[8], bias[8], pool_scale = SOURCE == POOLED ? 1.0f / in.pixels : 1.0f;
    load_channels(scale_, w.group, scale);
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
            Raw before = zeros(), out = zeros();
            if (at < valid) {
                float v[8], g[8];
                row[i].gradient(scale, bias, pool_scale, v, g);
                before = pack(g);
#pragma unroll
                for (int k = 0; k < 8; k++) g[k] *= scale[k];
                out = pack(g);
            }
            if (dz) store(dz, (u64)at * w.groups + w.group, before);
            store(dx, (u64)at * w.groups + w.group, out);
        }
    }
}

#define BACKWARD_FROZEN(NAME, MASK, SOURCE)                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        NAME(const T* x, const T* dy, const T* added, const u8* mask, const float* scale, const float* bias, \
             T* dz, T* dx, const Control* control, u32 pixels, u32 rows, u32 channels) {                     \
        pdl_wait();                                                                                          \
        backward_frozen<MASK, SOURCE>(x, Incoming{dy, added, mask, pixels}, scale, bias, dz, dx,             \
                                      valid_rows(control, pixels, rows), rows, channels);                    \
    }
BACKWARD_FROZEN(norm_backward_frozen_all, ALL, DIRECT)
BACKWARD_FROZEN(norm_backward_frozen_recompute, RECOMPUTE, DIRECT)
BACKWARD_FROZEN(norm_backward_frozen_recompute_added, RECOMPUTE, ADDED)
BACKWARD_FROZEN(norm_backward_frozen_bits, BITS, DIRECT)
BACKWARD_FROZEN(norm_backward_frozen_bits_added, BITS, ADDED)
BACKWARD_FROZEN(norm_backward_frozen_bits_pooled, BITS, POOLED)
