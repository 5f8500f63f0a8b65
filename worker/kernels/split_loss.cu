// Softmax cross-entropy with label smoothing whose classes are split over the ranks of a model group. See loss.cu for a loss
// whose classes are all on one rank.
//
// Every rank has the logits of all pictures of the group for its own classes: `batch` rows per rank, in the order of ranks. The last rows
// of a rank may be padding. A rank's classes are `classes` classes from `first` on. Logits are stored in chunks of `chunk`
// classes (a multiple of 8), each [rows, chunk], with padding after the last class. `controls` are the control blocks of all
// ranks of the group, `words` u32 apart. Ranks exchange a ClassRecord per row, never logits.
//
// With a `sample`, the rank's classes are the classes of the sample, in the sample's order, and `label_positions` [2, rows] are the
// positions of the labels in the sample. `bias` may be null; then the bias's gradient is 0.

// Partial result of the softmax over a range of one row's classes.
struct ClassPart {
    float best; // the largest logit
    u32 where;  // its class, the first one if several are equal; 0xffffffff if no logit is larger than minus infinity
    float exps; // sum of exp(v - best)
    u32 pad;
    double sum; // of all logits
};

// Result of the softmax over one rank's classes of a row.
struct ClassRecord {
    double best, where, exps, sum; // `where` among all classes; -1 for none
    double own, other;             // logits of the row's labels; 0 if another rank has the label
    // If pictures are not mixed, `other` is the label's logit without margin.
};

// The values from which a row's gradient is computed.
struct ClassRow {
    float best, log_sum; // of all classes: the largest logit, log of the sum of exp(v - best)
    float scale;         // factor of the row's gradient: 0 for padding, NaN if the loss is not finite
    u32 label, other;    // `other` is 0xffffffff if pictures are not mixed
    float own_share, other_share;
    u32 pad;
};

// Converts a sum of exp(v - from) to a sum of exp(v - to). An empty sum, for which `from` is minus infinity, stays 0.
__device__ __forceinline__ float rebased(float exps, float from, float to) { return exps == 0 ? 0.0f : exps * expf(from - to); }

// The result for an empty range of classes.
__device__ __forceinline__ ClassPart no_classes() { return {__uint_as_float(0xff800000u), 0xffffffffu, 0.0f, 0, 0.0}; }

// Joins `b` to `a`.
__device__ __forceinline__ void join(ClassPart& a, const ClassPart& b) {
    bool other = b.best > a.best || b.best == a.best && b.where < a.where;
    float best = other ? b.best : a.best;
    a.exps = rebased(a.exps, a.best, best) + rebased(b.exps, b.best, best);
    a.best = best;
    if (other) a.where = b.where;
    a.sum += b.sum;
}

// Joins the partial results of a warp's lanes.
__device__ __forceinline__ ClassPart joined_lanes(ClassPart p) {
    for (u32 o = 16; o > 0; o /= 2) {
        ClassPart q = {shfl_xor(p.best, o), shfl_xor(p.where, o), shfl_xor(p.exps, o), 0, shfl_xor(p.sum, o)};
        join(p, q);
    }
    return p;
}

// parts [rows, gridDim.x]: the classes of each chunk of a row (blockIdx.y) are divided among `blocks_per_chunk` blocks.
extern "C" __global__ void __launch_bounds__(256)
    class_parts(const T* logits, const float* bias, ClassPart* parts, u32 chunk, u32 blocks_per_chunk, u32 classes, const Sample* sample) {
    pdl_wait();
    if (sample) classes = sample->count;
    SHARED(ClassPart, warp_parts, 8);
    u32 row = blockIdx.y, rows = gridDim.y, chunk_index = blockIdx.x / blocks_per_chunk, block = blockIdx.x % blocks_per_chunk;
    const T* from = logits + ((u64)chunk_index * rows + row) * chunk;
    u32 groups = chunk / 8, per_block = (groups + blocks_per_chunk - 1) / blocks_per_chunk, end = min((block + 1) * per_block, groups);
    ClassPart p = no_classes();
    for (u32 i = block * per_block + threadIdx.x; i < end; i += blockDim.x) {
        u32 c = chunk_index * chunk + i * 8;
        if (c >= classes) break;
        float v[8], b[8] = {};
        unpack(load(from, i), v);
        if (bias) load_channels(bias, c / 8, b);
        float best = p.best;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] += b[k];
            if (c + k < classes && v[k] > best) {
                best = v[k];
                p.where = c + k;
            }
        }
        p.exps = rebased(p.exps, p.best, best);
        p.best = best;
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (c + k < classes) {
                p.exps += expf(v[k] - best);
                sum += v[k];
            }
        p.sum += sum;
    }
    p = joined_lanes(p);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) warp_parts[warp] = p;
    __syncthreads();
    if (warp > 0) return;
    p = joined_lanes(lane < 8 ? warp_parts[lane] : no_classes());
    if (lane == 0) parts[(u64)row * gridDim.x + blockIdx.x] = p;
}

// The record of each row (blockIdx.x) from its `count` parts. One warp per row.
extern "C" __global__ void __launch_bounds__(32)
    class_records(const ClassPart* parts, u32 count, const T* logits, const float* bias, const u32* controls, u32 words,
                  u32 batch, u32 chunk, u32 classes, u32 first, const Sample* sample, const u32* label_positions, ClassRecord* records,
                  const LabelLogit* label_logits) {
    pdl_wait();
    if (sample) classes = sample->count;
    u32 row = blockIdx.x, rows = gridDim.x, picture = row % batch;
    ClassPart p = no_classes();
    for (u32 i = threadIdx.x; i < count; i += 32) join(p, parts[(u64)row * count + i]);
    p = joined_lanes(p);
    if (threadIdx.x > 0) return;
    const Control* control = control_of(controls, words, row / batch);
    const u32* labels = indices(control) + 2 * (u64)batch;
    u32 where = p.where == 0xffffffffu || !sample ? p.where : classes_of(sample)[p.where];
    ClassRecord r = {p.best, where == 0xffffffffu ? -1.0 : (double)first + where, p.exps, p.sum, 0.0, 0.0};
    if (picture < control->valid) {
        auto logit = [&](u32 which) {
            u32 label = labels[which * batch + picture];
            u32 own = sample ? label_positions[which * rows + row] : label - first; // a label below the first class wraps to a large number
            if (own >= classes) return 0.0;
            return (double)(to_float(logits[((u64)(own / chunk) * rows + row) * chunk + own % chunk]) + (bias ? bias[own] : 0.0f));
        };
        r.own = logit(0);
        r.other = control->mixed ? logit(1) : label_logits ? (double)label_logits[row].original : r.own;
    }
    records[row] = r;
}

// The loss of this rank's pictures from the records [ranks, rows] of all ranks. Unless `class_rows` is null, also writes the ClassRow
// of every row. `classes` counts the classes of all ranks. With `accumulate`, results are added to the totals. One block.
extern "C" __global__ void __launch_bounds__(256)
    class_loss(const ClassRecord* records, const u32* controls, u32 words, u32 batch, u32 ranks, u32 rank, u32 classes,
               float smoothing, const float* loss_scale, ClassRow* class_rows, Totals* totals, u32 accumulate) {
    pdl_wait();
    SHARED(double, warps, 8);
    u32 count = batch * ranks;
    double smoothing_share = (double)smoothing / classes, loss = 0, correct = 0;
    for (u32 row = threadIdx.x; row < count; row += blockDim.x) {
        const Control* control = control_of(controls, words, row / batch);
        const u32* labels = indices(control) + 2 * (u64)batch;
        u32 picture = row % batch;
        ClassRow class_row = {0.0f, 0.0f, 0.0f, 0xffffffffu, 0xffffffffu, 0.0f, 0.0f, 0};
        if (picture < control->valid) {
            double best = records[row].best, where = records[row].where, exps = 0, sum = 0, own = 0, other = 0;
            for (u32 r = 1; r < ranks; r++) { // of equal logits, the first
                const ClassRecord& record = records[(u64)r * count + row];
                if (record.best > best) {
                    best = record.best;
                    where = record.where;
                }
            }
            for (u32 r = 0; r < ranks; r++) {
                const ClassRecord& record = records[(u64)r * count + row];
                exps += record.exps == 0 ? 0.0 : record.exps * exp(record.best - best);
                sum += record.sum;
                own += record.own;
                other += record.other;
            }
            bool mixed = control->mixed;
            float lambda = mixed ? control->lambda : 1.0f;
            double log_sum = log(exps), target_logit = own;
            u32 label = labels[picture];
            class_row.label = label;
            class_row.own_share = (1.0f - smoothing) * lambda;
            if (mixed) {
                class_row.other = labels[batch + picture];
                class_row.other_share = (1.0f - smoothing) * (1.0f - lambda);
                target_logit = (double)lambda * own + (1.0 - lambda) * other;
                if (lambda < 0.5f) label = class_row.other;
            }
            double row_loss = (1.0 - smoothing) * (log_sum + best - target_logit) + smoothing_share * ((log_sum + best) * classes - sum);
            class_row.best = (float)best;
            class_row.log_sum = (float)log_sum;
            class_row.scale = row_loss - row_loss == 0 ? control->grad_scale * *loss_scale : __uint_as_float(0x7fc00000u);
            if (row / batch == rank) {
                loss += row_loss;
                bool is_best = other > best || other == best && label < where; // without the margin
                correct += exps == exps && (where == (double)label || !mixed && is_best);
            }
        }
        if (class_rows) class_rows[row] = class_row;
    }
    loss = block_sum(loss, warps);
    correct = block_sum(correct, warps);
    if (threadIdx.x > 0) return;
    totals->loss_sum = (accumulate ? totals->loss_sum : 0.0) + loss;
    totals->correct = (accumulate ? totals->correct : 0) + (u64)correct;
    totals->samples = (accumulate ? totals->samples : 0) + min(control_of(controls, words, rank)->valid, batch);
}

// Replaces the logits by their gradient, and computes the gradient of the bias, float32 [classes]. Block (x, y) computes 256 classes
// of chunk y: a lane owns 8 of them, and a warp every eighth row. With `accumulate`, the gradient of the bias is added to
// `dbias`. `dbias` may be null.
extern "C" __global__ void __launch_bounds__(256)
    class_gradient(T* logits, const float* bias, const ClassRow* class_rows, u32 count, u32 chunk, u32 classes, u32 first,
                   float smoothing_share, const Sample* sample, const u32* label_positions, float* dbias, u32 accumulate) {
    pdl_wait();
    if (sample) classes = sample->count;
    SHARED(float, sums, 8 * 256);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x * 32 + lane, c = blockIdx.y * chunk + group * 8;
    float s[8] = {};
    if (group * 8 < chunk) {
        float b[8] = {};
        if (bias) load_channels(bias, c / 8, b);
        for (u32 row = warp; row < count; row += 8) {
            ClassRow r = class_rows[row];
            T* at = logits + ((u64)blockIdx.y * count + row) * chunk;
            u32 label = sample ? label_positions[row] : r.label - first, other = sample ? label_positions[count + row] : r.other - first;
            float v[8], d[8];
            unpack(load(at, group), v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float p = expf(v[k] + b[k] - r.best - r.log_sum), target = c + k == label ? r.own_share : 0.0f;
                if (c + k == other) target += r.other_share;
                d[k] = c + k < classes && r.scale != 0 ? (p - smoothing_share - target) * r.scale : 0.0f;
                s[k] += d[k];
            }
            store(at, group, pack(d));
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) sums[warp * 256 + lane * 8 + k] = s[k];
    __syncthreads();
    u32 in_chunk = blockIdx.x * 256 + threadIdx.x, class_ = blockIdx.y * chunk + in_chunk;
    if (in_chunk >= chunk || !dbias) return;
    float sum = 0;
    for (u32 w = 0; w < 8 && bias; w++) sum += sums[w * 256 + threadIdx.x];
    dbias[class_] = accumulate ? dbias[class_] + sum : sum; // 0 after the last class
}

// to = the sum of `count` parts of `length` values each; `length` is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) sum_parts(const T* parts, T* to, u64 length, u32 count) {
    pdl_wait();
    u64 groups = length / 8;
    FOR_ITEMS(i, groups) {
        float sum[8] = {};
        for (u32 part = 0; part < count; part++) {
            float v[8];
            unpack(load(parts, part * groups + i), v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        store(to, i, pack(sum));
    }
}
