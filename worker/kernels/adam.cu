// AdamW and LAMB over flat buffers, laid out as in optimizer.cu.

// Running means of the gradient and of its square, and the decay rates of these means.
#define MOMENT_PARAMETERS float *first_moment, float *second_moment, double beta1, double beta2, float epsilon

// A step's constants in the update formulas.
struct Adam {
    float beta1, beta2, rest1, rest2; // rest1: 1 - beta1; rest2: 1 - beta2
    float epsilon;
    double correction1; // 1 - beta1^t
    float root2;        // sqrt(1 - beta2^t), where t is the number of updates

    // Updates the moments with a gradient and returns the first moment's divisor.
    __device__ __forceinline__ float update_moments(float& m, float& v, float g) const {
        m = fmaf(beta1, m, rest1 * g);
        v = fmaf(beta2, v, rest2 * g * g);
        return divisor(v);
    }
    __device__ __forceinline__ float divisor(float v) const { return sqrtf(v) / root2 + epsilon; }
};

// Constants of the current update. `scaler->updates` includes this update already: gradient_norm counts it. All threads of a block
// must call this function; thread 0 computes the powers.
__device__ __forceinline__ Adam adam_of(const Scaler* scaler, double beta1, double beta2, float epsilon, double* shared) {
    if (threadIdx.x == 0) {
        double t = scaler->updates;
        shared[0] = 1 - pow(beta1, t);
        shared[1] = sqrt(1 - pow(beta2, t));
    }
    __syncthreads();
    return {(float)beta1, (float)beta2, (float)(1 - beta1), (float)(1 - beta2), epsilon, shared[0], (float)shared[1]};
}

// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, w = (1 - lr d) w,
// w -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon).
template <class Weights>
__device__ __forceinline__ void adamw_of(const Weights& weights, MOMENT_PARAMETERS, const Gradients& gradients, const Control* control,
                                         const Scaler* scaler, float first_decay, float second_decay) {
    SHARED(double, powers, 2);
    if (!scaler->apply) return;
    u64 first_length = gradients.first_length, length = gradients.length;
    Adam adam = adam_of(scaler, beta1, beta2, epsilon, powers);
    float inverse = scaler->inverse, step_size = (float)(control->lr / adam.correction1);
    // Weight decay multiplies the weights by these factors.
    float first_factor = (float)(1 - (double)control->lr * first_decay);
    float second_factor = (float)(1 - (double)control->lr * second_decay);
    FOR_ITEMS(i, length / 8) {
        float w[8], m[8], v[8], g[8], factor = i * 8 < first_length ? first_factor : second_factor;
        gradients.get(i, g);
        weights.get(i, w);
        load_channels(first_moment, i, m);
        load_channels(second_moment, i, v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float denominator = adam.update_moments(m[k], v[k], g[k] * inverse);
            w[k] = fmaf(w[k], factor, -step_size * (m[k] / denominator));
        }
        weights.set(i, w);
        store_channels(first_moment, i, m);
        store_channels(second_moment, i, v);
    }
}
extern "C" __global__ void __launch_bounds__(256)
    adamw(float* weights, T* low_precision, MOMENT_PARAMETERS, GRADIENT_PARAMETERS, const Control* control,
          const Scaler* scaler, float first_decay, float second_decay) {
    pdl_wait();
    adamw_of(FlatWeights{weights, low_precision, first_length}, first_moment, second_moment, beta1, beta2, epsilon, GRADIENTS, control,
             scaler, first_decay, second_decay);
}
#if DTYPE == BFLOAT16
// The same for weights in two planes (`PlanarWeights` in optimizer.cu).
extern "C" __global__ void __launch_bounds__(256)
    adamw_planes(T* differences, T* nearest, MOMENT_PARAMETERS, GRADIENT_PARAMETERS, const Control* control, const Scaler* scaler,
                 float first_decay, float second_decay) {
    pdl_wait();
    adamw_of(PlanarWeights{differences, nearest}, first_moment, second_moment, beta1, beta2, epsilon, GRADIENTS, control, scaler,
             first_decay, second_decay);
}
#endif

// LAMB's first pass over segment blockIdx.y, by NORM_PARTS blocks: updates the moments and sums the squares of the
// weights and of r = (m / (1 - beta1^t)) / (sqrt(v) / sqrt(1 - beta2^t) + epsilon) + d w. A segment that is not adapted
// has no weight decay.
extern "C" __global__ void __launch_bounds__(256)
    lamb_moments(const float* weights, MOMENT_PARAMETERS, GRADIENT_PARAMETERS, const Scaler* scaler, float decay,
                 const Segment* segments, double* partials) {
    pdl_wait();
    SHARED(double, powers, 2);
    SHARED(double, warps, 8);
    if (!scaler->apply) return;
    Gradients gradients = GRADIENTS;
    Adam adam = adam_of(scaler, beta1, beta2, epsilon, powers);
    Segment s = segments[blockIdx.y];
    float inverse = scaler->inverse, scale = (float)(1 / adam.correction1), d = s.adapted ? decay : 0;
    Squares squares = {0, 0};
    // A bias may end within a group of eight; zeros fill the group.
    u64 groups = (s.length + 7) / 8, step = (u64)NORM_PARTS * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += step) {
        u64 at = s.offset / 8 + i;
        float w[8], m[8], v[8], g[8], ws = 0, rs = 0;
        gradients.get(at, g);
        load_channels(weights, at, w);
        load_channels(first_moment, at, m);
        load_channels(second_moment, at, v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float denominator = adam.update_moments(m[k], v[k], g[k] * inverse), r = fmaf(d, w[k], m[k] * scale / denominator);
            ws = fmaf(w[k], w[k], ws);
            rs = fmaf(r, r, rs);
        }
        store_channels(first_moment, at, m);
        store_channels(second_moment, at, v);
        squares.weights += ws;
        squares.others += rs;
    }
    store_squares(squares, warps, partials);
}

// Each segment's rate: |w| / |r|. A segment that is not adapted has the rate 1 and no decay. One thread per segment.
extern "C" __global__ void lamb_rates(const double* partials, const Segment* segments, u32 count, float decay, Rate* rates) {
    pdl_wait();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Squares squares = squares_of(partials, i);
    Rate r = {1.0f, 0.0f};
    if (segments[i].adapted) {
        r.decay = decay;
        // With a rate of 0, a parameter that is all zeros could never change.
        if (squares.weights > 0 && squares.others > 0) r.rate = (float)(sqrt(squares.weights) / sqrt(squares.others));
    }
    rates[i] = r;
}

// LAMB's second pass: w -= lr rate r.
extern "C" __global__ void __launch_bounds__(256)
    lamb(float* weights, T* low_precision, MOMENT_PARAMETERS, u64 first_length, u64 length, const Control* control,
         const Scaler* scaler, const Segment* segments, const Rate* rates, u32 count) {
    pdl_wait();
    SHARED(double, powers, 2);
    if (!scaler->apply) return;
    Adam adam = adam_of(scaler, beta1, beta2, epsilon, powers);
    float lr = control->lr, scale = (float)(1 / adam.correction1);
    FOR_ITEMS(i, length / 8) {
        float w[8], m[8], v[8];
        load_channels(weights, i, w);
        load_channels(first_moment, i, m);
        load_channels(second_moment, i, v);
        Rate of_segment = rates[segment_of(segments, count, i)];
        float rate = lr * of_segment.rate;
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] -= rate * fmaf(of_segment.decay, w[k], m[k] * scale / adam.divisor(v[k]));
        store_channels(weights, i, w);
        if (low_precision && i * 8 < first_length) store(low_precision, i, pack(w));
    }
}
