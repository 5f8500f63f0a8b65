// The ends of a step: what the host says about it comes in, what it measured goes out, through rings in pinned
// host memory, so that a replayed graph needs nothing from the host but its launch.

// Copies the next slot of `words` u32 (a multiple of 4) of the ring to the control block, and tells the host through
// `taken`, in pinned host memory, how many slots it may write over. One block.
extern "C" __global__ void __launch_bounds__(1024)
    fetch(uint4* control, const uint4* ring, u32* counter, volatile u32* taken, u32 slots, u32 words) {
    enter();
    u32 count = *counter;
    const volatile u64* from = (const volatile u64*)(ring + (u64)(count % slots) * (words / 4));
    u64* to = (u64*)control;
    for (u32 i = threadIdx.x; i < words / 2; i += blockDim.x) to[i] = from[i];
    __syncthreads(); // every thread has its words: what it stored came from them
    if (threadIdx.x == 0) *taken = *counter = count + 1;
}

// The GPU's clock in nanoseconds. One thread.
extern "C" __global__ void stamp(u64* at) {
    enter();
    *at = nanoseconds();
}

struct Result {
    u32 sequence; // written last: the step's number, from 1
    float loss_sum;
    u32 correct, samples;
    float grad_norm, loss_scale;
    u32 finite, pad;
    u64 stamps[4];
};

// The step's result into the next slot of a ring in host memory. One thread.
extern "C" __global__ void record(Result* ring, u32* counter, u32 slots, const Totals* totals, const Scaler* scaler,
                                  const u64* stamps) {
    enter();
    u32 count = *counter;
    volatile Result* r = ring + count % slots;
    r->loss_sum = (float)totals->loss_sum;
    r->correct = (u32)totals->correct;
    r->samples = (u32)totals->samples;
    r->grad_norm = scaler->norm;
    r->loss_scale = 1.0f / scaler->inverse;
    r->finite = scaler->finite;
    for (int i = 0; i < 4; i++) r->stamps[i] = stamps[i];
    *counter = count + 1;
    __threadfence_system();
    store_release_system((u32*)&r->sequence, count + 1);
}
