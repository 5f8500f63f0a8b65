// Makes inputs of one size from decoded JPEG planes: converts the crop's pixels to RGB, rotates them upright, crops, resizes
// with the host scaler's fixed-point arithmetic (as in gather.cu: vertical pass first, each pass rounded to a byte) and
// mirrors.

struct Cropping {
    Planes planes;
    int column, row;             // position in the planes of the upright pixel (0, 0), from which the tables count
    int column_right, row_right; // step in the planes from a pixel to its right neighbour in the upright picture
    int column_down, row_down;   // step in the planes from a pixel to its lower neighbour in the upright picture
    u32 first_column, column_count; // columns of the upright picture that an output needs
    u32 row_table, row_taps, row_shift; // `Taps` of the output's rows; row_table: offset of the table in `tables`
    u32 column_table, column_taps, column_shift; // `Taps` of the output's columns
    u32 flip;   // 1: mirror the output's columns
    u32 output; // index of the output
};

// Outputs are u8 [pictures, height, width, 3]. A block computes `rows_per_block` rows (blockIdx.x) of one picture (blockIdx.y).
// Dynamic shared memory: the vertically scaled rows, rows_per_block x column_count x 3 bytes.
extern "C" __global__ void __launch_bounds__(256)
    crop(const Cropping* croppings, const int* tables, u8* outputs, u32 width, u32 height, u32 rows_per_block) {
    pdl_wait();
    DYNAMIC_SHARED(smem);
    Cropping p = croppings[blockIdx.y];
    Taps rows = {tables + p.row_table, p.row_taps, p.row_shift}, columns = {tables + p.column_table, p.column_taps, p.column_shift};
    u32 first = blockIdx.x * rows_per_block, end = min(first + rows_per_block, height);
    u32 scaled_row_bytes = p.column_count * 3, row_bytes = width * 3;
    for (u32 i = threadIdx.x; i < (end - first) * p.column_count; i += blockDim.x) {
        u32 y = i / p.column_count;
        const int* w = rows.at(first + y);
        int right = p.first_column + i - y * p.column_count, down = w[0];
        int from_column = p.column + right * p.column_right + down * p.column_down;
        int from_row = p.row + right * p.row_right + down * p.row_down;
        int half = 1 << (rows.shift - 1), sum[3] = {half, half, half};
        for (int k = 0; k < w[1]; k++) {
            add_weighted(p.planes.pixel(from_column, from_row), w[2 + k], sum);
            from_column += p.column_down;
            from_row += p.row_down;
        }
        u32 bytes = to_bytes(sum, rows.shift);
        for (u32 c = 0; c < 3; c++) smem[i * 3 + c] = (u8)(bytes >> 8 * c);
    }
    __syncthreads();
    u8* to = outputs + ((u64)p.output * height + first) * row_bytes;
    for (u32 i = threadIdx.x; i < (end - first) * row_bytes; i += blockDim.x) {
        u32 y = i / row_bytes, value = i - y * row_bytes, x = value / 3;
        const int* w = columns.at(x);
        const u8* from = smem + y * scaled_row_bytes + (w[0] - p.first_column) * 3 + value % 3;
        int sum = 1 << (columns.shift - 1);
        for (int k = 0; k < w[1]; k++) sum += from[k * 3] * w[2 + k];
        u32 at = p.flip ? width - 1 - x : x;
        to[y * row_bytes + at * 3 + value % 3] = (u8)min(sum >> columns.shift, 255);
    }
}
