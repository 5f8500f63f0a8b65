// From decoded pictures to inputs of one size: each is turned upright, cropped, resized in the fixed-point arithmetic of
// the host's scaler (as in gather.cu: vertical pass first, each pass rounded to a byte) and mirrored.

struct Cropping {
    const u8* pixels;      // RGB: the first column and row that the tables count from, upright
    int along_row;         // bytes from a pixel to the one on its right
    int along_column;      // bytes from a pixel to the one below it
    u32 first, span;       // columns that some output needs
    u32 rows, row_taps, row_shift; // where the table begins, in ints of `tables`
    u32 columns, column_taps, column_shift;
    u32 flip;
    u32 to;                // which of the outputs it becomes
};

// Outputs are u8 [pictures, height, width, 3]. A block makes `band` rows (blockIdx.x) of one picture (blockIdx.y). Shared
// memory: the band scaled vertically, band x span x 3 bytes.
extern "C" __global__ void __launch_bounds__(256)
    crop(const Cropping* croppings, const int* tables, u8* outputs, u32 width, u32 height, u32 band) {
    enter();
    DYNAMIC_SHARED(room);
    Cropping p = croppings[blockIdx.y];
    Taps rows = {tables + p.rows, p.row_taps, p.row_shift}, columns = {tables + p.columns, p.column_taps, p.column_shift};
    u32 first = blockIdx.x * band, end = min(first + band, height), wide = p.span * 3, row = width * 3;
    for (u32 i = threadIdx.x; i < (end - first) * wide; i += blockDim.x) {
        u32 y = i / wide, value = i - y * wide, x = value / 3;
        const int* w = rows.at(first + y);
        const u8* from = p.pixels + (long long)(p.first + x) * p.along_row + (long long)w[0] * p.along_column + value % 3;
        int sum = 1 << (rows.shift - 1);
        for (int k = 0; k < w[1]; k++) sum += from[(long long)k * p.along_column] * w[2 + k];
        room[i] = (u8)min(sum >> rows.shift, 255);
    }
    __syncthreads();
    u8* to = outputs + ((u64)p.to * height + first) * row;
    for (u32 i = threadIdx.x; i < (end - first) * row; i += blockDim.x) {
        u32 y = i / row, value = i - y * row, x = value / 3;
        const int* w = columns.at(x);
        const u8* from = room + y * wide + (w[0] - p.first) * 3 + value % 3;
        int sum = 1 << (columns.shift - 1);
        for (int k = 0; k < w[1]; k++) sum += from[k * 3] * w[2 + k];
        u32 at = p.flip ? width - 1 - x : x;
        to[y * row + at * 3 + value % 3] = (u8)min(sum >> columns.shift, 255);
    }
}
