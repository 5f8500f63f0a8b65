// Losses with a margin (ArcFace, CosFace): logits are scaled cosines between features and the weights of each class, and in training the
// label's logit has a margin. Convolutions multiply features and weights without normalisation; each product is then multiplied by a
// factor of its row and a factor of its class. A logit does not depend on the norms of the features and of the weights, so the
// gradient of each row of features is orthogonal to that row, and likewise for the weights of each class.

#define MIN_LENGTH 1e-12f // a shorter row is divided by this length, as in the CPU engine

__device__ __forceinline__ float warp_sum(float v) {
    for (u32 o = 16; o > 0; o /= 2) v += shfl_xor(v, o);
    return v;
}

// factors [count]: `scale` divided by the L2 norm of each row. `width`: values per row, a multiple of 8. One warp per row.
extern "C" __global__ void __launch_bounds__(256) row_factors(const T* rows, float* factors, u32 count, u32 width, float scale) {
    pdl_wait();
    u32 lane = threadIdx.x % 32, groups = width / 8, step = gridDim.x * blockDim.x / 32;
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < count; row += step) {
        float square = 0;
        for (u32 i = lane; i < groups; i += 32) {
            float v[8];
            unpack(load(rows, (u64)row * groups + i), v);
#pragma unroll
            for (int k = 0; k < 8; k++) square = fmaf(v[k], v[k], square);
        }
        square = warp_sum(square);
        if (lane == 0) factors[row] = scale / max_nan(sqrtf(square), MIN_LENGTH);
    }
}

// `values` are logits or, with `labels`, gradients of logits, stored in pieces of `chunk` classes; a piece is [rows, chunk]. Each value
// is multiplied by the factors of its row and of its class, and the gradient at a row's label also by the slope that put_margin has
// stored. `groups` is the number of groups of 8 values.
extern "C" __global__ void __launch_bounds__(256)
    scale_cosines(T* values, const float* of_rows, const float* of_classes, u32 rows, u32 chunk, u64 groups, const LabelLogit* labels) {
    pdl_wait();
    u32 groups_per_line = chunk / 8; // a line: the classes of one row in one piece
    FOR_ITEMS(i, groups) {
        u32 line = (u32)i / groups_per_line, row = line % rows, class_ = line / rows * chunk + (u32)i % groups_per_line * 8;
        float v[8], factors[8], factor = of_rows[row], slope = 1;
        u64 label = 8; // position among these 8 values; 8 or more if the label is elsewhere
        if (labels) {
            label = labels[row].at - 8 * i;
            slope = labels[row].slope;
        }
        unpack(load(values, i), v);
        load_channels(of_classes, class_ / 8, factors);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] *= factor * factors[k] * (label == k ? slope : 1.0f);
        store(values, i, pack(v));
    }
}

// Applies the margin to the logit of each row's label, and stores the original logit. One thread per row. Arguments are as in
// class_records (split_loss.cu). A cosine above `limit` becomes cos(angle + margin); any other cosine is reduced by `shift`. CosFace only
// reduces, because its `limit` is infinite.
extern "C" __global__ void __launch_bounds__(256)
    put_margin(T* logits, const u32* controls, u32 words, u32 batch, u32 rows, u32 chunk, u32 classes, u32 first, const Sample* sample,
               const u32* label_positions, float scale, double limit, double cos_margin, double sin_margin, double shift,
               LabelLogit* labels) {
    pdl_wait();
    if (sample) classes = sample->count;
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Control* control = control_of(controls, words, row / batch);
    u32 picture = row % batch, own_label = NO_CLASS;
    if (picture < control->valid) own_label = sample ? label_positions[row] : indices(control)[2 * (u64)batch + picture] - first;
    LabelLogit label_logit = {~0ull, 0.0f, 1.0f};
    if (own_label < classes) {
        label_logit.at = ((u64)(own_label / chunk) * rows + row) * chunk + own_label % chunk;
        label_logit.original = to_float(logits[label_logit.at]);
        double cosine = (double)label_logit.original / scale;
        if (cosine > 1) cosine = 1; // NaN stays
        if (cosine < -1) cosine = -1;
        double with_margin = cosine - shift;
        if (cosine > limit) {
            // The slope is unbounded near a cosine of 1, so the sine is at least the square root of float32's epsilon.
            double square = 1 - cosine * cosine, sine = sqrt(square > 1.1920928955078125e-7 ? square : 1.1920928955078125e-7);
            with_margin = cosine * cos_margin - sine * sin_margin;
            label_logit.slope = (float)(cos_margin + sin_margin * cosine / sine);
        }
        logits[label_logit.at] = from_float((float)(scale * with_margin));
    }
    labels[row] = label_logit;
}

// Removes from each row of gradients its component along the same row of `rows`: g - r (r . g) / (r . r). One warp per row.
extern "C" __global__ void __launch_bounds__(256) remove_along(const T* rows, T* gradients, u32 count, u32 width) {
    pdl_wait();
    u32 lane = threadIdx.x % 32, groups = width / 8, step = gridDim.x * blockDim.x / 32;
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < count; row += step) {
        u64 first = (u64)row * groups;
        float square = 0, along = 0, r[8], g[8];
        for (u32 i = lane; i < groups; i += 32) {
            unpack(load(rows, first + i), r);
            unpack(load(gradients, first + i), g);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                square = fmaf(r[k], r[k], square);
                along = fmaf(r[k], g[k], along);
            }
        }
        float share = warp_sum(along) / max_nan(warp_sum(square), MIN_LENGTH * MIN_LENGTH);
        for (u32 i = lane; i < groups; i += 32) {
            unpack(load(rows, first + i), r);
            unpack(load(gradients, first + i), g);
#pragma unroll
            for (int k = 0; k < 8; k++) g[k] = fmaf(-share, r[k], g[k]);
            store(gradients, first + i, pack(g));
        }
    }
}
