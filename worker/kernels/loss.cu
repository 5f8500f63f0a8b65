// Softmax cross-entropy with label smoothing and class weights over logits + bias, its gradient, and totals over
// batches.
//
// A mixed row's target has two labels, weighted by lambda and 1 - lambda. A prediction is correct if it is the label with more weight.
//
// A block has LOSS_ROWS warps, each of which computes the log-sum-exp of one row. Then each thread of the block owns four
// classes and loops over the block's rows, which also sums the gradient of the bias. The last block to finish adds the
// partial sums of all blocks, in block order.

struct Totals {
    double loss_sum;
    u64 correct, samples;
};

// The logit of a row's label, if the loss has a margin (margin.cu).
struct LabelLogit {
    u64 at;        // index among all logits; ~0 if this rank does not have the label
    float original; // the logit without margin; 0 if this rank does not have the label
    float slope;    // derivative of the logit with the margin by the original logit
};

__device__ __forceinline__ void load_logits(const T* logits, const float* bias, u64 at, u32 class_, u32 classes,
                                            float (&v)[4]) {
#if DTYPE == FLOAT32
    float4 q = *(const float4*)(logits + at);
    v[0] = q.x;
    v[1] = q.y;
    v[2] = q.z;
    v[3] = q.w;
#else
    uint2 q = *(const uint2*)(logits + at);
    v[0] = low(q.x);
    v[1] = high(q.x);
    v[2] = low(q.y);
    v[3] = high(q.y);
#endif
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (bias && class_ + k < classes) v[k] += bias[class_ + k];
}
__device__ __forceinline__ void store_logits(T* to, u64 at, const float (&v)[4]) {
#if DTYPE == FLOAT32
    *(float4*)(to + at) = {v[0], v[1], v[2], v[3]};
#else
    *(uint2*)(to + at) = {pair(v[0], v[1]), pair(v[2], v[3])};
#endif
}

// A row has `padded` classes, a multiple of 8. `bias` may be null; then the bias's gradient is 0. If `dlogits` is null,
// no gradients are computed.
// `label_logits`: the labels' logits, if the loss has a margin; the accuracy is computed without the margin. A row with a non-finite
// loss has NaN gradients, so that every rank sees them after the all-reduce. With `accumulate`, results are added to the
// totals and to the bias's gradient. Gradients are multiplied by grad_scale of `control` and by *loss_scale. `partials`: a loss
// (double) and a count (double) per block, then `padded` floats per block. `class_weights`: factors of the terms of each class,
// as PyTorch's `weight`; if null, all are 1. The caller has divided grad_scale by the sum of the labels' weights.
extern "C" __global__ void __launch_bounds__(256)
    cross_entropy(const T* logits, const float* bias, const Control* control, u32 pictures, u32 classes, u32 padded,
                  float smoothing, const float* class_weights, const float* loss_scale, T* dlogits, float* dbias,
                  Totals* totals, u32 accumulate, double* partials, u32* counter, const LabelLogit* label_logits) {
    pdl_wait();
    SHARED(float, max_of_row, LOSS_ROWS);
    SHARED(float, log_of_row, LOSS_ROWS);
    SHARED(float, weight_of_row, LOSS_ROWS); // the sum of the weighted target
    SHARED(double, loss_of_row, LOSS_ROWS);
    SHARED(u32, correct_of_row, LOSS_ROWS);
    u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    u32 valid = min(control->valid, pictures), row = blockIdx.x * LOSS_ROWS + warp;
    const u32* labels = indices(control) + 2 * (u64)pictures;
    const u32* others = labels + pictures;
    // Without mixing, the share of the other label is 0.
    bool mixed = control->mixed;
    float lambda = mixed ? control->lambda : 1.0f;
    float own_share = mixed ? (1.0f - smoothing) * lambda : 1.0f - smoothing;
    float other_share = mixed ? (1.0f - smoothing) * (1.0f - lambda) : 0.0f;
    float smoothing_share = smoothing / classes;
    float* column_partials = (float*)(partials + 2 * (u64)gridDim.x);
    if (row < valid) {
        u64 start = (u64)row * padded;
        float best = __uint_as_float(0xff800000u); // minus infinity
        u32 where = 0xffffffffu;
        for (u32 c = 4 * lane; c < classes; c += 128) {
            float v[4];
            load_logits(logits, bias, start + c, c, classes, v);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (c + k < classes && v[k] > best) {
                    best = v[k];
                    where = c + k;
                }
        }
        for (u32 o = 16; o > 0; o /= 2) { // of equal logits, the first
            float other = shfl_xor(best, o);
            u32 other_where = shfl_xor(where, o);
            if (other > best || other == best && other_where < where) {
                best = other;
                where = other_where;
            }
        }
        // Sums of exp(v - best), of weights, and of weights times (best - v).
        float exp_sum = 0, weight_sum = 0, gap_sum = 0;
        for (u32 c = 4 * lane; c < classes; c += 128) {
            float v[4];
            load_logits(logits, bias, start + c, c, classes, v);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (c + k < classes) {
                    float weight = class_weights ? class_weights[c + k] : 1.0f;
                    exp_sum += expf(v[k] - best);
                    weight_sum += weight;
                    gap_sum += weight * (best - v[k]);
                }
        }
        for (u32 o = 16; o > 0; o /= 2) {
            exp_sum += shfl_xor(exp_sum, o);
            weight_sum += shfl_xor(weight_sum, o);
            gap_sum += shfl_xor(gap_sum, o);
        }
        if (lane == 0) {
            u32 label = min(labels[row], classes - 1);
            float log_sum = logf(exp_sum);
            double own_weight = class_weights ? class_weights[label] : 1.0f;
            double target_logit = own_weight * (to_float(logits[start + label]) + (bias ? bias[label] : 0.0f));
            if (mixed) {
                u32 other = min(others[row], classes - 1);
                float other_logit = to_float(logits[start + other]) + (bias ? bias[other] : 0.0f);
                double other_weight = class_weights ? class_weights[other] : 1.0f;
                target_logit = (double)lambda * target_logit + (1.0 - lambda) * (other_weight * other_logit);
                own_weight = (double)lambda * own_weight + (1.0 - lambda) * other_weight;
                if (lambda < 0.5f) label = other;
            }
            max_of_row[warp] = best;
            log_of_row[warp] = log_sum;
            weight_of_row[warp] =
                class_weights ? (1.0 - smoothing) * own_weight + (double)smoothing_share * weight_sum : 1.0;
            loss_of_row[warp] = (1.0 - smoothing) * (own_weight * ((double)log_sum + best) - target_logit) +
                                (double)smoothing_share * ((double)weight_sum * log_sum + gap_sum);
            // If a logit is NaN, best may not be the maximum, but exp_sum is NaN.
            bool correct = where == label;
            if (label_logits) {
                float original = label_logits[row].original;
                correct = correct || original > best || original == best && label < where;
            }
            correct_of_row[warp] = correct && exp_sum == exp_sum;
        }
    } else if (lane == 0) {
        loss_of_row[warp] = 0;
        correct_of_row[warp] = 0;
    }
    __syncthreads();
    u32 first = blockIdx.x * LOSS_ROWS;
    if (dlogits) {
        float scale = control->grad_scale * *loss_scale;
        for (u32 c = 4 * t; c < padded; c += 4 * blockDim.x) {
            float sum[4] = {};
            for (u32 i = 0; i < LOSS_ROWS && first + i < pictures; i++) {
                float d[4] = {};
                u64 at = (u64)(first + i) * padded + c;
                if (first + i < valid) {
                    float v[4];
                    load_logits(logits, bias, at, c, classes, v);
                    u32 label = labels[first + i], other = mixed ? others[first + i] : classes;
                    float nan_if_not_finite = loss_of_row[i] - loss_of_row[i] == 0 ? 0.0f : __uint_as_float(0x7fc00000u);
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        if (c + k < classes) {
                            float p = expf(v[k] - max_of_row[i] - log_of_row[i]);
                            float target = c + k == label ? own_share : 0.0f;
                            if (c + k == other) target += other_share;
                            float weight = class_weights ? class_weights[c + k] : 1.0f;
                            d[k] = (weight_of_row[i] * p - weight * smoothing_share - weight * target) * scale +
                                   nan_if_not_finite;
                            sum[k] += d[k];
                        }
                }
                store_logits(dlogits, at, d);
            }
            *(float4*)(column_partials + (u64)blockIdx.x * padded + c) = {sum[0], sum[1], sum[2], sum[3]};
        }
    }
    if (t == 0) {
        double loss = 0, correct = 0;
        for (u32 i = 0; i < LOSS_ROWS; i++) {
            loss += loss_of_row[i];
            correct += correct_of_row[i];
        }
        partials[2 * blockIdx.x] = loss;
        partials[2 * blockIdx.x + 1] = correct;
    }
    if (!is_last_block(counter, gridDim.x)) return;
    if (warp == 0) { // each lane adds every 32nd block
        double loss = 0, correct = 0;
        for (u32 b = lane; b < gridDim.x; b += 32) {
            loss += ldcg(partials + 2 * b);
            correct += ldcg(partials + 2 * b + 1);
        }
        for (u32 o = 16; o > 0; o /= 2) {
            loss += shfl_xor(loss, o);
            correct += shfl_xor(correct, o);
        }
        if (lane == 0) {
            totals->loss_sum = (accumulate ? totals->loss_sum : 0.0) + loss;
            totals->correct = (accumulate ? totals->correct : 0) + (u64)correct;
            totals->samples = (accumulate ? totals->samples : 0) + valid;
        }
    }
    if (!dlogits || !dbias) return;
    for (u32 c = 4 * t; c < padded; c += 4 * blockDim.x) {
        float s[4] = {};
        for (u32 b = 0; b < gridDim.x; b += 8) {
            float4 v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = {0, 0, 0, 0};
                if (b + i < gridDim.x) v[i] = ldcg((const float4*)(column_partials + (u64)(b + i) * padded + c));
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[0] += v[i].x;
                s[1] += v[i].y;
                s[2] += v[i].z;
                s[3] += v[i].w;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (c + k < classes) dbias[c + k] = (accumulate ? dbias[c + k] : 0.0f) + (bias ? s[k] : 0.0f);
    }
}

// logits + bias, which may be null, as float32 [pictures, classes], without the padding.
extern "C" __global__ void biased_logits(const T* logits, const float* bias, float* to, u32 pictures, u32 classes,
                                         u32 padded) {
    pdl_wait();
    u32 c = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (c < classes) to[(u64)row * classes + c] = to_float(logits[(u64)row * padded + c]) + (bias ? bias[c] : 0.0f);
}
