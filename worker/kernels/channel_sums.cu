// Two sums per channel over the rows of an activation, in an order that depends only on the shapes.
//
// A block has blockDim.x x blockDim.y threads (bx = blockDim.x is a power of two up to 32). Thread (x, y) owns the eight channels of group
// blockIdx.y * bx + x and a grid stride of rows, so a warp reads whole cache lines and no index needs a division.
// Sums are reduced over the lanes of a warp, over the warps of a block, and then in global memory: the last block to
// finish adds all blocks' sums in double precision, in an order that depends only on the number of blocks.

// A thread's share of an activation: one group of channels, and every `step`th row.
struct GridStride {
    u32 groups;   // of eight channels
    u32 group;    // this thread's group
    bool active;  // whether this group exists
    u32 first, step; // first row, and number of rows from one row of this thread to the next
};
// The rows of this thread, if `parts` blocks divide the rows and this block is number `part`.
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

// Counts this block in `counter`. Returns true in the threads of the last of `blocks` blocks, which see the values that the other
// blocks have written, and sets the counter to 0 for the next launch.
__device__ __forceinline__ bool is_last_block(u32* counter, u32 blocks) {
    SHARED(u32, last, 1);
    __threadfence();
    __syncthreads();
    if (thread_in_block() == 0) {
        last[0] = atomicAdd(counter, 1u) == blocks - 1;
        if (last[0]) *counter = 0;
    }
    __syncthreads();
    if (!last[0]) return false;
    __threadfence();
    return true;
}

// `v` of each thread has 16 values: the eight channels of the first sum, then the eight channels of the second sum. Thread
// t < 16 * bx returns the sum of value t / bx over all threads (x, y) with x = t % bx. `scratch` has 16 * bx values for each warp.
__device__ __forceinline__ float block_sums(float (&v)[16], float* scratch) {
    u32 bx = blockDim.x, t = thread_in_block(), lane = t % 32, warp = t / 32;
    for (u32 o = bx; o < 32; o *= 2)
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] += shfl_xor(v[k], o);
    if (lane < bx)
#pragma unroll
        for (int k = 0; k < 16; k++) scratch[(warp * 16 + k) * bx + lane] = v[k];
    __syncthreads();
    float sum = 0;
    u32 values = 16 * bx, warps = blockDim.x * blockDim.y / 32;
    if (t < values)
        for (u32 w = 0; w < warps; w++) sum += scratch[w * values + t];
    return sum;
}

// Which of the block's totals this thread computes. Threads 0 to 8 * bx - 1 have the first sum of the block's channels, the
// next 8 * bx threads the second sum.
struct ChannelSum {
    u32 sum_index; // 0: first sum, 1: second sum, above: none
    u32 channel;
    bool active;
    u32 index;    // in [2, C]
    u32 source;   // the thread for which block_sums() returns this sum
};
__device__ __forceinline__ ChannelSum channel_sum_of_thread(u32 channels) {
    u32 bx = blockDim.x, u = thread_in_block(), local = u % (8 * bx);
    ChannelSum v;
    v.sum_index = u / (8 * bx);
    v.channel = blockIdx.y * 8 * bx + local;
    v.active = v.sum_index < 2 && v.channel < channels;
    v.index = v.sum_index * channels + v.channel;
    v.source = (v.sum_index * 8 + local % 8) * bx + local / 8;
    return v;
}

// Adds the sums of all blocks of a column (blockIdx.y). Returns true only in the last block to finish, with the
// total that `owned` describes in `total`. `scratch` has 32 KB.
__device__ __forceinline__ bool column_sums(float sum, const ChannelSum& owned, float* scratch, float* partials,
                                            u32* counters, double& total) {
    u32 values = 16 * blockDim.x, t = thread_in_block(), threads = blockDim.x * blockDim.y;
    u32 blocks = gridDim.x, column = blockIdx.y;
    if (blocks == 1) {
        __syncthreads();
        if (t < values) scratch[t] = sum;
        __syncthreads();
        total = owned.sum_index < 2 ? scratch[owned.source] : 0.0f;
        __syncthreads();
        return true;
    }
    float* column_partials = partials + (u64)column * blocks * values;
    if (t < values) column_partials[(u64)blockIdx.x * values + t] = sum;
    if (!is_last_block(counters + column, blocks)) return false;
    // Four values per load; part w of the threads adds blocks w, w + parts, ...
    u32 quads = values / 4, parts = threads / quads, quad = t % quads, part = t / quads;
    double s[4] = {0, 0, 0, 0};
    if (part < parts)
        for (u32 b = part; b < blocks; b += 8 * parts) {
            float4 v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = {0, 0, 0, 0};
                if (b + i * parts < blocks)
                    v[i] = ldcg((const float4*)(column_partials + (u64)(b + i * parts) * values) + quad);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[0] += v[i].x;
                s[1] += v[i].y;
                s[2] += v[i].z;
                s[3] += v[i].w;
            }
        }
    double* part_sums = (double*)scratch;
    if (part < parts)
#pragma unroll
        for (int i = 0; i < 4; i++) part_sums[part * values + quad * 4 + i] = s[i];
    __syncthreads();
    total = 0;
    if (owned.sum_index < 2)
        for (u32 w = 0; w < parts; w++) total += part_sums[w * values + owned.source];
    __syncthreads();
    return true;
}

// Adds the sums of all blocks of a cluster; every block gets the totals. `cluster_scratch` has (cluster_size() + 1) * 16 * bx
// values. The kernel must call cluster_arrive() at its start.
__device__ __forceinline__ double cluster_sums(float sum, const ChannelSum& owned, float* cluster_scratch) {
    u32 values = 16 * blockDim.x, t = thread_in_block(), size = cluster_size(), rank = cluster_rank();
    float* result = cluster_scratch + size * values;
    if (size > 1) {
        cluster_wait(); // all blocks have started: their shared memory exists
        if (t < values)
            for (u32 r = 0; r < size; r++) st_shared_cluster(cluster_scratch + rank * values + t, r, sum);
        cluster_arrive();
        cluster_wait();
        double total = 0;
        if (owned.sum_index < 2)
            for (u32 r = 0; r < size; r++) total += cluster_scratch[r * values + owned.source];
        return total;
    }
    cluster_wait();
    if (t < values) result[t] = sum;
    __syncthreads();
    return owned.sum_index < 2 ? result[owned.source] : 0.0f;
}
