// Two sums a channel over the rows of an activation, in an order that depends on the shapes alone.
//
// A block is bx x by threads (bx a power of two up to 32): thread (x, y) owns the eight channels of group
// blockIdx.y * bx + x and every row that its y meets, so that a warp reads whole lines and no index is divided.
// Partial sums go from registers over the lanes of a warp and the warps of a block to scratch memory; the last
// block to arrive adds them up in block order, in double precision.

// A thread's share of an activation: one group of channels, and every `step`th row.
struct GridStride {
    u32 groups;   // of eight channels
    u32 group;    // this thread's
    bool active;  // whether it exists
    u32 first, step; // rows
};
__device__ __forceinline__ GridStride rows_of_thread(u32 channels, u32 part, u32 parts) {
    GridStride w;
    w.groups = channels / 8;
    w.group = blockIdx.y * blockDim.x + threadIdx.x;
    w.active = w.group < w.groups;
    w.first = part * blockDim.y + threadIdx.y;
    w.step = parts * blockDim.y;
    return w;
}

__device__ __forceinline__ u32 thread_in_block() { return threadIdx.y * blockDim.x + threadIdx.x; }

// The block's sums of 16 values a thread. `across` holds 16 * bx values for each warp. Thread t < 16 * bx gets
// that of value t / bx of the threads with x = t % bx.
__device__ __forceinline__ float block_sums(float (&v)[16], float* across) {
    u32 bx = blockDim.x, t = thread_in_block(), lane = t % 32, warp = t / 32;
    for (u32 o = bx; o < 32; o *= 2)
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] += from_lane_xor(v[k], o);
    if (lane < bx)
#pragma unroll
        for (int k = 0; k < 16; k++) across[(warp * 16 + k) * bx + lane] = v[k];
    __syncthreads();
    float sum = 0;
    u32 values = 16 * bx, warps = blockDim.x * blockDim.y / 32;
    if (t < values)
        for (u32 w = 0; w < warps; w++) sum += across[w * values + t];
    return sum;
}

// Where value `u` of a block's 16 * bx lies when channels are in order: first those of the first sum.
struct Value {
    u32 which;    // 0 or 1
    u32 channel;
    bool active;
    u32 index;    // of [2, C]
    u32 source;   // in block_sums' order
};
__device__ __forceinline__ Value value_of_thread(u32 channels) {
    u32 bx = blockDim.x, u = thread_in_block(), local = u % (8 * bx);
    Value v;
    v.which = u / (8 * bx);
    v.channel = blockIdx.y * 8 * bx + local;
    v.active = v.which < 2 && v.channel < channels;
    v.index = v.which * channels + v.channel;
    v.source = (v.which * 8 + local % 8) * bx + local / 8;
    return v;
}

// Adds up what all blocks of a column (blockIdx.y) found. Only the last one to come continues (returns true), with
// the total of value_of_thread() in `total`. `across` has room for 32 KB.
__device__ __forceinline__ bool column_sums(float sum, const Value& value, float* across, float* partials,
                                            u32* counters, double& total) {
    u32 values = 16 * blockDim.x, t = thread_in_block(), threads = blockDim.x * blockDim.y;
    u32 blocks = gridDim.x, column = blockIdx.y;
    SHARED(u32, last, 1);
    if (blocks == 1) {
        __syncthreads();
        if (t < values) across[t] = sum;
        __syncthreads();
        total = value.which < 2 ? across[value.source] : 0.0f;
        __syncthreads();
        return true;
    }
    float* mine = partials + (u64)column * blocks * values;
    if (t < values) mine[(u64)blockIdx.x * values + t] = sum;
    __threadfence();
    __syncthreads();
    if (t == 0) {
        last[0] = atomicAdd(&counters[column], 1u) == blocks - 1;
        if (last[0]) counters[column] = 0; // for the next launch
    }
    __syncthreads();
    if (!last[0]) return false;
    __threadfence();
    // Four values a load; part w of the threads takes blocks w, w + parts, ...
    u32 quads = values / 4, parts = threads / quads, quad = t % quads, part = t / quads;
    double s[4] = {0, 0, 0, 0};
    if (part < parts)
        for (u32 b = part; b < blocks; b += 8 * parts) {
            float4 v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = {0, 0, 0, 0};
                if (b + i * parts < blocks)
                    v[i] = load_shared_by_blocks((const float4*)(mine + (u64)(b + i * parts) * values) + quad);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[0] += v[i].x;
                s[1] += v[i].y;
                s[2] += v[i].z;
                s[3] += v[i].w;
            }
        }
    double* part_sums = (double*)across;
    if (part < parts)
#pragma unroll
        for (int i = 0; i < 4; i++) part_sums[part * values + quad * 4 + i] = s[i];
    __syncthreads();
    total = 0;
    if (value.which < 2)
        for (u32 w = 0; w < parts; w++) total += part_sums[w * values + value.source];
    __syncthreads();
    return true;
}

// The same over the blocks of a cluster, which all get the totals. `slots` holds cluster_size() * 16 * bx values
// and 16 * bx more. Call cluster_arrive() when the kernel starts.
__device__ __forceinline__ double cluster_sums(float sum, const Value& value, float* slots) {
    u32 values = 16 * blockDim.x, t = thread_in_block(), size = cluster_size(), rank = cluster_rank();
    float* result = slots + size * values;
    if (size > 1) {
        cluster_wait(); // all blocks have started, so their shared memory is there
        if (t < values)
            for (u32 r = 0; r < size; r++) store_in_cluster(slots + rank * values + t, r, sum);
        cluster_arrive();
        cluster_wait();
        double total = 0;
        if (value.which < 2)
            for (u32 r = 0; r < size; r++) total += slots[r * values + value.source];
        return total;
    }
    cluster_wait();
    if (t < values) result[t] = sum;
    __syncthreads();
    return value.which < 2 ? result[value.source] : 0.0f;
}
