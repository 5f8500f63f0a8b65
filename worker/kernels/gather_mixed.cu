// mixup and cutmix: each picture of a batch is mixed with its predecessor, the first with a picture that the control block
// names. Both pictures are cropped, flipped, scaled and normalised separately, as in gather.cu, then mixed with the host's
// arithmetic (data/loader/mixing.rs), so that the inputs of GPUs and CPUs are equal.

// Share of the batch's picture in pixel (y, x): 0 or 1 with cutmix, lambda with mixup. The picture that is mixed in has the rest.
__device__ __forceinline__ float share_of(const Control* control, u32 y, u32 x) {
    const u32 *rows = control->cut_rows, *columns = control->cut_columns;
    if (rows[0] == rows[1]) return control->lambda; // mixup, or cutmix of an empty rectangle with lambda = 1
    return y >= rows[0] && y < rows[1] && x >= columns[0] && x < columns[1] ? 0.0f : 1.0f;
}

// Rounds after each operation, as the host does: no fused multiply-add.
__device__ __forceinline__ float mix(float own, float other, float share) {
    return __fadd_rn(__fmul_rn(own, share), __fmul_rn(other, 1.0f - share));
}
__device__ __forceinline__ Color mix(const Color& own, const Color& other, float share) {
    return {mix(own.a, other.a, share), mix(own.b, other.b, share), mix(own.c, other.c, share)};
}

// The picture that is mixed into picture `n` of the batch.
__device__ __forceinline__ CropWindow other_of(const Source& s, const Control* control, u32 batch, u32 n) {
    if (n == 0) return CropWindow(s, control->previous_index, control->previous_params);
    return CropWindow(s, control, batch, n - 1);
}

// gather() for mixed pictures.
extern "C" __global__ void __launch_bounds__(256)
    gather_mixed(SOURCE_PARAMETERS, const Control* control, u32 batch, const float* table, T* to, u32 padded,
                 u32 folded) {
    pdl_wait();
    SHARED(float, table_smem, 768);
    Source s = SOURCE_;
    u32 n = blockIdx.y, pixels = side * side;
    load_table(table, channels, table_smem);
    __syncthreads();
    bool real = n < control->valid;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        u32 y = i / side, x = i % side;
        u64 at = output_pixel(n, y, x, side, folded);
        if (!real) {
            put_zeros(to, at, padded);
            continue;
        }
        Color own = color_of(CropWindow(s, control, batch, n).pixel(s, y, x), channels, table_smem);
        Color other = color_of(other_of(s, control, batch, n).pixel(s, y, x), channels, table_smem);
        put_color(to, at, padded, mix(own, other, share_of(control, y, x)));
    }
}

// Scales one pixel of a vertically scaled row horizontally.
__device__ __forceinline__ u32 scaled_pixel(const u32* row, const int* weights, u32 shift) {
    int half = 1 << (shift - 1), sum[3] = {half, half, half};
    for (int k = 0; k < weights[1]; k++) add_weighted(row[weights[0] + k], weights[2 + k], sum);
    return to_bytes(sum, shift);
}

// gather_scaled() for mixed pictures. Dynamic shared memory: the source rows of one picture, then both pictures' bands.
extern "C" __global__ void __launch_bounds__(256)
    gather_scaled_mixed(SOURCE_PARAMETERS, const Control* control, u32 batch, const float* table, T* to, u32 padded,
                        u32 folded, const int* row_table, u32 row_taps, u32 row_shift, const int* column_table,
                        u32 column_taps, u32 column_shift, u32 band, u32 source_rows) {
    pdl_wait();
    SHARED(float, table_smem, 768);
    DYNAMIC_SHARED(smem);
    u32* source = (u32*)smem;
    u32* bands = source + source_rows * width;
    Source s = SOURCE_;
    Taps rows = {row_table, row_taps, row_shift}, columns = {column_table, column_taps, column_shift};
    u32 n = blockIdx.y, t = threadIdx.x, threads = blockDim.x, first = blockIdx.x * band, end = min(first + band, side);
    if (n >= control->valid) {
        for (u32 i = first * side + t; i < end * side; i += threads)
            put_zeros(to, output_pixel(n, i / side, i % side, side, folded), padded);
        return;
    }
    load_table(table, channels, table_smem);
    scale_vertically(s, CropWindow(s, control, batch, n), rows, first, end, source, bands);
    scale_vertically(s, other_of(s, control, batch, n), rows, first, end, source, bands + band * width);
    for (u32 i = t; i < (end - first) * side; i += threads) {
        u32 y = i / side, x = i % side;
        const u32 *own = bands + y * width, *other = own + band * width;
        const int* w = columns.at(x);
        put_color(to, output_pixel(n, first + y, x, side, folded), padded,
                  mix(color_of(scaled_pixel(own, w, columns.shift), channels, table_smem),
                      color_of(scaled_pixel(other, w, columns.shift), channels, table_smem),
                      share_of(control, first + y, x)));
    }
}
