// Sums over ranks through memory that the GPUs of one machine map from each other (NVLink).
//
// A value and the number of its exchange travel as one 8-byte store, so that whoever finds the number has the
// value too: no fence, no second message. Each value of a site counts its exchanges in `sequence`, in device
// memory, so a replayed graph continues counting and nothing is ever reset. Two slots take turns. That is enough:
// a rank writes exchange n + 2 into the slot of n only after it has had every rank's n + 1, and a rank sends
// n + 1 only after the kernel in which it read n.

struct Peers {
    u32 rank, world;
    u64 data[MAX_PEERS];  // each rank's buffer, mapped here
    u64 flags[MAX_PEERS]; // not used by this protocol
    u64 abort;            // u32 in host memory; anything but 0 ends all waiting
};

struct Site {
    u32 mode; // 0 local, 1 leave the sums, 2 exchange
    const Peers* peers;
    u64 at;        // bytes into each rank's buffer: 2 slots x world x 2 C values of 8 bytes
    u32* sequence; // [2 C], zero at first, like the buffer
    float* sums;   // [2 C], mode 1
};

// The number of the exchange that this thread's value (`index` of 2 C) is about to make; read before any block may
// finish.
__device__ __forceinline__ u32 next_exchange(const Site& site, bool active, u32 index) {
    return site.mode == 2 && active ? site.sequence[index] + 1 : 0;
}

// Adds all ranks' values, in rank order. The leader's threads send and count; the others only receive.
__device__ __forceinline__ double over_ranks(double value, const Site& site, u32 channels, u32 index, u32 number,
                                             bool leader) {
    const Peers& peers = *site.peers;
    u32 world = peers.world, rank = peers.rank;
    u64 length = 2 * (u64)channels, slot = (number & 1) * (u64)world;
    float own = (float)value;
    if (leader) {
        u64 message = (u64)number << 32 | __float_as_uint(own);
        for (u32 r = 0; r < world; r++)
            if (r != rank) store_system((u64*)(peers.data[r] + site.at) + (slot + rank) * length + index, message);
        site.sequence[index] = number;
    }
    const u64* inbox = (const u64*)(peers.data[rank] + site.at) + slot * length + index;
    u64 got[MAX_PEERS];
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++) got[r] = 0;
    u32 turns = 0;
    bool complete;
    do {
        complete = true;
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank && (u32)(got[r] >> 32) != number) got[r] = load_system(inbox + r * length);
#pragma unroll
        for (int r = 0; r < MAX_PEERS; r++)
            if (r < world && r != rank) complete &= (u32)(got[r] >> 32) == number;
        // The abort word lies behind the PCIe bus: read it rarely.
        if (!complete && ++turns % 2048 == 0 && peers.abort && load_system((const u32*)peers.abort)) break;
    } while (!complete);
    double total = 0;
#pragma unroll
    for (int r = 0; r < MAX_PEERS; r++)
        if (r < world) total += r == rank ? own : __uint_as_float((u32)got[r]);
    return total;
}

// Brings this thread's total to what the statistics are of. False when the kernel ends here: the sums are left.
__device__ __forceinline__ bool reduce_over_ranks(double& total, const Site& site, u32 channels, bool active, u32 index,
                                       u32 number, bool leader) {
    if (site.mode == 1) {
        if (active && leader) site.sums[index] = (float)total;
        return false;
    }
    if (site.mode == 2 && active) total = over_ranks(total, site, channels, index, number, leader);
    return true;
}

#define SITE_PARAMETERS u32 mode, const Peers *peers, u64 exchange_at, u32 *sequence, float *sums
#define SITE \
    Site { mode, peers, exchange_at, sequence, sums }
