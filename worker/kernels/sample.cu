// Partial FC: samples classes of a rank for a step (as documented in `worker/engine/src/loss.rs`), and copies their rows of parameters.

#define NO_CLASS 0xffffffffu

// Followed by `count` classes, relative to this rank's first class.
struct Sample {
    u32 count, pad[3];
};
__device__ __forceinline__ const u32* classes_of(const Sample* s) { return (const u32*)(s + 1); }

__device__ __forceinline__ const Control* control_of(const u32* controls, u32 words, u32 rank) {
    return (const Control*)(controls + (u64)rank * words);
}

// SplitMix64's mixing function.
__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// A random permutation of a rank's classes; the same as the CPU engine's `Order`. A Feistel network permutes the numbers of 2 half_bits
// bits, and is applied again to a result that is not a class.
struct Order {
    u32 classes, half_bits, mask, keys[ORDER_ROUNDS];

    __device__ Order(u64 seed, u64 updates, u64 first, u32 classes) : classes(classes), half_bits(1) {
        const u64 golden = 0x9e3779b97f4a7c15ull;
        while (1ull << 2 * half_bits < classes) half_bits++;
        mask = (1u << half_bits) - 1;
        u64 key = mix64((mix64(mix64(seed + golden) ^ updates) + golden) ^ first);
        for (int round = 0; round < ORDER_ROUNDS; round++) keys[round] = (u32)(mix64(key + golden * (round + 1)) >> 32);
    }
    // The hash function lowbias32 (Wellons 2018).
    __device__ u32 scramble(u32 h, u32 key) const {
        h += key;
        h = (h ^ h >> 16) * 0x7feb352du;
        h = (h ^ h >> 15) * 0x846ca68bu;
        return (h ^ h >> 16) & mask;
    }
    __device__ u32 class_at(u32 position) const {
        do {
            u32 left = position >> half_bits, right = position & mask;
#pragma unroll
            for (int round = 0; round < ORDER_ROUNDS; round++) {
                u32 next = left ^ scramble(right, keys[round]);
                left = right;
                right = next;
            }
            position = left << half_bits | right;
        } while (position >= classes);
        return position;
    }
    __device__ u32 position_of(u32 class_) const {
        do {
            u32 left = class_ >> half_bits, right = class_ & mask;
#pragma unroll
            for (int round = ORDER_ROUNDS - 1; round >= 0; round--) {
                u32 before = right ^ scramble(left, keys[round]);
                right = left;
                left = before;
            }
            class_ = left << half_bits | right;
        } while (class_ >= classes);
        return class_;
    }
};

// Samples `drawn` random classes among this rank's classes (`first` to `first + classes - 1`), and this rank's classes that are labels of
// the group's pictures. The group has `batch` pictures per rank. `label_positions` has two words per picture: the positions in the sample
// of the picture's label and of the label of the picture that is mixed in, or NO_CLASS. `scratch` has four words per picture: the labels
// that were not drawn, then whether each of them is the first of equal labels. The first block processes the labels, the other blocks draw
// the random classes.
extern "C" __global__ void __launch_bounds__(1024)
    sample_classes(const u32* controls, u32 words, u32 batch, u32 ranks, u32 first, u32 classes, u32 drawn, u64 seed,
                   const Scaler* scaler, Sample* sample, u32* label_positions, u32* scratch) {
    pdl_wait();
    SHARED(u32, added, 1);
    Order order(seed, scaler->updates, first, classes);
    u32* sampled = (u32*)(sample + 1);
    if (blockIdx.x > 0) {
        u32 step = (gridDim.x - 1) * blockDim.x;
        for (u32 i = (blockIdx.x - 1) * blockDim.x + threadIdx.x; i < drawn; i += step) sampled[i] = order.class_at(i);
        return;
    }
    if (threadIdx.x == 0) added[0] = 0;
    u32 count = batch * ranks, all = 2 * count;
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        u32 picture_of_group = i % count, picture = picture_of_group % batch;
        const Control* control = control_of(controls, words, picture_of_group / batch);
        bool is_other = i >= count, has_label = picture < control->valid && (!is_other || control->mixed);
        u32 label = has_label ? indices(control)[(is_other ? 3 : 2) * (u64)batch + picture] - first : NO_CLASS;
        u32 position = label < classes ? order.position_of(label) : NO_CLASS;
        label_positions[i] = position < drawn ? position : NO_CLASS;
        scratch[i] = label < classes && position >= drawn ? label : NO_CLASS;
    }
    __syncthreads();
    // Labels that were not drawn follow the drawn classes, each once and in ascending order.
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        u32 label = scratch[i];
        bool is_first = label != NO_CLASS;
        for (u32 j = 0; j < i && is_first; j++) is_first = scratch[j] != label;
        scratch[all + i] = is_first;
        if (is_first) atomicAdd(added, 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        u32 label = scratch[i], before = 0;
        if (label == NO_CLASS) continue;
        for (u32 j = 0; j < all; j++) before += scratch[all + j] != 0 && scratch[j] < label;
        label_positions[i] = drawn + before;
        sampled[drawn + before] = label;
    }
    if (threadIdx.x == 0) sample->count = drawn + added[0];
}

// gather_elements() copies the rows of a sample, each of `width` elements, from `all` to `sampled`, followed by zeros up to `length`
// elements. scatter_elements() copies the rows back.
template <class V>
__device__ __forceinline__ void gather_elements(const V* all, V* sampled, const Sample* sample, u32 width, u64 length) {
    FOR_ITEMS(i, length) {
        u32 row = (u32)i / width;
        sampled[i] = row < sample->count ? all[(u64)classes_of(sample)[row] * width + (u32)i % width] : V{};
    }
}
template <class V>
__device__ __forceinline__ void scatter_elements(V* all, const V* sampled, const Sample* sample, u32 width) {
    u64 length = (u64)sample->count * width;
    FOR_ITEMS(i, length)
        all[(u64)classes_of(sample)[(u32)i / width] * width + (u32)i % width] = sampled[i];
}
extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const uint4* all, uint4* sampled, const Sample* sample, u32 width, u64 length) {
    pdl_wait();
    gather_elements(all, sampled, sample, width, length);
}
extern "C" __global__ void __launch_bounds__(256) scatter_rows(uint4* all, const uint4* sampled, const Sample* sample, u32 width) {
    pdl_wait();
    scatter_elements(all, sampled, sample, width);
}
extern "C" __global__ void __launch_bounds__(256)
    gather_values(const u32* all, u32* sampled, const Sample* sample, u32 width, u64 length) {
    pdl_wait();
    gather_elements(all, sampled, sample, width, length);
}
extern "C" __global__ void __launch_bounds__(256) scatter_values(u32* all, const u32* sampled, const Sample* sample, u32 width) {
    pdl_wait();
    scatter_elements(all, sampled, sample, width);
}
