// Makes the network's input from uint8 pictures: random crop and flip at the picture's own size, bilinear scaling to
// `side` with the host scaler's fixed-point arithmetic (vertical pass first, each pass rounded to a byte), then a table
// lookup from byte to normalised value. Channels are padded with zeros to `padded` (4 or 8).
//
// Folding (space-to-depth), for a 7x7 convolution with stride 2 and padding 3: 2x2 pixels of 4 channels become one pixel
// of 16 channels, with a zero border of two such pixels at the top and left, and one at the bottom and right. The
// convolution becomes a 4x4 one with stride 1 and without padding, which tensor cores compute faster.

struct Source {
    const u8* pictures; // [count, height, width, channels]
    u32 height, width, channels;
    u32 side;
    u32 crop_padding;
    // The two low bits. 0: indices and augmentation of the control block. 1: indices of the control block; only pictures whose augmentation
    // has bit 31 (views of an evaluation, see CropWindow) are shifted and flipped. 2: pictures in order, without augmentation.
    // Flag REFLECTS: pictures are mirrored at their borders instead of continued in black.
    u32 mode;
};
#define REFLECTS 4u
#define SOURCE_PARAMETERS \
    const u8 *pictures, u32 height, u32 width, u32 channels, u32 side, u32 crop_padding, u32 mode
#define SOURCE_ \
    Source { pictures, height, width, channels, side, crop_padding, mode }

// The pixels and the crop window of picture `n` of the batch.
struct CropWindow {
    const u8* pixels;
    int top, left; // of the window, in pixels from the picture's corner
    bool flip, reflects;
    __device__ __forceinline__ CropWindow(const Source& s, const Control* control, u32 batch, u32 n)
        : CropWindow(s, s.mode == 2 ? n : indices(control)[n], s.mode == 2 ? 0 : indices(control)[batch + n]) {}
    __device__ __forceinline__ CropWindow(const Source& s, u32 index, u32 params) {
        pixels = s.pictures + (u64)index * s.height * s.width * s.channels;
        // Bit 31: one of the shifted views that an evaluation averages. The picture then has a mirrored border of one pixel.
        bool is_view = params >> 31, crops = is_view || (s.mode & 3) == 0;
        int border = is_view ? 1 : (int)s.crop_padding;
        top = crops ? (int)(params & 0x7fff) - border : 0;
        left = crops ? (int)(params >> 15 & 0x7fff) - border : 0;
        flip = crops && (params >> 30 & 1);
        reflects = is_view || (s.mode & REFLECTS);
    }
    // One reflection suffices, because borders are narrower than the picture.
    __device__ __forceinline__ static int reflected(int at, int side) {
        int last = side - 1;
        return last - abs(last - abs(at));
    }
    // A pixel of the window, the first channel in the lowest byte; black outside the picture unless it is mirrored.
    __device__ __forceinline__ u32 pixel(const Source& s, int y, int x) const {
        int row = y + top, column = (flip ? (int)s.width - 1 - x : x) + left;
        if (reflects) {
            row = reflected(row, s.height);
            column = reflected(column, s.width);
        }
        if (row < 0 || row >= (int)s.height || column < 0 || column >= (int)s.width) return 0;
        const u8* p = pixels + ((u64)row * s.width + column) * s.channels;
        return s.channels == 1 ? p[0] : p[0] | p[1] << 8 | p[2] << 16;
    }
};

// Output index of pixel (y, x) of picture `n`, in pixels of `padded` channels.
__device__ __forceinline__ u64 output_pixel(u32 n, u32 y, u32 x, u32 side, u32 folded) {
    if (!folded) return ((u64)n * side + y) * side + x;
    u32 folded_side = side / 2 + 3;
    return (((u64)n * folded_side + y / 2 + 2) * folded_side + x / 2 + 2) * 4 + y % 2 * 2 + x % 2;
}
// A pixel's normalised channels; for pictures with one channel, b and c are 0.
struct Color {
    float a, b, c;
};
__device__ __forceinline__ Color color_of(u32 bytes, u32 channels, const float* table) {
    if (channels == 1) return {table[bytes & 255], 0, 0};
    return {table[bytes & 255], table[256 + (bytes >> 8 & 255)], table[512 + (bytes >> 16)]};
}
__device__ __forceinline__ void put_color(T* to, u64 pixel, u32 padded, const Color& color) {
    float a = color.a, b = color.b, c = color.c;
#if DTYPE == FLOAT32
    float4* q = (float4*)to + pixel * (padded / 4);
    q[0] = {a, b, c, 0};
    if (padded == 8) q[1] = {0, 0, 0, 0};
#else
    if (padded == 4)
        ((uint2*)to)[pixel] = {pair(a, b), pair(c, 0)};
    else
        ((uint4*)to)[pixel] = {pair(a, b), pair(c, 0), 0, 0};
#endif
}
__device__ __forceinline__ void put_zeros(T* to, u64 pixel, u32 padded) { put_color(to, pixel, padded, {0, 0, 0}); }

// Copies the normalisation table, [channels][256], to shared memory.
__device__ __forceinline__ void load_table(const float* table, u32 channels, float* table_smem) {
    for (u32 i = threadIdx.x; i < 256 * channels; i += blockDim.x) table_smem[i] = table[i];
}

// Makes inputs without scaling, from pictures of the input's size. blockIdx.y is the picture; threads loop over its pixels
// in a grid stride.
extern "C" __global__ void __launch_bounds__(256)
    gather(SOURCE_PARAMETERS, const Control* control, u32 batch, const float* table, T* to, u32 padded, u32 folded) {
    pdl_wait();
    SHARED(float, table_smem, 768);
    Source s = SOURCE_;
    u32 n = blockIdx.y, pixels = side * side;
    load_table(table, channels, table_smem);
    __syncthreads();
    bool real = !control || n < control->valid; // not padding
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        u64 at = output_pixel(n, i / side, i % side, side, folded);
        if (!real) {
            put_zeros(to, at, padded);
            continue;
        }
        CropWindow window(s, control, batch, n);
        put_color(to, at, padded, color_of(window.pixel(s, i / side, i % side), channels, table_smem));
    }
}

// Resampling weights: `side` entries of 2 + taps ints, one per output row or column. An entry has the first source row
// or column, the number of weights, and `taps` weights, padded with zeros.
struct Taps {
    const int* table;
    u32 taps;
    u32 shift; // fractional bits of the weights
    __device__ __forceinline__ const int* at(u32 i) const { return table + (u64)i * (2 + taps); }
};

__device__ __forceinline__ void add_weighted(u32 bytes, int weight, int (&sum)[3]) {
    sum[0] += (int)(bytes & 255) * weight;
    sum[1] += (int)(bytes >> 8 & 255) * weight;
    sum[2] += (int)(bytes >> 16 & 255) * weight;
}
__device__ __forceinline__ u32 to_bytes(const int (&sum)[3], u32 shift) {
    return min(sum[0] >> shift, 255) | min(sum[1] >> shift, 255) << 8 | min(sum[2] >> shift, 255) << 16;
}

// Scales output rows first..end of one picture vertically: loads source rows into `source`, stores the result in `scaled`;
// rows of both have the picture's width. All threads of the block must call this function, and may read `scaled` afterwards.
__device__ __forceinline__ void scale_vertically(const Source& s, const CropWindow& window, const Taps& rows, u32 first, u32 end,
                                                 u32* source, u32* scaled) {
    u32 t = threadIdx.x, threads = blockDim.x, width = s.width;
    u32 from = rows.at(first)[0], until = rows.at(end - 1)[0] + rows.at(end - 1)[1];
    for (u32 i = t; i < (until - from) * width; i += threads) source[i] = window.pixel(s, from + i / width, i % width);
    __syncthreads();
    for (u32 i = t; i < (end - first) * width; i += threads) {
        u32 y = i / width, x = i - y * width;
        const int* w = rows.at(first + y);
        const u32* column = source + (w[0] - from) * width + x;
        int half = 1 << (rows.shift - 1), sum[3] = {half, half, half};
        for (int k = 0; k < w[1]; k++) add_weighted(column[k * width], w[2 + k], sum);
        scaled[i] = to_bytes(sum, rows.shift);
    }
    __syncthreads();
}

// Makes inputs with scaling. A block computes `band` output rows (blockIdx.x) of one picture (blockIdx.y). Dynamic shared memory: the
// source rows of these output rows (source_rows x width pixels), then the vertically scaled band (band x width).
extern "C" __global__ void __launch_bounds__(256)
    gather_scaled(SOURCE_PARAMETERS, const Control* control, u32 batch, const float* table, T* to, u32 padded,
                  u32 folded, const int* row_table, u32 row_taps, u32 row_shift, const int* column_table, u32 column_taps,
                  u32 column_shift, u32 band, u32 source_rows) {
    pdl_wait();
    SHARED(float, table_smem, 768);
    DYNAMIC_SHARED(smem);
    u32* source = (u32*)smem;
    u32* scaled = source + source_rows * width;
    Source s = SOURCE_;
    Taps rows = {row_table, row_taps, row_shift}, columns = {column_table, column_taps, column_shift};
    u32 n = blockIdx.y, t = threadIdx.x, threads = blockDim.x, first = blockIdx.x * band, end = min(first + band, side);
    if (control && n >= control->valid) {
        for (u32 i = first * side + t; i < end * side; i += threads)
            put_zeros(to, output_pixel(n, i / side, i % side, side, folded), padded);
        return;
    }
    load_table(table, channels, table_smem);
    scale_vertically(s, CropWindow(s, control, batch, n), rows, first, end, source, scaled);
    // A thread keeps its column, and so the column's weights, for all rows of the band.
    u32 x = t % side, lane = t / side, lanes = threads / side;
    if (lanes == 0) lanes = 1;
    if (side <= threads && lane >= lanes) return;
    for (; x < side; x += threads) {
        const int* w = columns.at(x);
        int start = w[0], count = w[1], half = 1 << (columns.shift - 1);
        int w0 = w[2], w1 = columns.taps > 1 ? w[3] : 0, w2 = columns.taps > 2 ? w[4] : 0;
        for (u32 y = lane; y < end - first; y += lanes) {
            const u32* row = scaled + y * width + start;
            int sum[3] = {half, half, half};
            add_weighted(row[0], w0, sum);
            if (count > 1) add_weighted(row[1], w1, sum);
            if (count > 2) add_weighted(row[2], w2, sum);
            for (int k = 3; k < count; k++) add_weighted(row[k], w[2 + k], sum);
            put_color(to, output_pixel(n, first + y, x, side, folded), padded,
                      color_of(to_bytes(sum, columns.shift), channels, table_smem));
        }
    }
}

// Copies normalised float32 pictures from the host, [pictures, pixels, channels], into the padded input.
extern "C" __global__ void __launch_bounds__(256)
    pad_channels(const float* from, T* to, const Control* control, u32 pictures, u32 side, u32 channels, u32 padded,
                 u32 folded) {
    pdl_wait();
    u32 valid = control ? min(control->valid, pictures) : pictures;
    u32 pixels = side * side;
    u64 all = (u64)pictures * pixels, real = (u64)valid * pixels;
    FOR_ITEMS(i, all) {
        float v[3] = {};
        if (i < real)
            for (u32 c = 0; c < channels && c < 3; c++) v[c] = from[i * channels + c];
        u32 pixel = (u32)(i % pixels);
        u64 at = output_pixel((u32)(i / pixels), pixel / side, pixel % side, side, folded);
        put_color(to, at, padded, {v[0], v[1], v[2]});
    }
}

// Zeros the border of a folded input. blockIdx.y is the picture; a thread writes eight values.
extern "C" __global__ void __launch_bounds__(256) fold_border(T* to, u32 side) {
    pdl_wait();
    u32 folded_side = side / 2 + 3, groups = folded_side * folded_side * 2;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < groups; i += gridDim.x * blockDim.x) {
        u32 y = i / 2 / folded_side, x = i / 2 % folded_side;
        if (y < 2 || y == folded_side - 1 || x < 2 || x == folded_side - 1)
            store(to, (u64)blockIdx.y * groups + i, zeros());
    }
}

// Zeros gradients of a folded convolution's weights [out][4][4][16]: of the first row and column of the 8x8 window,
// which do not exist in the 7x7 window. One thread per eight values.
extern "C" __global__ void __launch_bounds__(256) fold_gradient(T* gradient, u32 groups) {
    pdl_wait();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= groups) return;
    // Eight values are the two pixels of one row of a 2x2 block: four channels each.
    u32 row = i % 2, x = i / 2 % 4, y = i / 8 % 4;
    if (y == 0 && row == 0)
        store(gradient, i, zeros());
    else if (x == 0) {
        float v[8];
        unpack(load(gradient, i), v);
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = 0;
        store(gradient, i, pack(v));
    }
}
