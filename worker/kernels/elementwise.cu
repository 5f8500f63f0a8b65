// Operations that are not fused: ReLU, GELU, addition, a linear layer's bias, max pooling with square windows of any size, and the
// gradient of global average pooling. Activations are [rows, channels] in T; `length` is a number of values, a multiple of 8.

// y = max(x, 0); NaN stays NaN.
extern "C" __global__ void __launch_bounds__(256) relu_forward(const T* x, T* y, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8];
        unpack(load(x, i), v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = max_nan(v[k], 0.0f);
        store(y, i, pack(v));
    }
}

// dx = dy where the ReLU's output y is above 0, else 0.
extern "C" __global__ void __launch_bounds__(256) relu_backward(const T* y, const T* dy, T* dx, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8], g[8];
        unpack(load(y, i), v);
        unpack(load(dy, i), g);
#pragma unroll
        for (int k = 0; k < 8; k++) g[k] = v[k] > 0 ? g[k] : 0.0f;
        store(dx, i, pack(g));
    }
}

// The cumulative distribution function of the standard normal distribution; the constant is 1 / sqrt(2).
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }

// y = gelu(x) = x P(x), where P is normal_cdf.
extern "C" __global__ void __launch_bounds__(256) gelu_forward(const T* x, T* y, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8];
        unpack(load(x, i), v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] *= normal_cdf(v[k]);
        store(y, i, pack(v));
    }
}

// dx = dy (P(x) + x p(x)), where p is the standard normal density; the constant is 1 / sqrt(2 pi).
extern "C" __global__ void __launch_bounds__(256) gelu_backward(const T* x, const T* dy, T* dx, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8], g[8];
        unpack(load(x, i), v);
        unpack(load(dy, i), g);
#pragma unroll
        for (int k = 0; k < 8; k++) g[k] *= normal_cdf(v[k]) + v[k] * 0.3989423f * expf(-0.5f * v[k] * v[k]);
        store(dx, i, pack(g));
    }
}

// Zeros the gradient of a parameter that is not trained.
extern "C" __global__ void __launch_bounds__(256) zero_gradient(T* gradient, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) store(gradient, i, zeros());
}

// The result of bias_gradient, computed fast for many rows of at most 512 channels: each block writes its sums to `partials`
// [blocks][channels], and the last block to finish (by `counter`) adds the sums of all blocks in order.
extern "C" __global__ void __launch_bounds__(256)
    row_sums(const T* dy, float* dbias, u32 rows, u32 channels, u32 accumulate, float* partials, u32* counter) {
    pdl_wait();
    SHARED(float, sums, 256 * 8);
    u32 groups = channels / 8, lanes = 256 / groups, group = threadIdx.x % groups, lane = threadIdx.x / groups;
    float s[8] = {};
    if (lane < lanes)
        for (u32 r = blockIdx.x * lanes + lane; r < rows; r += gridDim.x * lanes) {
            float g[8];
            unpack(load(dy, (u64)r * groups + group), g);
#pragma unroll
            for (int k = 0; k < 8; k++) s[k] += g[k];
        }
#pragma unroll
    for (int k = 0; k < 8; k++) sums[threadIdx.x * 8 + k] = s[k];
    __syncthreads();
    for (u32 c = threadIdx.x; c < channels; c += blockDim.x) {
        float sum = 0;
        for (u32 l = 0; l < lanes; l++) sum += sums[(l * groups + c / 8) * 8 + c % 8];
        partials[(u64)blockIdx.x * channels + c] = sum;
    }
    if (!is_last_block(counter, gridDim.x)) return;
    for (u32 c = threadIdx.x; c < channels; c += blockDim.x) {
        double sum = accumulate ? dbias[c] : 0;
        for (u32 b = 0; b < gridDim.x; b++) sum += __ldcg(partials + (u64)b * channels + c);
        dbias[c] = (float)sum;
    }
}

// y = factor x.
extern "C" __global__ void __launch_bounds__(256) scale_values(const T* x, T* y, u64 length, float factor) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8];
        unpack(load(x, i), v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] *= factor;
        store(y, i, pack(v));
    }
}

// sum = a + b. `sum` may be the memory of `a`.
extern "C" __global__ void __launch_bounds__(256) add(const T* a, const T* b, T* sum, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8], w[8];
        unpack(load(a, i), v);
        unpack(load(b, i), w);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += w[k];
        store(sum, i, pack(v));
    }
}

// y += bias, float32 [channels].
extern "C" __global__ void __launch_bounds__(256) add_bias(T* y, const float* bias, u32 rows, u32 channels) {
    pdl_wait();
    u64 groups = channels / 8, all = rows * groups;
    FOR_ITEMS(i, all) {
        float v[8], b[8];
        unpack(load(y, i), v);
        load_channels(bias, i % groups, b);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += b[k];
        store(y, i, pack(v));
    }
}

// dbias [channels], float32: the sums of dy over rows, in an order that depends only on the number of rows. A warp owns
// eight channels. Padding rows of dy are zero.
extern "C" __global__ void __launch_bounds__(128)
    bias_gradient(const T* dy, float* dbias, u32 rows, u32 channels, u32 accumulate) {
    pdl_wait();
    u32 groups = channels / 8, group = blockIdx.x * blockDim.y + threadIdx.y;
    if (group >= groups) return;
    float s[8] = {};
    for (u32 r = threadIdx.x; r < rows; r += 32) {
        float g[8];
        unpack(load(dy, (u64)r * groups + group), g);
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] += g[k];
    }
    for (u32 o = 16; o > 0; o /= 2)
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] += shfl_xor(s[k], o);
    if (threadIdx.x != 0) return;
    float before[8] = {};
    if (accumulate) load_channels(dbias, group, before);
#pragma unroll
    for (int k = 0; k < 8; k++) s[k] += before[k];
    store_channels(dbias, group, s);
}

// dx [pictures, pixels, channels] = dy [pictures, channels] / pixels, for each pixel.
extern "C" __global__ void __launch_bounds__(256)
    global_average_backward(const T* dy, T* dx, u32 pictures, u32 pixels, u32 channels) {
    pdl_wait();
    u64 groups = channels / 8, all = (u64)pictures * pixels * groups;
    float inv_pixels = 1.0f / pixels;
    FOR_ITEMS(i, all) {
        float g[8];
        unpack(load(dy, i / groups / pixels * groups + i % groups), g);
#pragma unroll
        for (int k = 0; k < 8; k++) g[k] *= inv_pixels;
        store(dx, i, pack(g));
    }
}

// A max pooling with square windows of at most 15 x 15 pixels. Rows may have another padding than columns.
struct PlainPool {
    u32 pictures, height, width, out_height, out_width, kernel, stride, padding, row_padding;
};
#define PLAIN_POOL_PARAMETERS \
    u32 pictures, u32 height, u32 width, u32 out_height, u32 out_width, u32 kernel, u32 stride, u32 padding, \
        u32 row_padding, u32 channels
#define PLAIN_POOL \
    PlainPool { pictures, height, width, out_height, out_width, kernel, stride, padding, row_padding }

// Computes y and, unless `argmax` is null, the position a * kernel + b of each maximum, at row a and column b of its window (of equal
// values, the first). A NaN counts as larger than any number.
extern "C" __global__ void __launch_bounds__(256)
    plain_max_pool(const T* x, T* y, u8* argmax, PLAIN_POOL_PARAMETERS) {
    pdl_wait();
    PlainPool p = PLAIN_POOL;
    u64 groups = channels / 8, all = (u64)p.pictures * p.out_height * p.out_width * groups;
    FOR_ITEMS(i, all) {
        u64 group = i % groups, pixel = i / groups;
        u32 column = pixel % p.out_width, row = pixel / p.out_width % p.out_height;
        u64 picture = pixel / p.out_width / p.out_height;
        float best[8];
        u8 where[8];
        bool is_first = true;
        for (u32 a = 0; a < p.kernel; a++) {
            u32 r = row * p.stride + a - p.row_padding; // below 0 wraps to above the height
            if (r >= p.height) continue;
            for (u32 b = 0; b < p.kernel; b++) {
                u32 c = column * p.stride + b - p.padding;
                if (c >= p.width) continue;
                float v[8];
                unpack(load(x, ((picture * p.height + r) * p.width + c) * groups + group), v);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (is_first || v[k] > best[k] || v[k] != v[k]) {
                        best[k] = v[k];
                        where[k] = (u8)(a * p.kernel + b);
                    }
                is_first = false;
            }
        }
        store(y, i, pack(best));
        if (argmax) {
#pragma unroll
            for (int k = 0; k < 8; k++) argmax[i * 8 + k] = where[k];
        }
    }
}

// dx: each input value gets the gradients of the windows in which it was the maximum.
extern "C" __global__ void __launch_bounds__(256)
    plain_max_pool_backward(const T* dy, const u8* argmax, T* dx, PLAIN_POOL_PARAMETERS) {
    pdl_wait();
    PlainPool p = PLAIN_POOL;
    u64 groups = channels / 8, all = (u64)p.pictures * p.height * p.width * groups;
    FOR_ITEMS(i, all) {
        u64 group = i % groups, pixel = i / groups;
        u32 column = pixel % p.width, row = pixel / p.width % p.height;
        u64 picture = pixel / p.width / p.height;
        float g[8] = {};
        for (u32 a = 0; a < p.kernel; a++) {
            // With padding, the window that has this pixel in its row a begins in row r, if there is such a window.
            if (row + p.row_padding < a) break;
            u32 r = row + p.row_padding - a;
            if (r % p.stride || r / p.stride >= p.out_height) continue;
            for (u32 b = 0; b < p.kernel; b++) {
                if (column + p.padding < b) break;
                u32 c = column + p.padding - b;
                if (c % p.stride || c / p.stride >= p.out_width) continue;
                u64 at = ((picture * p.out_height + r / p.stride) * p.out_width + c / p.stride) * groups + group;
                float d[8];
                unpack(load(dy, at), d);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (argmax[at * 8 + k] == a * p.kernel + b) g[k] += d[k];
            }
        }
        store(dx, i, pack(g));
    }
}
