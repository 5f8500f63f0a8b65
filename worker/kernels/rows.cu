// Rows of activations of ranks that share pictures. A rank has some rows of each picture. The other rows that its convolution and pooling
// windows need come from other ranks. A line is one row of one picture: `quads` groups of four values.

#if DTYPE == FLOAT32
typedef uint4 Quad;
__device__ __forceinline__ Quad quad_of(float v) {
    u32 bits = __float_as_uint(v);
    return {bits, bits, bits, bits};
}
__device__ __forceinline__ Quad sum_of(const Quad& a, const Quad& b) {
    return {__float_as_uint(__uint_as_float(a.x) + __uint_as_float(b.x)),
            __float_as_uint(__uint_as_float(a.y) + __uint_as_float(b.y)),
            __float_as_uint(__uint_as_float(a.z) + __uint_as_float(b.z)),
            __float_as_uint(__uint_as_float(a.w) + __uint_as_float(b.w))};
}
#else
typedef uint2 Quad;
__device__ __forceinline__ Quad quad_of(float v) { return {pair(v, v), pair(v, v)}; }
__device__ __forceinline__ Quad sum_of(const Quad& a, const Quad& b) {
    return {pair(low(a.x) + low(b.x), high(a.x) + high(b.x)), pair(low(a.y) + low(b.y), high(a.y) + high(b.y))};
}
#endif

// `to[p][r] = from[p][r + offset]`, or `fill` if `from` has no such row. `from` is [pictures, from_rows], `to` is [pictures, to_rows], and
// `offset` may be negative (two's complement). Blocks loop over lines in a grid stride.
extern "C" __global__ void __launch_bounds__(256)
    take_rows(const T* from, T* to, u32 pictures, u32 quads, u32 from_rows, u32 to_rows, u32 offset, float fill) {
    pdl_wait();
    u32 lines = pictures * to_rows;
    Quad filling = quad_of(fill);
    for (u32 line = blockIdx.x; line < lines; line += gridDim.x) {
        u32 row = line % to_rows + offset; // a negative row wraps to a large number
        bool exists = row < from_rows;
        const Quad* source = (const Quad*)from + ((u64)(line / to_rows) * from_rows + (exists ? row : 0)) * quads;
        Quad* target = (Quad*)to + (u64)line * quads;
        for (u32 i = threadIdx.x; i < quads; i += blockDim.x) target[i] = exists ? source[i] : filling;
    }
}

// `to[p][first + r] += part[p][r]`. `part` is [pictures, rows], `to` is [pictures, to_rows]. Blocks loop over the lines of the part in a
// grid stride.
extern "C" __global__ void __launch_bounds__(256)
    add_rows(const T* part, T* to, u32 pictures, u32 quads, u32 rows, u32 to_rows, u32 first) {
    pdl_wait();
    u32 lines = pictures * rows;
    for (u32 line = blockIdx.x; line < lines; line += gridDim.x) {
        const Quad* source = (const Quad*)part + (u64)line * quads;
        Quad* target = (Quad*)to + ((u64)(line / rows) * to_rows + first + line % rows) * quads;
        for (u32 i = threadIdx.x; i < quads; i += blockDim.x) target[i] = sum_of(target[i], source[i]);
    }
}
