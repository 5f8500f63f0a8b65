// Sums over the ranks of one machine through mapped peer memory (NVLink).
//
// A value and the number of its exchange are one 8-byte store, so a reader that sees the number also has the value,
// without a fence. Each value of a site counts its exchanges in `sequence`, in device memory: a replayed graph
// continues to count, and nothing is ever reset. Two alternating slots are enough: a rank writes exchange n + 2 into
// the slot of exchange n only after it has received exchange n + 1 from every rank, and a rank sends exchange n + 1
// only after the kernel in which it has read exchange n.

struct Peers {
    u32 rank, world;
    u64 data[MAX_PEERS]; // addresses of all ranks' buffers, as mapped by this rank
    u64 abort;           // address of a u32 in host memory; a nonzero value ends all waits
};

struct Site {
    u32 mode; // 0: use this rank's sums; 1: store the sums and end the kernel; 2: exchange sums with the other ranks
    const Peers* peers;
    u64 at;        // byte offset in each rank's buffer: 2 slots x world x 2 C values of 8 bytes
    u32* sequence; // [2 C]; zero at first, as is the buffer
    float* sums;   // [2 C]; written in mode 1
};

// Number of the next exchange of this thread's value (`index` of 2 C). Call this function before any block may finish, because the leader
// block then counts the exchange.
__device__ __forceinline__ u32 next_exchange(const Site& site, bool active, u32 index) {
    return site.mode == 2 && active ? site.sequence[index] + 1 : 0;
}

// Sum of all ranks' values, in rank order. Only the leader block's threads send and count; other blocks receive.
__device__ __forceinline__ double exchange_sum(double value, const Site& site, u32 channels, u32 index, u32 number,
                                             bool leader) {
    const Peers& peers = *site.peers;
    u32 world = peers.world, rank = peers.rank;
    u64 length = 2 * (u64)channels, slot = (number & 1) * (u64)world;
    float own = (float)value;
    if (leader) {
        u64 message = (u64)number << 32 | __float_as_uint(own);
        for (u32 r = 0; r < world; r++)
            if (r != rank) st_relaxed_sys((u64*)(peers.data[r] + site.at) + (slot + rank) * length + index, message);
        site.sequence[index] = number;
    }
    const u64* inbox = (const u64*)(peers.data[rank] + site.at) + slot * length + index;
    u64 received[MAX_PEERS];
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++) received[r] = 0;
    u32 polls = 0;
    bool complete;
    do {
        complete = true;
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank && (u32)(received[r] >> 32) != number) received[r] = ld_relaxed_sys(inbox + r * length);
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank) complete &= (u32)(received[r] >> 32) == number;
        // A read of the abort word crosses PCIe: poll it rarely.
        if (!complete && ++polls % 2048 == 0 && peers.abort && ld_relaxed_sys((const u32*)peers.abort)) break;
    } while (!complete);
    double total = 0;
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++)
        if (r < world) total += r == rank ? own : __uint_as_float((u32)received[r]);
    return total;
}

// Reduces this thread's total as the site's mode says. Returns false if the kernel must end here (mode 1).
__device__ __forceinline__ bool reduce_over_ranks(double& total, const Site& site, u32 channels, bool active, u32 index,
                                       u32 number, bool leader) {
    if (site.mode == 1) {
        if (active && leader) site.sums[index] = (float)total;
        return false;
    }
    if (site.mode == 2 && active) total = exchange_sum(total, site, channels, index, number, leader);
    return true;
}

#define SITE_PARAMETERS u32 mode, const Peers *peers, u64 exchange_at, u32 *sequence, float *sums
#define SITE \
    Site { mode, peers, exchange_at, sequence, sums }
