// Start and end of a step. Inputs are read from a ring in page-locked host memory, and results are written to another ring, so
// the host only has to launch the replayed graph.

// Copies the running statistics as the newest finished step left them, because the forward pass will change them. Called by all
// blocks except the first. Each block stores in `kept_steps` the number of finished steps at the time of its copy. If this number is
// unchanged (the previous step was refused), `kept` is up to date, and the block copies nothing.
__device__ __forceinline__ void copy_running(const float4* running, float4* kept, u32* kept_steps, const u32* finished, u32 length) {
    u32 block = blockIdx.x - 1, step = *finished;
    bool is_kept = kept_steps[block] == step;
    __syncthreads(); // every thread has read kept_steps
    if (is_kept) return;
    for (u32 i = block * blockDim.x + threadIdx.x; i < length; i += (gridDim.x - 1) * blockDim.x) kept[i] = running[i];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) kept_steps[block] = step; // the host reads `kept` only after it has read this number
}

// The first block copies the ring's next slot of `words` u32 (a multiple of 4) to the control block. It stores in `taken`, in
// page-locked host memory, the number of slots read so far, which the host may overwrite. At the start of a step, the other blocks
// copy `length` float4 of running statistics.
extern "C" __global__ void __launch_bounds__(1024)
    fetch(uint4* control, const uint4* ring, u32* counter, volatile u32* taken, u32 slots, u32 words,
          const float4* running, float4* kept, u32* kept_steps, const u32* finished, u32 length) {
    pdl_wait();
    if (blockIdx.x > 0) {
        copy_running(running, kept, kept_steps, finished, length);
        return;
    }
    u32 count = *counter;
    const volatile u64* from = (const volatile u64*)(ring + (u64)(count % slots) * (words / 4));
    u64* to = (u64*)control;
    for (u32 i = threadIdx.x; i < words / 2; i += blockDim.x) to[i] = from[i];
    __syncthreads(); // every thread has stored its words, so its loads from the ring have completed
    if (threadIdx.x == 0) *taken = *counter = count + 1;
}

// Stores the GPU's clock, in nanoseconds, in *at. Sets *updating, unless it is null, to show the host that an update begins. Later
// kernels of the update read Scaler::held, the host's request to stop updates. One thread.
extern "C" __global__ void stamp(u64* at, u32* updating) {
    pdl_wait();
    *at = globaltimer();
    if (updating) *updating = 1;
}

struct Result {
    u32 sequence; // written last: the step's number, from 1
    float loss_sum;
    u32 correct, samples;
    float grad_norm, loss_scale;
    u32 finite, pad;
    u64 stamps[4];
};

// Writes the step's result to the next slot of a ring in host memory, unless the step's update was refused. One thread.
extern "C" __global__ void record(Result* ring, u32* counter, u32 slots, const Totals* totals, Scaler* scaler,
                                  const u64* stamps) {
    pdl_wait();
    if (scaler->refused) return;
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
    st_release_sys((u32*)&r->sequence, count + 1);
    scaler->updating = 0; // the host reads weights and counter only after it has read this value
}
