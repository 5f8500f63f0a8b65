// Optimizer updates over flat buffers. The first part of a buffer contains the weights of convolutions and linear layers,
// whose gradients are in the activations' format (or float32); the second part contains all other parameters, whose
// gradients are float32. All gradients are multiplied by the loss scale.

// Loss scale, and the state of the latest step's gradients and update.
struct Scaler {
    float scale;    // of the next step's loss
    u32 good_steps; // consecutive finite steps since the scale changed
    u32 finite;     // whether the latest step's gradients are finite
    float norm;     // L2 norm of the latest step's gradients, without the loss scale
    float inverse;  // 1 / the loss scale of the latest step's gradients
    u32 apply;      // whether the latest step's update is applied
    u32 updates;    // number of applied updates, including the latest step's
    u32 refused;    // whether `held` was set when the latest step's update began
    u32 updating;   // set before an update reads `held`, cleared when its step is recorded
    u32 pad;
    const u32* held; // in host memory; the host sets it to stop all further updates
};
static_assert(sizeof(Scaler) == 48, "must match the host's layout");
#define GROWTH_STEPS 2000
#define LARGEST_SCALE 16777216.0f // 2^24

struct Gradients {
    const void* first; // T, or float32 if `in_float32`
    const float* second;
    u64 first_length, length; // values; multiples of 8
    u32 in_float32;

    __device__ __forceinline__ void get(u64 group, float (&g)[8]) const {
        u64 split = first_length / 8;
        if (group >= split)
            load_channels(second, group - split, g);
        else if (in_float32)
            load_channels((const float*)first, group, g);
        else
            unpack(load((const T*)first, group), g);
    }
};
#define GRADIENT_PARAMETERS const void *first, const float *second, u64 first_length, u64 length, u32 in_float32
#define GRADIENTS \
    Gradients { first, second, first_length, length, in_float32 }

// Sum of one double per thread over the block, in a fixed order; valid in thread 0.
__device__ __forceinline__ double block_sum(double v, double* warps) {
    for (u32 o = 16; o > 0; o /= 2) v += shfl_xor(v, o);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0)
        for (u32 i = 0; i < blockDim.x / 32; i++) sum += warps[i];
    __syncthreads();
    return sum;
}

// Sum of squares of all gradients. Returns true only in thread 0 of the last block to finish (by `counter`), with the sum in
// `square_sum`. `before` runs in thread 0 of each block before the block is counted as finished.
template <class Before>
__device__ __forceinline__ bool square_sum_of(const Gradients& gradients, double* partials, u32* counter, Before before,
                                              double& square_sum) {
    SHARED(double, warps, 16);
    u64 groups = gradients.length / 8, step = (u64)gridDim.x * blockDim.x;
    float s[4] = {};
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += 4 * step) {
        float g[4][8];
#pragma unroll
        for (int u = 0; u < 4; u++) {
#pragma unroll
            for (int k = 0; k < 8; k++) g[u][k] = 0;
            if (i + u * step < groups) gradients.get(i + u * step, g[u]);
        }
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
            for (int k = 0; k < 8; k++) s[u] = fmaf(g[u][k], g[u][k], s[u]);
    }
    double sum = block_sum((double)s[0] + s[1] + s[2] + s[3], warps);
    if (threadIdx.x == 0) {
        before();
        partials[blockIdx.x] = sum;
    }
    if (!is_last_block(counter, gridDim.x)) return false;
    square_sum = 0;
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) square_sum += ldcg(partials + b);
    square_sum = block_sum(square_sum, warps);
    return threadIdx.x == 0;
}

// Stores in `scaler` the L2 norm of all gradients, whether they are finite, and the next loss scale. Steps with non-finite gradients are
// not applied. If `dynamic`, such a step halves the scale, and GROWTH_STEPS finite steps double it. One thread reads `held` for all kernels
// of the update; a refused update leaves scale, norm and counts unchanged.
// `others`: `count` further sums of squares, of gradients that are not in `gradients`.
__device__ __forceinline__ void norm_of(const Gradients& gradients, const double* others, u32 count, Scaler* scaler, u32 dynamic,
                                        double* partials, u32* counter) {
    bool first_thread = blockIdx.x == 0 && threadIdx.x == 0;
    u32 held = first_thread && scaler->held ? ld_relaxed_sys(scaler->held) : 0;
    auto record_held = [&] {
        if (first_thread) scaler->refused = held;
    };
    double square_sum;
    if (!square_sum_of(gradients, partials, counter, record_held, square_sum)) return;
    for (u32 i = 0; i < count; i++) square_sum += others[i];
    if (ldcg(&scaler->refused)) {
        scaler->apply = 0;
        scaler->updating = 0;
        return;
    }
    float scale = scaler->scale, inverse = 1.0f / scale;
    bool finite = square_sum - square_sum == 0;
    scaler->inverse = inverse;
    scaler->norm = (float)(sqrt(square_sum) * inverse);
    scaler->finite = finite;
    scaler->apply = finite;
    if (finite) scaler->updates++;
    if (!dynamic) return;
    u32 good = finite ? scaler->good_steps + 1 : 0;
    if (!finite) scale = scale * 0.5f < 1.0f ? 1.0f : scale * 0.5f;
    if (good >= GROWTH_STEPS) {
        scale = scale * 2 > LARGEST_SCALE ? LARGEST_SCALE : scale * 2;
        good = 0;
    }
    scaler->scale = scale;
    scaler->good_steps = good;
}

extern "C" __global__ void __launch_bounds__(512)
    gradient_norm(GRADIENT_PARAMETERS, Scaler* scaler, u32 dynamic, double* partials, u32* counter) {
    pdl_wait();
    norm_of(GRADIENTS, nullptr, 0, scaler, dynamic, partials, counter);
}

// gradient_norm where ranks have parts of some parameters: `others` has the sum of squares of each rank's parts.
extern "C" __global__ void __launch_bounds__(512)
    gradient_norm_of_parts(GRADIENT_PARAMETERS, const double* others, u32 count, Scaler* scaler, u32 dynamic, double* partials,
                           u32* counter) {
    pdl_wait();
    norm_of(GRADIENTS, others, count, scaler, dynamic, partials, counter);
}

// *to = the sum of squares of all gradients.
extern "C" __global__ void __launch_bounds__(512)
    gradient_squares(GRADIENT_PARAMETERS, double* to, double* partials, u32* counter) {
    pdl_wait();
    double square_sum;
    if (square_sum_of(GRADIENTS, partials, counter, [] {}, square_sum)) *to = square_sum;
}

// (1 - rest) average + rest value, computed as in the CPU engine's `sums::average`. `rest`: 1 - decay.
__device__ __forceinline__ float averaged(float average, float value, float rest) {
    return rest < 0.5f ? average + rest * (value - average) : value - (value - average) * (1 - rest);
}

// Float32 weights and, unless null, a copy in T of the first `copied` weights.
struct FlatWeights {
    float* weights;
    T* copy;
    u64 copied;

    __device__ __forceinline__ void get(u64 group, float (&w)[8]) const { load_channels(weights, group, w); }
    __device__ __forceinline__ void set(u64 group, const float (&w)[8]) const {
        store_channels(weights, group, w);
        if (copy && group * 8 < copied) store(copy, group, pack(w));
    }
};

#if DTYPE == BFLOAT16
// Float32 weights in two planes of 16 bits: `nearest`, rounded to the nearest bfloat16 (ties away from zero), and `differences`,
// the signed integer difference between the float32 bits and `nearest`. Kernels compute with `nearest`, so no copy in T is needed.
struct PlanarWeights {
    T* differences;
    T* nearest;

    __device__ __forceinline__ void get(u64 group, float (&w)[8]) const {
        Raw high = load(nearest, group), low = load(differences, group);
        const u32 *h = &high.a.x, *l = &low.a.x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            w[2 * k] = __uint_as_float((h[k] << 16) + (u32)(int)(short)(l[k] & 0xffffu));
            w[2 * k + 1] = __uint_as_float((h[k] & 0xffff0000u) + (u32)(int)(short)(l[k] >> 16));
        }
    }
    __device__ __forceinline__ void set(u64 group, const float (&w)[8]) const {
        Raw high, low;
        u32 *h = &high.a.x, *l = &low.a.x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 a = __float_as_uint(w[2 * k]), b = __float_as_uint(w[2 * k + 1]);
            // A NaN stays a NaN.
            h[k] = (a + (w[2 * k] == w[2 * k] ? 0x8000u : 0)) >> 16 | ((b + (w[2 * k + 1] == w[2 * k + 1] ? 0x8000u : 0)) & 0xffff0000u);
            l[k] = (a & 0xffffu) | b << 16;
        }
        store(nearest, group, high);
        store(differences, group, low);
    }
};
#endif

// A parameter's range in the flat buffers. Segments are sorted by offset; lengths are multiples of 8.
struct Segment {
    u64 offset, length;
    u32 adapted, pad; // adapted: whether the rate is computed from norms
};
struct Rate {
    float rate, decay; // factor of the step's learning rate; weight decay
};

// The last of `count` segments that begins at or before group `i` of eight values.
__device__ __forceinline__ u32 segment_of(const Segment* segments, u32 count, u64 i) {
    u32 from = 0, to = count;
    while (to - from > 1) {
        u32 middle = (from + to) / 2;
        if (segments[middle].offset <= i * 8)
            from = middle;
        else
            to = middle;
    }
    return from;
}

// The sums of two kinds of squares over a segment: of the weights, and of the gradients or of the prepared update.
struct Squares {
    double weights, others;
};

// Stores the block's sums of `s` in `partials`, as block blockIdx.x of the NORM_PARTS blocks of segment blockIdx.y.
__device__ __forceinline__ void store_squares(Squares s, double* warps, double* partials) {
    s.weights = block_sum(s.weights, warps);
    s.others = block_sum(s.others, warps);
    if (threadIdx.x == 0) {
        double* to = partials + ((u64)blockIdx.y * NORM_PARTS + blockIdx.x) * 2;
        to[0] = s.weights;
        to[1] = s.others;
    }
}

// Sums the partial sums of a segment, which store_squares() has stored.
__device__ __forceinline__ Squares squares_of(const double* partials, u32 segment) {
    Squares s = {0, 0};
    for (u32 p = 0; p < NORM_PARTS; p++) {
        s.weights += partials[((u64)segment * NORM_PARTS + p) * 2];
        s.others += partials[((u64)segment * NORM_PARTS + p) * 2 + 1];
    }
    return s;
}

// Partial sums of squares of the weights and the gradients of segment blockIdx.y, one of each per block (NORM_PARTS).
extern "C" __global__ void __launch_bounds__(256)
    lars_norms(const float* weights, GRADIENT_PARAMETERS, const Segment* segments, double* partials) {
    pdl_wait();
    SHARED(double, warps, 8);
    Gradients gradients = GRADIENTS;
    Segment s = segments[blockIdx.y];
    Squares squares = {0, 0};
    if (s.adapted)
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < s.length / 8; i += (u64)NORM_PARTS * blockDim.x) {
            float w[8], g[8], ws = 0, gs = 0;
            load_channels(weights, s.offset / 8 + i, w);
            gradients.get(s.offset / 8 + i, g);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                ws = fmaf(w[k], w[k], ws);
                gs = fmaf(g[k], g[k], gs);
            }
            squares.weights += ws;
            squares.others += gs;
        }
    store_squares(squares, warps, partials);
}

// Each segment's rate: trust |w| / (|g| + decay |w|), or 1 without decay if not adapted. One thread per segment.
extern "C" __global__ void lars_rates(const double* partials, const Segment* segments, u32 count, const Scaler* scaler,
                                      float trust, float decay, Rate* rates) {
    pdl_wait();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Squares squares = squares_of(partials, i);
    double w = sqrt(squares.weights), g = sqrt(squares.others) * scaler->inverse, denominator = g + (double)decay * w;
    Rate r = {1.0f, 0.0f};
    if (segments[i].adapted) {
        r.decay = decay;
        // With a rate of 0, a parameter that is all zeros could never change.
        if (w > 0 && denominator > 0) r.rate = (float)(trust * w / denominator);
    }
    rates[i] = r;
}

// With momentum m and weight decay d, which may differ between the two parts:
// KIND 0: v = m v + (g + d w), w -= lr v. KIND 1, Nesterov: the same v, w -= lr (g + d w + m v).
// KIND 2, LARS: v = m v + lr rate (g + d w), w -= v, with the segment's rate and decay.
template <int KIND, class Weights>
__device__ __forceinline__ void update(const Weights& weights, float* velocity, const Gradients& gradients, const Control* control,
                                       const Scaler* scaler, float momentum, float first_decay, float second_decay,
                                       const Segment* segments, const Rate* rates, u32 count) {
    if (!scaler->apply) return;
    float lr = control->lr, inverse = scaler->inverse;
    FOR_ITEMS(i, gradients.length / 8) {
        float w[8], v[8], g[8], rate = lr, decay = i * 8 < gradients.first_length ? first_decay : second_decay;
        gradients.get(i, g);
        weights.get(i, w);
        load_channels(velocity, i, v);
        if (KIND == 2) {
            Rate of_segment = rates[segment_of(segments, count, i)];
            rate = lr * of_segment.rate;
            decay = of_segment.decay;
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float d = fmaf(decay, w[k], g[k] * inverse);
            if (KIND == 2) {
                v[k] = fmaf(momentum, v[k], rate * d);
                w[k] -= v[k];
            } else {
                v[k] = fmaf(momentum, v[k], d);
                w[k] -= rate * (KIND == 1 ? fmaf(momentum, v[k], d) : v[k]);
            }
        }
        weights.set(i, w);
        store_channels(velocity, i, v);
    }
}
#define UPDATE(NAME, KIND) \
    extern "C" __global__ void __launch_bounds__(256) \
        NAME(float* weights, float* velocity, T* low_precision, GRADIENT_PARAMETERS, const Control* control, \
             const Scaler* scaler, float momentum, float first_decay, float second_decay, const Segment* segments, \
             const Rate* rates, u32 count) { \
        pdl_wait(); \
        update<KIND>(FlatWeights{weights, low_precision, first_length}, velocity, GRADIENTS, control, scaler, momentum, \
                     first_decay, second_decay, segments, rates, count); \
    }
UPDATE(sgd_momentum, 0)
UPDATE(sgd_nesterov, 1)
UPDATE(sgd_lars, 2)

#if DTYPE == BFLOAT16
// The same for weights in planes.
#define UPDATE_PLANES(NAME, KIND) \
    extern "C" __global__ void __launch_bounds__(256) \
        NAME(T* differences, float* velocity, T* nearest, GRADIENT_PARAMETERS, const Control* control, const Scaler* scaler, \
             float momentum, float first_decay, float second_decay, const Segment* segments, const Rate* rates, \
             u32 count) { \
        pdl_wait(); \
        update<KIND>(PlanarWeights{differences, nearest}, velocity, GRADIENTS, control, scaler, momentum, first_decay, \
                     second_decay, segments, rates, count); \
    }
UPDATE_PLANES(sgd_momentum_planes, 0)
UPDATE_PLANES(sgd_nesterov_planes, 1)

// average_values for weights in planes. `length` is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256)
    average_planes(float* average, const T* differences, const T* nearest, u64 length, float rest, const u32* finished, u32 steps) {
    pdl_wait();
    if (*finished != steps) return;
    PlanarWeights weights = {(T*)differences, (T*)nearest};
    FOR_ITEMS(i, length / 8) {
        float a[8], v[8];
        load_channels(average, i, a);
        weights.get(i, v);
#pragma unroll
        for (int k = 0; k < 8; k++) a[k] = averaged(a[k], v[k], rest);
        store_channels(average, i, a);
    }
}

// find_not_finite for weights in planes: the nearest bfloat16 of a non-finite weight is not finite either.
extern "C" __global__ void __launch_bounds__(256) find_not_finite_nearest(const T* values, u64 length, u32* found) {
    pdl_wait();
    bool finite = true;
    FOR_ITEMS(i, length)
        finite &= to_float(values[i]) - to_float(values[i]) == 0;
    if (!finite) *found = 1;
}
#endif

// Adds a micro-batch's gradient to the step's float32 `sum`; stores it there if `overwrite`.
extern "C" __global__ void __launch_bounds__(256) accumulate_gradients(float* sum, const T* gradient, u64 length, u32 overwrite) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float s[8] = {}, g[8];
        unpack(load(gradient, i), g);
        if (!overwrite) load_channels(sum, i, s);
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] += g[k];
        store_channels(sum, i, s);
    }
}

// average = (1 - rest) average + rest values, as in the CPU engine's `sums::average`. Does nothing unless exactly `steps` steps have
// finished, so that a refused update is not averaged.
extern "C" __global__ void __launch_bounds__(256)
    average_values(float* average, const float* values, u64 length, float rest, const u32* finished, u32 steps) {
    pdl_wait();
    if (*finished != steps) return;
    FOR_ITEMS(i, length) {
        average[i] = averaged(average[i], values[i], rest);
    }
}

// *found = 1 if any of `length` values is not finite.
extern "C" __global__ void __launch_bounds__(256) find_not_finite(const float* values, u64 length, u32* found) {
    pdl_wait();
    bool finite = true;
    FOR_ITEMS(i, length) finite &= values[i] - values[i] == 0;
    if (!finite) *found = 1;
}

// Adds a checksum of `length` values to *sum: the sum of hashes of each value's bits and position (with SplitMix64's constants), so a
// change of any one value changes the sum.
extern "C" __global__ void __launch_bounds__(256) add_checksum(const u32* values, u64 length, u64* sum) {
    pdl_wait();
    u64 thread_sum = 0;
    FOR_ITEMS(i, length) {
        u64 mixed = (i << 32 | values[i]) * 0x9e3779b97f4a7c15ull;
        thread_sum += (mixed ^ mixed >> 32) * 0xbf58476d1ce4e5b9ull;
    }
    for (u32 lane = 16; lane > 0; lane /= 2) thread_sum += __shfl_xor_sync(0xffffffffu, thread_sum, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, thread_sum);
}

// Converts float32 values to the activations' format.
extern "C" __global__ void __launch_bounds__(256) to_low_precision(const float* from, T* to, u64 length) {
    pdl_wait();
    FOR_ITEMS(i, length / 8) {
        float v[8];
        load_channels(from, i, v);
        store(to, i, pack(v));
    }
}
