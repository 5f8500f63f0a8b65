// 3 x 3 max pooling with stride 2 and padding 1, fused with the batch norm and ReLU before it (the stem: its largest
// activation is never stored), and global average pooling.
//
// A thread owns eight channels of one output column and walks down a strip of output rows, so that it reads an input
// row shared by two windows once. The argmax of a window is one byte, ky * 3 + kx; the first of equal values wins, as
// in PyTorch.

struct Pool {
    u32 pictures, height, width, out_height, out_width, strip; // strip: output rows per thread
};
#define POOL_PARAMETERS u32 pictures, u32 height, u32 width, u32 out_height, u32 out_width, u32 strip
#define POOL \
    Pool { pictures, height, width, out_height, out_width, strip }

// The strip with index `item`. Columns vary fastest, then a picture's strips, then pictures.
struct Strip {
    u32 picture, column, first, end;
    __device__ __forceinline__ Strip(const Pool& p, u32 item) {
        u32 strips = (p.out_height + p.strip - 1) / p.strip;
        column = item % p.out_width;
        item /= p.out_width;
        first = item % strips * p.strip;
        picture = item / strips;
        end = min(first + p.strip, p.out_height);
    }
};
__device__ __forceinline__ u32 strips_of(const Pool& p) {
    return p.pictures * p.out_width * ((p.out_height + p.strip - 1) / p.strip);
}

// Maxima over the three pixels of one window row; AFFINE: after batch norm and ReLU.
template <bool AFFINE, bool ARGMAX> struct RowMax {
    float best[8];
    u32 argmax[8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            best[k] = __uint_as_float(0xff800000u);
            argmax[k] = 0;
        }
    }
    // A value wins if it is larger or a NaN, so that divergence is not hidden.
    __device__ __forceinline__ void offer(int k, float v, u32 which) {
        if (ARGMAX) {
            bool wins = v > best[k] || v != v;
            best[k] = wins ? v : best[k];
            argmax[k] = wins ? which : argmax[k];
        } else {
            best[k] = max_nan(best[k], v);
        }
    }
    // Offers the pixels of a window row that begins at position `base` of the window. `left`, `right`: whether the outer pixels exist.
    __device__ __forceinline__ void offer(const Raw (&raw)[3], bool left, bool right, const float (&scale)[8],
                                          const float (&bias)[8], u32 base) {
#pragma unroll
        for (int x = 0; x < 3; x++) {
            if (x == 0 && !left || x == 2 && !right) continue;
            float v[8];
            unpack(raw[x], v);
#pragma unroll
            for (int k = 0; k < 8; k++) offer(k, AFFINE ? max_nan(fmaf(v[k], scale[k], bias[k]), 0.0f) : v[k], base + x);
        }
    }
};

template <bool AFFINE, bool ARGMAX>
__device__ __forceinline__ void max_pool(const T* x, const float* scale_, const float* bias_, T* y, u8* argmax,
                                         const Pool& p, u32 channels) {
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    if (!w.active) return;
    float scale[8], bias[8];
    if (AFFINE) {
        load_channels(scale_, w.group, scale);
        load_channels(bias_, w.group, bias);
    }
    u32 items = strips_of(p);
    for (u32 item = w.first; item < items; item += w.step) {
        Strip s(p, item);
        u32 b = s.column;
        bool left = b > 0, right = 2 * b + 1 < p.width;
        auto fetch = [&](u32 row, Raw(&raw)[3]) {
            u64 at = ((u64)(s.picture * p.height + row) * p.width + 2 * b) * w.groups + w.group;
            if (left) raw[0] = load(x, at - w.groups);
            raw[1] = load(x, at);
            if (right) raw[2] = load(x, at + w.groups);
        };
        RowMax<AFFINE, ARGMAX> above; // the next window's first row
        above.clear();
        if (s.first > 0) {
            Raw raw[3];
            fetch(2 * s.first - 1, raw);
            above.offer(raw, left, right, scale, bias, 0);
        }
        for (u32 a = s.first; a < s.end; a++) {
            Raw middle[3], below[3];
            bool last = 2 * a + 1 >= p.height;
            fetch(2 * a, middle);
            if (!last) fetch(2 * a + 1, below);
            RowMax<AFFINE, ARGMAX> window = above;
            window.offer(middle, left, right, scale, bias, 3);
            above.clear();
            if (!last) {
                above.offer(below, left, right, scale, bias, 0);
#pragma unroll
                for (int k = 0; k < 8; k++) window.offer(k, above.best[k], above.argmax[k] + 6);
            }
            u64 at = ((u64)(s.picture * p.out_height + a) * p.out_width + b) * w.groups + w.group;
            store(y, at, pack(window.best));
            if (ARGMAX) {
                u32 low = window.argmax[0] | window.argmax[1] << 8 | window.argmax[2] << 16 | window.argmax[3] << 24;
                u32 high = window.argmax[4] | window.argmax[5] << 8 | window.argmax[6] << 16 | window.argmax[7] << 24;
                ((uint2*)argmax)[at] = {low, high};
            }
        }
    }
}

#define MAX_POOL(NAME, AFFINE, ARGMAX) \
    extern "C" __global__ void __launch_bounds__(256, 2) \
        NAME(const T* x, const float* scale, const float* bias, T* y, u8* argmax, POOL_PARAMETERS, u32 channels) { \
        pdl_wait(); \
        max_pool<AFFINE, ARGMAX>(x, scale, bias, y, argmax, POOL, channels); \
    }
MAX_POOL(norm_max_pool, true, false)
MAX_POOL(norm_max_pool_argmax, true, true)

// The gradient and the argmax of one window, for eight channels.
struct Window {
    Raw dy;
    uint2 argmax;
};
// Adds the gradients of the channels whose argmax is `position` to g.
__device__ __forceinline__ void add_where(const Window& w, u32 position, float (&g)[8]) {
    float d[8];
    unpack(w.dy, d);
    u32 low = w.argmax.x ^ position * 0x01010101u, high = w.argmax.y ^ position * 0x01010101u;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (!(low & 0xffu << 8 * k)) g[k] += d[k];
        if (!(high & 0xffu << 8 * k)) g[4 + k] += d[4 + k];
    }
}

// Calls visit(pixel, x, g) exactly once for each input pixel, with its input values x and its gradient g: for up to four input pixels per
// output pixel. `pixel` counts over all pictures. `load_inputs` loads the x of the four pixels.
template <typename LoadInputs, typename Visit>
__device__ __forceinline__ void unpool(const T* dy, const u8* argmax, const Pool& p, const GridStride& w, u32 pictures,
                                       LoadInputs load_inputs, Visit visit) {
    u32 strips = (p.out_height + p.strip - 1) / p.strip, items = pictures * p.out_width * strips;
    for (u32 item = w.first; item < items; item += w.step) {
        Strip s(p, item);
        u32 b = s.column;
        auto fetch = [&](u32 a, Window(&row)[2]) {
            u64 at = ((u64)(s.picture * p.out_height + a) * p.out_width + b) * w.groups + w.group;
            row[0] = row[1] = {zeros(), {0xffffffffu, 0xffffffffu}};
            if (a < p.out_height) {
                row[0] = {load(dy, at), ((const uint2*)argmax)[at]};
                if (b + 1 < p.out_width) row[1] = {load(dy, at + w.groups), ((const uint2*)argmax)[at + w.groups]};
            }
        };
        Window above[2], below[2];
        fetch(s.first, above);
        for (u32 a = s.first; a < s.end; a++) {
            u32 y = 2 * a, x = 2 * b;
            bool down = y + 1 < p.height, right = x + 1 < p.width;
            u64 at = (u64)(s.picture * p.height + y) * p.width + x;
            auto inputs = load_inputs(at, at + 1, at + p.width, at + p.width + 1, right, down, right && down);
            fetch(a + 1, below);
            float g[8] = {};
            add_where(above[0], 4, g);
            visit(at, inputs.x[0], g);
            if (right) {
                float g[8] = {};
                add_where(above[0], 5, g);
                add_where(above[1], 3, g);
                visit(at + 1, inputs.x[1], g);
            }
            if (down) {
                float g[8] = {};
                add_where(above[0], 7, g);
                add_where(below[0], 1, g);
                visit(at + p.width, inputs.x[2], g);
            }
            if (right && down) {
                float g[8] = {};
                add_where(above[0], 8, g);
                add_where(above[1], 6, g);
                add_where(below[0], 2, g);
                add_where(below[1], 0, g);
                visit(at + p.width + 1, inputs.x[3], g);
            }
            above[0] = below[0];
            above[1] = below[1];
        }
    }
}
struct Inputs {
    Raw x[4];
};
struct FetchInputs {
    const T* x;
    u32 groups, group;
    __device__ __forceinline__ Inputs operator()(u64 a, u64 b, u64 c, u64 d, bool right, bool down, bool both) const {
        Inputs f;
        f.x[0] = load(x, a * groups + group);
        if (right) f.x[1] = load(x, b * groups + group);
        if (down) f.x[2] = load(x, c * groups + group);
        if (both) f.x[3] = load(x, d * groups + group);
        return f;
    }
};
// Padding pictures get zeros.
__device__ __forceinline__ void clear_padding(T* dx, const Pool& p, const GridStride& w, u32 pictures) {
    u32 pixels = p.height * p.width, rows = p.pictures * pixels;
    for (u32 r = pictures * pixels + w.first; r < rows; r += w.step) store(dx, (u64)r * w.groups + w.group, zeros());
}
__device__ __forceinline__ u32 valid_pictures(const Control* control, const Pool& p) {
    return control ? min(control->valid, p.pictures) : p.pictures;
}

// norm_backward_sums for a batch norm before ReLU and max pooling. dy and argmax have the shape of the pooling's output.
extern "C" __global__ void __launch_bounds__(512, 1)
    norm_backward_sums_max_pool(const T* x, const T* dy, const u8* argmax, const Control* control, POOL_PARAMETERS,
                                u32 channels, float* partials, u32* counters, BACKWARD_PARAMETERS, REDUCTION_PARAMETERS) {
    pdl_wait();
    SHARED(float, scratch, 16 * 512);
    SHARED(double, block_totals, 512);
    Pool p = POOL;
    Backward b = BACKWARD;
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    ChannelSum owned = channel_sum_of_thread(channels);
    Reduction reduction = REDUCTION;
    u32 exchange = next_exchange(reduction, owned.active, owned.index);
    float s[16] = {};
    if (w.active) {
        float mean_[8], scale_[8], bias_[8];
        load_channels(b.mean, w.group, mean_);
        load_channels(b.scale, w.group, scale_);
        load_channels(b.bias, w.group, bias_);
        unpool(dy, argmax, p, w, valid_pictures(control, p), FetchInputs{x, w.groups, w.group},
               [&](u64, const Raw& raw, float(&g)[8]) {
                   float v[8];
                   unpack(raw, v);
#pragma unroll
                   for (int k = 0; k < 8; k++) g[k] = fmaf(v[k], scale_[k], bias_[k]) > 0 ? g[k] : 0.0f;
                   add_gradient(v, g, mean_, s);
               });
    }
    double total;
    if (!column_sums(block_sums(s, scratch), owned, scratch, partials, counters, total)) return;
    parameter_gradients(b, total, owned);
    if (!reduce_over_ranks(total, reduction, channels, owned.active, owned.index, exchange, true)) return;
    u32 pixels = height * width;
    finish_backward_in_block(b, total, owned, rows_in_statistics(control, pixels, pictures * pixels), true, block_totals, nullptr);
}

// norm_backward_apply for a batch norm before ReLU and max pooling.
extern "C" __global__ void __launch_bounds__(256, 2)
    norm_backward_apply_max_pool(const T* x, const T* dy, const u8* argmax, const float* scale, const float* bias,
                                 const float* slope, const float* offset, T* dx, const Control* control,
                                 POOL_PARAMETERS, u32 channels) {
    pdl_wait();
    Pool p = POOL;
    GridStride w = rows_of_thread(channels, blockIdx.x, gridDim.x);
    if (!w.active) return;
    InputGradient f;
    float bias_[8];
    load_channels(scale, w.group, f.scale);
    load_channels(slope, w.group, f.slope);
    load_channels(offset, w.group, f.offset);
    load_channels(bias, w.group, bias_);
    u32 valid = valid_pictures(control, p);
    unpool(dy, argmax, p, w, valid, FetchInputs{x, w.groups, w.group},
           [&](u64 pixel, const Raw& raw, float(&g)[8]) {
               float v[8];
               unpack(raw, v);
#pragma unroll
               for (int k = 0; k < 8; k++) g[k] = fmaf(v[k], f.scale[k], bias_[k]) > 0 ? g[k] : 0.0f;
               store(dx, pixel * w.groups + w.group, f(v, g));
           });
    clear_padding(dx, p, w, valid);
}

// Mean over the pixels of each picture. A warp owns `group_lanes` groups of channels of one picture, and its lanes
// divide the pixels; blockIdx.x and threadIdx.y number the warps.
extern "C" __global__ void __launch_bounds__(256)
    global_average(const T* x, T* y, u32 pictures, u32 pixels, u32 channels, u32 group_lanes) {
    pdl_wait();
    u32 groups = channels / 8, chunks = (groups + group_lanes - 1) / group_lanes;
    u32 warp = blockIdx.x * blockDim.y + threadIdx.y, picture = warp / chunks;
    if (picture >= pictures) return;
    u32 group = warp % chunks * group_lanes + threadIdx.x % group_lanes, lanes = 32 / group_lanes;
    bool active = group < groups;
    float s[8] = {};
    for (u32 p = threadIdx.x / group_lanes; p < pixels; p += 8 * lanes) {
        Raw raw[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            raw[i] = zeros();
            if (active && p + i * lanes < pixels) raw[i] = load(x, ((u64)picture * pixels + p + i * lanes) * groups + group);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float v[8];
            unpack(raw[i], v);
#pragma unroll
            for (int k = 0; k < 8; k++) s[k] += v[k];
        }
    }
    for (u32 o = group_lanes; o < 32; o *= 2)
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] += shfl_xor(s[k], o);
    if (threadIdx.x < group_lanes && active) {
        float inv_pixels = 1.0f / pixels;
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] *= inv_pixels;
        store(y, (u64)picture * groups + group, pack(s));
    }
}
