// The activations' floating-point format T (all kernels are compiled once per format), and accesses to groups of eight channels.

// `Raw` has eight values of type T; load() and store() count in groups of eight.
#if DTYPE == FLOAT32
typedef float T;
struct Raw {
    uint4 a, b;
};
__device__ __forceinline__ Raw load(const T* p, u64 group) {
    const uint4* q = (const uint4*)p + group * 2;
    return {q[0], q[1]};
}
__device__ __forceinline__ void store(T* p, u64 group, const Raw& v) {
    uint4* q = (uint4*)p + group * 2;
    q[0] = v.a;
    q[1] = v.b;
}
__device__ __forceinline__ Raw zeros() { return {{0, 0, 0, 0}, {0, 0, 0, 0}}; }
__device__ __forceinline__ void unpack(const Raw& r, float (&v)[8]) {
    v[0] = __uint_as_float(r.a.x);
    v[1] = __uint_as_float(r.a.y);
    v[2] = __uint_as_float(r.a.z);
    v[3] = __uint_as_float(r.a.w);
    v[4] = __uint_as_float(r.b.x);
    v[5] = __uint_as_float(r.b.y);
    v[6] = __uint_as_float(r.b.z);
    v[7] = __uint_as_float(r.b.w);
}
__device__ __forceinline__ Raw pack(const float (&v)[8]) {
    return {{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])},
            {__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]), __float_as_uint(v[7])}};
}
__device__ __forceinline__ float to_float(T v) { return v; }
__device__ __forceinline__ T from_float(float v) { return v; }

#else // FLOAT16 or BFLOAT16
typedef u16 T;
struct Raw {
    uint4 a;
};
__device__ __forceinline__ Raw load(const T* p, u64 group) { return {((const uint4*)p)[group]}; }
__device__ __forceinline__ void store(T* p, u64 group, const Raw& v) { ((uint4*)p)[group] = v.a; }
__device__ __forceinline__ Raw zeros() { return {{0, 0, 0, 0}}; }
#if DTYPE == FLOAT16
__device__ __forceinline__ float low(u32 pair) { return half_low(pair); }
__device__ __forceinline__ float high(u32 pair) { return half_high(pair); }
__device__ __forceinline__ u32 pair(float l, float h) { return half_pair(l, h); }
#else
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pair(float l, float h) { return bfloat_pair(l, h); }
#endif
__device__ __forceinline__ void unpack(const Raw& r, float (&v)[8]) {
    v[0] = low(r.a.x);
    v[1] = high(r.a.x);
    v[2] = low(r.a.y);
    v[3] = high(r.a.y);
    v[4] = low(r.a.z);
    v[5] = high(r.a.z);
    v[6] = low(r.a.w);
    v[7] = high(r.a.w);
}
__device__ __forceinline__ Raw pack(const float (&v)[8]) {
    return {{pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])}};
}
__device__ __forceinline__ float to_float(T v) { return low(v); }
__device__ __forceinline__ T from_float(float v) { return (T)(pair(v, 0.0f) & 0xffffu); }
#endif

// Per-channel float32 values of one group of eight channels.
__device__ __forceinline__ void load_channels(const float* p, u64 group, float (&v)[8]) {
    const float4* q = (const float4*)p + group * 2;
    float4 a = q[0], b = q[1];
    v[0] = a.x;
    v[1] = a.y;
    v[2] = a.z;
    v[3] = a.w;
    v[4] = b.x;
    v[5] = b.y;
    v[6] = b.z;
    v[7] = b.w;
}
__device__ __forceinline__ void store_channels(float* p, u64 group, const float (&v)[8]) {
    float4* q = (float4*)p + group * 2;
    q[0] = {v[0], v[1], v[2], v[3]};
    q[1] = {v[4], v[5], v[6], v[7]};
}

// A step's inputs, in device memory: a captured graph reads them at every replay.
struct Control {
    u32 valid; // real pictures in this rank's micro-batch; the remaining pictures are padding
    u32 mixed; // whether mixup or cutmix applies
    float stat_pictures; // number of pictures in batch norm's statistics
    float grad_scale;    // 1 / (number of pictures in the step, on all ranks)
    float lr;     // learning rate
    float lambda; // share of the batch's picture in a mixed picture
    u32 previous_index, previous_params; // of the picture that is mixed into the first picture; see gather_mixed.cu
    u32 cut_rows[2], cut_columns[2]; // cutmix: start and end of the other picture's rectangle
    // Followed by u32 index[pictures], params[pictures], label[pictures], other_label[pictures].
};
__device__ __forceinline__ const u32* indices(const Control* c) { return (const u32*)(c + 1); }

// Number of rows of real pictures; all rows if there is no control block.
__device__ __forceinline__ u32 valid_rows(const Control* control, u32 pixels, u32 rows) {
    return control ? min(rows, control->valid * pixels) : rows;
}
// Number of rows in the statistics: of all ranks if the statistics are synchronised.
__device__ __forceinline__ double rows_in_statistics(const Control* control, u32 pixels, u32 rows) {
    return control ? (double)control->stat_pictures * pixels : (double)rows;
}
