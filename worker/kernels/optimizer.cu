// The update over flat buffers: a first part with the weights of convolutions and linear layers, whose gradients
// are in the activations' format (or float32), and a second part with everything else, whose gradients are
// float32. All gradients carry the loss scale.

// Loss scale and what the latest step's gradients were like.
struct Scaler {
    float scale;    // of the next step's loss
    u32 good_steps; // finite ones since it last changed
    u32 finite;     // the latest step's gradients
    float norm;     // their L2 norm, without the scale
    float inverse;  // 1 / the scale that they carry
    u32 apply;      // whether the update runs
    u32 updates;    // that have run, the latest step's included
    u32 refused;    // whether the latest step's update found the weights held
    u32 updating;   // from before an update looks whether they are held until its step is recorded
    u32 pad;
    const u32* held; // in the host's memory, which sets it: no update may begin any more
};
static_assert(sizeof(Scaler) == 48, "as the host has it");
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

// Sum over the block of one double a thread, in a fixed order; valid in thread 0.
__device__ __forceinline__ double block_sum(double v, double* warps) {
    for (u32 o = 16; o > 0; o /= 2) v += from_lane_xor(v, o);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0)
        for (u32 i = 0; i < blockDim.x / 32; i++) sum += warps[i];
    __syncthreads();
    return sum;
}

// Sum of squares of a thread's share of gradients.
__device__ __forceinline__ double squares_of(const Gradients& gradients) {
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
    return (double)s[0] + s[1] + s[2] + s[3];
}

// What follows from the sum of squares of all gradients. One thread calls it.
__device__ __forceinline__ void take_squares(double all, Scaler* scaler, u32 dynamic) {
    if (load_shared_by_blocks(&scaler->refused)) {
        scaler->apply = 0;
        scaler->updating = 0;
        return;
    }
    float scale = scaler->scale, inverse = 1.0f / scale;
    bool finite = all - all == 0;
    scaler->inverse = inverse;
    scaler->norm = (float)(sqrt(all) * inverse);
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

// L2 norm of all gradients, whether they are finite, and the loss scale that follows. The update of a step whose
// gradients are not is skipped. `dynamic`: the scale is halved then, and doubled after GROWTH_STEPS finite steps.
// One thread looks whether the weights are held, for all kernels of the update: then the step changes nothing of this.
extern "C" __global__ void __launch_bounds__(512)
    gradient_norm(GRADIENT_PARAMETERS, Scaler* scaler, u32 dynamic, double* partials, u32* counter) {
    enter();
    SHARED(double, warps, 16);
    SHARED(u32, last, 1);
    Gradients gradients = GRADIENTS;
    bool asks = blockIdx.x == 0 && threadIdx.x == 0;
    u32 held = asks && scaler->held ? load_system(scaler->held) : 0;
    double sum = block_sum(squares_of(gradients), warps);
    if (threadIdx.x == 0) {
        if (asks) scaler->refused = held;
        partials[blockIdx.x] = sum;
        __threadfence();
        last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (last[0]) *counter = 0;
    }
    __syncthreads();
    if (!last[0]) return;
    __threadfence();
    double all = 0;
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) all += load_shared_by_blocks(partials + b);
    all = block_sum(all, warps);
    if (threadIdx.x == 0) take_squares(all, scaler, dynamic);
}

// Sums of squares of a part of the gradients, a number a block: of ranks that have the others' sums in `norm_of_squares`.
extern "C" __global__ void __launch_bounds__(512) gradient_squares(GRADIENT_PARAMETERS, double* squares) {
    enter();
    SHARED(double, warps, 16);
    Gradients gradients = GRADIENTS;
    double sum = block_sum(squares_of(gradients), warps);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// gradient_norm by one block, from `count` sums of squares over all ranks.
extern "C" __global__ void __launch_bounds__(512)
    norm_of_squares(const double* squares, u32 count, Scaler* scaler, u32 dynamic) {
    enter();
    SHARED(double, warps, 16);
    double all = 0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) all += squares[i];
    all = block_sum(all, warps);
    if (threadIdx.x != 0) return;
    scaler->refused = scaler->held ? load_system(scaler->held) : 0;
    take_squares(all, scaler, dynamic);
}

// A parameter's place in the flat buffers, ordered; lengths are multiples of 8.
struct Segment {
    u64 offset, length;
    u32 adapted, pad; // whether its rate follows from its norms
};
struct Rate {
    float rate, decay; // times the step's learning rate; weight decay
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

// Sums of squares of a segment's (blockIdx.y) weights and gradients, by NORM_PARTS blocks each.
extern "C" __global__ void __launch_bounds__(256)
    lars_norms(const float* weights, GRADIENT_PARAMETERS, const Segment* segments, double* partials) {
    enter();
    SHARED(double, warps, 8);
    Gradients gradients = GRADIENTS;
    Segment s = segments[blockIdx.y];
    double weight = 0, gradient = 0;
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
            weight += ws;
            gradient += gs;
        }
    weight = block_sum(weight, warps);
    gradient = block_sum(gradient, warps);
    if (threadIdx.x == 0) {
        double* to = partials + ((u64)blockIdx.y * NORM_PARTS + blockIdx.x) * 2;
        to[0] = weight;
        to[1] = gradient;
    }
}

// Each segment's rate: trust |w| / (|g| + decay |w|), or 1 and no decay for what is not adapted. A thread a segment.
extern "C" __global__ void lars_rates(const double* partials, const Segment* segments, u32 count, const Scaler* scaler,
                                      float trust, float decay, Rate* rates) {
    enter();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    double weight = 0, gradient = 0;
    for (u32 p = 0; p < NORM_PARTS; p++) {
        weight += partials[((u64)i * NORM_PARTS + p) * 2];
        gradient += partials[((u64)i * NORM_PARTS + p) * 2 + 1];
    }
    double w = sqrt(weight), g = sqrt(gradient) * scaler->inverse, below = g + (double)decay * w;
    Rate r = {1.0f, 0.0f};
    if (segments[i].adapted) {
        r.decay = decay;
        // A parameter that is all zeros could never leave zero at a rate of zero.
        if (w > 0 && below > 0) r.rate = (float)(trust * w / below);
    }
    rates[i] = r;
}

// kind 0: v = m v + (g + d w), w -= lr v. 1, Nesterov: the same v, w -= lr (g + d w + m v). The first part's d and the
// second's may differ.
// 2, LARS: v = m v + lr rate (g + d w), w -= v, with the segment's rate and decay.
template <int KIND>
__device__ __forceinline__ void update(float* weights, float* velocity, T* low_precision, const Gradients& gradients,
                                       const Control* control, const Scaler* scaler, float momentum, float first_decay,
                                       float second_decay, const Segment* segments, const Rate* rates, u32 count) {
    if (!scaler->apply) return;
    float lr = control->lr, inverse = scaler->inverse;
    u64 groups = gradients.length / 8, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        float w[8], v[8], g[8], rate = lr, decay = i * 8 < gradients.first_length ? first_decay : second_decay;
        gradients.get(i, g);
        load_channels(weights, i, w);
        load_channels(velocity, i, v);
        if (KIND == 2) {
            Rate own = rates[segment_of(segments, count, i)];
            rate = lr * own.rate;
            decay = own.decay;
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
        store_channels(weights, i, w);
        store_channels(velocity, i, v);
        if (low_precision && i * 8 < gradients.first_length) store(low_precision, i, pack(w)); // it has the first part alone
    }
}
#define UPDATE(NAME, KIND)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(float* weights, float* velocity, T* low_precision, GRADIENT_PARAMETERS, const Control* control,                \
             const Scaler* scaler, float momentum, float first_decay, float second_decay, const Segment* segments,   \
             const Rate* rates, u32 count) {                                                                                           \
        enter();                                                                                                    \
        update<KIND>(weights, velocity, low_precision, GRADIENTS, control, scaler, momentum, first_decay, second_decay,     \
                     segments, rates, count);                                                                       \
    }
UPDATE(sgd_momentum, 0)
UPDATE(sgd_nesterov, 1)
UPDATE(sgd_lars, 2)

// sum += gradient, or = if `overwrite`. A micro-batch's gradients into the step's, float32.
extern "C" __global__ void __launch_bounds__(256) accumulate_gradients(float* sum, const T* gradient, u64 length, u32 overwrite) {
    enter();
    u64 groups = length / 8, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        float s[8] = {}, g[8];
        unpack(load(gradient, i), g);
        if (!overwrite) load_channels(sum, i, s);
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] += g[k];
        store_channels(sum, i, s);
    }
}

// to += more: two gradients of one activation.
extern "C" __global__ void __launch_bounds__(256) add(T* to, const T* more, u64 length) {
    enter();
    u64 groups = length / 8, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        float a[8], b[8];
        unpack(load(to, i), a);
        unpack(load(more, i), b);
#pragma unroll
        for (int k = 0; k < 8; k++) a[k] += b[k];
        store(to, i, pack(a));
    }
}

// average = (1 - rest) average + rest values, as the CPU engine's `sums::average`. Nothing where not all of `steps` have finished: the weights are
// held, and no average of the newest step.
extern "C" __global__ void __launch_bounds__(256)
    average_values(float* average, const float* values, u64 length, float rest, const u32* finished, u32 steps) {
    enter();
    if (*finished != steps) return;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < length; i += step) {
        float a = average[i], v = values[i];
        average[i] = rest < 0.5f ? a + rest * (v - a) : v - (v - a) * (1 - rest);
    }
}

// *found = 1 if any of `length` values is not finite.
extern "C" __global__ void __launch_bounds__(256) find_not_finite(const float* values, u64 length, u32* found) {
    enter();
    u64 step = (u64)gridDim.x * blockDim.x;
    bool finite = true;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < length; i += step) finite &= values[i] - values[i] == 0;
    if (!finite) *found = 1;
}

// Adds a checksum of `length` values to *sum: of the bits of each and of its place, so that a change of any one of them changes it.
extern "C" __global__ void __launch_bounds__(256) add_checksum(const u32* values, u64 length, u64* sum) {
    enter();
    u64 step = (u64)gridDim.x * blockDim.x, own = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < length; i += step) {
        u64 mixed = (i << 32 | values[i]) * 0x9e3779b97f4a7c15ull;
        own += (mixed ^ mixed >> 32) * 0xbf58476d1ce4e5b9ull;
    }
    for (u32 lane = 16; lane > 0; lane /= 2) own += __shfl_xor_sync(0xffffffffu, own, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, own);
}

// float32 to the activations' format.
extern "C" __global__ void __launch_bounds__(256) to_low_precision(const float* from, T* to, u64 length) {
    enter();
    u64 groups = length / 8, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        float v[8];
        load_channels(from, i, v);
        store(to, i, pack(v));
    }
}
