// Sums over the ranks of one machine through mapped peer memory (NVLink).
//
// A value and the number of its exchange are one 8-byte store, so a reader that sees the number also has the value,
// without a fence. `sequence[i]` of a Reduction is the number of the last exchange of value i. It is in device memory,
// so a replayed graph continues to count, and nothing is ever reset. Two alternating slots are enough: a rank writes exchange n + 2 into
// the slot of exchange n only after it has received exchange n + 1 from every rank, and a rank sends exchange n + 1
// only after the kernel in which it has read exchange n.

struct Peers {
    u32 rank, world;
    u64 data[MAX_PEERS]; // addresses of all ranks' buffers, as mapped by this rank
    u64 abort;           // address of a u32 in host memory; a nonzero value ends all waits
};

// What a kernel does with this rank's sums.
#define LOCAL 0      // uses them
#define STORE_SUMS 1 // stores them and ends
#define EXCHANGE 2   // exchanges them with the other ranks, and uses the totals

// How the sums of one pass of one batch norm are reduced over the ranks.
struct Reduction {
    u32 mode; // LOCAL, STORE_SUMS or EXCHANGE
    const Peers* peers;
    u64 at;        // byte offset of the messages in each rank's buffer: u64 [2 slots, world, 2 C], with C channels
    u32* sequence; // [2 C]; zero at first, as is the buffer
    float* sums;   // [2 C]; written if the mode is STORE_SUMS
};

// Number of the next exchange of value `index` (of 2 C), which this thread reduces. Call this function before the block contributes its
// sums: after that, the leader block may already have increased `sequence`.
__device__ __forceinline__ u32 next_exchange(const Reduction& reduction, bool active, u32 index) {
    return reduction.mode == EXCHANGE && active ? reduction.sequence[index] + 1 : 0;
}

// Sum of all ranks' values, in rank order. Every block that calls this function receives. Only the leader block sends, and
// writes `sequence`.
__device__ __forceinline__ double exchange_sum(double value, const Reduction& reduction, u32 channels, u32 index, u32 exchange,
                                             bool leader) {
    const Peers& peers = *reduction.peers;
    u32 world = peers.world, rank = peers.rank;
    u64 length = 2 * (u64)channels, slot = (exchange & 1) * (u64)world;
    float own = (float)value;
    if (leader) {
        u64 message = (u64)exchange << 32 | __float_as_uint(own);
        for (u32 r = 0; r < world; r++)
            if (r != rank) st_relaxed_sys((u64*)(peers.data[r] + reduction.at) + (slot + rank) * length + index, message);
        reduction.sequence[index] = exchange;
    }
    const u64* inbox = (const u64*)(peers.data[rank] + reduction.at) + slot * length + index;
    u64 received[MAX_PEERS];
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++) received[r] = 0;
    u32 polls = 0;
    bool complete;
    do {
        complete = true;
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank && (u32)(received[r] >> 32) != exchange) received[r] = ld_relaxed_sys(inbox + r * length);
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank) complete &= (u32)(received[r] >> 32) == exchange;
        // A read of the abort word crosses PCIe: poll it rarely.
        if (!complete && ++polls % 2048 == 0 && peers.abort && ld_relaxed_sys((const u32*)peers.abort)) break;
    } while (!complete);
    double total = 0;
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++)
        if (r < world) total += r == rank ? own : __uint_as_float((u32)received[r]);
    return total;
}

// Reduces this thread's total as the mode says. Returns false if the kernel must end here (STORE_SUMS).
__device__ __forceinline__ bool reduce_over_ranks(double& total, const Reduction& reduction, u32 channels, bool active, u32 index,
                                       u32 exchange, bool leader) {
    if (reduction.mode == STORE_SUMS) {
        if (active && leader) reduction.sums[index] = (float)total;
        return false;
    }
    if (reduction.mode == EXCHANGE && active) total = exchange_sum(total, reduction, channels, index, exchange, leader);
    return true;
}

#define REDUCTION_PARAMETERS u32 mode, const Peers *peers, u64 exchange_at, u32 *sequence, float *sums
#define REDUCTION \
    Reduction { mode, peers, exchange_at, sequence, sums }
