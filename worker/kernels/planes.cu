// RGB from the planes of a JPEG picture, with the arithmetic of the CPU decoder (zune-jpeg). Subsampled chroma is upsampled
// with weights 3/4 and 1/4, rows first, each pass rounded to a byte; at the border the last sample is repeated. Then follows
// full-range BT.601 (JFIF) in 14-bit fixed point.

struct Planes {
    const u8 *luma, *cb, *cr;
    u32 luma_pitch, chroma_pitch; // bytes from a row to the next
    u32 chroma_width, chroma_height;
    u32 half_columns, half_rows; // 1 if two columns (rows) share a chroma sample

    // The nearest chroma sample and the one on the pixel's other side. Without subsampling, both are the pixel's own sample.
    struct Nearest {
        u32 first, second;
        __device__ __forceinline__ Nearest(u32 at, u32 halved, u32 samples) {
            first = second = at >> halved;
            if (halved) second = at & 1 ? min(first + 1, samples - 1) : first - (first > 0);
        }
    };
    static __device__ __forceinline__ int between(int first, int second) { return (3 * first + second + 2) >> 2; }

    __device__ __forceinline__ int chroma(const u8* plane, const Nearest& column, const Nearest& row) const {
        const u8 *first = plane + (u64)row.first * chroma_pitch, *second = plane + (u64)row.second * chroma_pitch;
        return between(between(first[column.first], second[column.first]),
                       between(first[column.second], second[column.second])) - 128;
    }
    static __device__ __forceinline__ u32 byte(int value) { return min(max(value >> 14, 0), 255); }

    // A pixel at coordinates of the stored picture, red in the lowest byte.
    __device__ __forceinline__ u32 pixel(u32 column, u32 row) const {
        Nearest columns(column, half_columns, chroma_width), rows(row, half_rows, chroma_height);
        int y = luma[(u64)row * luma_pitch + column] * 16384 + 8191;
        int b = chroma(cb, columns, rows), r = chroma(cr, columns, rows);
        return byte(y + 22970 * r) | byte(y - 11700 * r - 5638 * b) << 8 | byte(y + 29032 * b) << 16;
    }
};
