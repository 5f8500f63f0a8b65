// PTX instructions: half-precision conversions, memory accesses at system scope, cp.async, wgmma, clusters. All
// other kernel code is CUDA C++ without headers, because the CUDA toolkit's headers may be absent on the machine
// where NVRTC compiles the kernels.

// The values of DTYPE, the activations' floating-point format.
#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if __CUDA_ARCH__ >= 900
#define HOPPER 1
#else
#define HOPPER 0
#endif

#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
// A loop over the numbers below `count` that this thread gets if the threads of the whole grid take them in turn.
#define FOR_ITEMS(i, count) \
    for (u64 end = (count), step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step)

// First statement of every kernel. Under a programmatic dependent launch, waits for the preceding kernels to end.
// No kernel executes griddepcontrol.launch_dependents. With it, a step of ResNet-50 took 1.4 % (32 pictures of 224 pixels) and
// 1.8 % (256 pictures) longer, and 1.5 % less with 32 pictures of 32 pixels (two H200s, n = 2).
__device__ __forceinline__ void pdl_wait() {
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_low(u32 pair) {
    float v;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(pair));
    return v;
}
__device__ __forceinline__ float half_high(u32 pair) {
    float v;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(pair));
    return v;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// max(a, b), or NaN if either argument is NaN, so that divergence is not hidden.
__device__ __forceinline__ float max_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

__device__ __forceinline__ float shfl_xor(float v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
__device__ __forceinline__ u32 shfl_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
__device__ __forceinline__ double shfl_xor(double v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// ld.global.cg: reads values that other blocks wrote, past this multiprocessor's L1 cache.
__device__ __forceinline__ float4 ldcg(const float4* p) { return __ldcg(p); }
__device__ __forceinline__ double ldcg(const double* p) { return __ldcg(p); }
__device__ __forceinline__ u32 ldcg(const u32* p) { return __ldcg(p); }

// Accesses at system scope: no other GPU and no host thread sees a torn value.
__device__ __forceinline__ void st_relaxed_sys(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ u64 ld_relaxed_sys(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 ld_relaxed_sys(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void st_release_sys(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The GPU's clock in nanoseconds.
__device__ __forceinline__ u64 globaltimer() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

// Starts an asynchronous copy of 16 bytes from global to shared memory; writes zeros if not `real`.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool real) {
    u32 at = (u32)__cvta_generic_to_shared(to), bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's committed groups of copies but the newest `PENDING`.
template <int PENDING> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Warpgroup matrix multiplication (wgmma, sm_90a only); see "Shared Memory Matrix Layout" in the PTX manual. An operand
// in shared memory consists of tiles of 64 x 64 values, each aligned to 1024 bytes, with rows of 128 bytes. Row r stores
// its 16-byte chunk i at position i ^ r % 8 (128-byte swizzling). An operand is K-major if its rows run along the summed
// dimension, else MN-major.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1
#if DTYPE == BFLOAT16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
// Descriptor of the operand at `at`. Adding n / 8 to a descriptor advances it by n values.
__device__ __forceinline__ u64 wgmma_descriptor(const void* at) {
    u64 address = (u32)__cvta_generic_to_shared(at) & 0x3ffff;
    // In units of 16 bytes: address, leading dimension (ignored with swizzling), stride of 8 rows. Then the mode: 128-byte swizzling.
    return address >> 4 | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// Makes this thread's stores to shared memory visible to later wgmma instructions. Call this function before the block's barrier.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed wgmma groups but the newest `PENDING`.
template <int PENDING> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Starts d (64 x 16) = a (64 x 16, K-major) b (16 x 16, K-major), plus the old d if `add`.
__device__ __forceinline__ void wgmma_m64n16k16(float (&d)[8], u64 a, u64 b, u32 add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0; "
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "l"(a), "l"(b), "r"(add));
}
// Starts d (64 x 64) = a (64 x 16) b (16 x 64), plus the old d if `add`. A and B: 0 K-major, 1 MN-major.
#define WGMMA_M64N64K16(NAME, A, B)                                                                            \
    __device__ __forceinline__ void NAME(float (&d)[32], u64 a, u64 b, u32 add) {                              \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "                                                  \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {"              \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "       \
                     "%32, %33, p, 1, 1, " #A ", " #B ";}"                                                     \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
                       "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
                       "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
                       "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])            \
                     : "l"(a), "l"(b), "r"(add));                                                              \
    }
WGMMA_M64N64K16(wgmma_m64n64k16_k_k, 0, 0)
WGMMA_M64N64K16(wgmma_m64n64k16_k_mn, 0, 1)
WGMMA_M64N64K16(wgmma_m64n64k16_mn_mn, 1, 1)
#endif

// Thread block clusters, whose blocks access each other's shared memory. Before sm_90 a kernel is launched without
// clusters, and each block counts as a cluster of one.
__device__ __forceinline__ u32 cluster_size() {
#if HOPPER
    u32 v;
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(v));
    return v;
#else
    return 1;
#endif
}
__device__ __forceinline__ u32 cluster_rank() {
#if HOPPER
    u32 v;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(v));
    return v;
#else
    return 0;
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if HOPPER
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if HOPPER
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Stores v at the address of `at` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ void st_shared_cluster(float* at, u32 rank, float v) {
#if HOPPER
    u32 here = (u32)__cvta_generic_to_shared(at), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
#else
    *at = v;
#endif
}
