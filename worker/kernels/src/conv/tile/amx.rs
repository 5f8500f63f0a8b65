//! Tiles for AMX, the matrix unit of Intel's Xeons since 2023. A tile register has up to 16 rows of 64 bytes. `tdpbf16ps` adds the
//! product of a tile of 16 x 16 units (rows are pictures or input channels) and a tile of 16 units x 16 lanes to a tile of float32.
//!
//! Sums stay in tile registers between `asm!` blocks: the blocks are volatile, so they stay in order, and the compiler never uses tile
//! registers.
//!
//! The products of first values and of second values are summed separately, so the last bits differ from those of `vdpbf16ps`.

use super::{
    super::vector::{Avx512, Vector},
    Outer, Product,
    kernels::{BlockSums, add_to_weights},
};
use std::{
    arch::{asm, x86_64::__cpuid_count},
    cell::Cell,
    sync::LazyLock,
};

/// Bytes of a row of a full tile register, and of a row of packed pictures.
const ROW_BYTES: usize = 64;

/// Whether this machine has AMX for bfloat16, and the kernel lets this process use it.
pub(super) fn is_available() -> bool {
    static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        is_x86_feature_detected!("avx512bf16")
            && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES
            && request_tile_data()
    });
    *IS_AVAILABLE
}

/// Asks the kernel for the memory in which it saves tile registers, for all threads of this process. Returns false if the kernel is
/// older than AMX.
fn request_tile_data() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the system call only changes which registers this process may use.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Sets the sizes of the tile registers of this thread: 0 to 3 are sums, `rows` x `lanes`. 4 and 5 are the factors, `rows` x 16 and
/// 16 x `lanes` units; 6 and 7 are the same with `tail` units instead of 16.
fn configure(rows: usize, lanes: usize, tail: usize) {
    thread_local! {
        /// The sizes that this thread has set. No other code uses tile registers.
        static CURRENT: Cell<[usize; 3]> = const { Cell::new([0; 3]) };
    }
    if CURRENT.replace([rows, lanes, tail]) == [rows, lanes, tail] {
        return;
    }
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let sums = [(rows, lanes); 4];
    let factors = [(rows, 16), (16, lanes), (rows, tail), (tail, lanes)];
    for (register, (rows, units)) in sums.into_iter().chain(factors).enumerate() {
        // A register without rows or columns cannot be used.
        if rows > 0 && units > 0 {
            (config.rows[register], config.row_bytes[register]) = (rows as u8, 4 * units as u16);
        }
    }
    // SAFETY: the instruction reads the 64 bytes of `config`. Tiles are only run where AMX is available.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) }
}

/// Sets all sums to zero. The registers must be configured.
#[inline(always)]
unsafe fn clear_sums() {
    asm!(
        "tilezero tmm0",
        "tilezero tmm1",
        "tilezero tmm2",
        "tilezero tmm3",
        options(nostack, nomem, preserves_flags)
    );
}

/// Adds the products of rows at `$x` with those at `$w` of `$blocks` blocks to the sums, in the registers `$a` and `$b`.
macro_rules! multiply_add {
    ($blocks:ident, $a:literal, $b:literal, $x:expr, $w:expr, $w_row_bytes:expr, $w_block:expr) => {
        asm!(concat!("tileloadd ", $a, ", [{x} + {row}*1]"), x = in(reg) $x, row = in(reg) ROW_BYTES,
             options(nostack, readonly, preserves_flags));
        multiply_add!("tmm0", $a, $b, $w, $w_row_bytes);
        if $blocks > 1 {
            multiply_add!("tmm1", $a, $b, $w.add($w_block), $w_row_bytes);
        }
        if $blocks > 2 {
            multiply_add!("tmm2", $a, $b, $w.add(2 * $w_block), $w_row_bytes);
            multiply_add!("tmm3", $a, $b, $w.add(3 * $w_block), $w_row_bytes);
        }
    };
    ($sum:literal, $a:literal, $b:literal, $w:expr, $w_row_bytes:expr) => {
        asm!(concat!("tileloadd ", $b, ", [{w} + {row}*1]"), concat!("tdpbf16ps ", $sum, ", ", $a, ", ", $b),
             w = in(reg) $w, row = in(reg) $w_row_bytes, options(nostack, readonly, preserves_flags))
    };
}

/// Stores the sums of block `$block` as rows at `$to`.
macro_rules! store {
    ($block:expr, $to:expr, $row_bytes:expr) => {
        match $block {
            0 => store!(register "tmm0", $to, $row_bytes),
            1 => store!(register "tmm1", $to, $row_bytes),
            2 => store!(register "tmm2", $to, $row_bytes),
            _ => store!(register "tmm3", $to, $row_bytes),
        }
    };
    (register $sum:literal, $to:expr, $row_bytes:expr) => {
        asm!(concat!("tilestored [{to} + {row}*1], ", $sum), to = in(reg) $to, row = in(reg) $row_bytes,
             options(nostack, preserves_flags))
    };
}

/// Computes `V` blocks of output channels.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn product<const V: usize>(t: &Product<'_>) {
    let (lanes, tail) = (t.lanes, t.units % 16);
    configure(t.pictures, lanes, tail);
    for picture in 0..t.pictures {
        for block in 0..V {
            Avx512::prefetch(t.y.add(picture * t.y_picture + block * 16));
        }
    }
    clear_sums();
    for tap in t.taps {
        let mut x = t.x.add(tap.position as usize * t.units_per_position * t.pictures);
        let mut w = t.w.add(tap.offset as usize * t.units * lanes);
        for _ in 0..t.units / 16 {
            multiply_add!(V, "tmm4", "tmm5", x, w, lanes * 4, t.w_block);
            x = x.add(t.pictures * 16);
            w = w.add(16 * lanes);
        }
        if tail > 0 {
            multiply_add!(V, "tmm6", "tmm7", x, w, lanes * 4, t.w_block);
        }
    }
    for block in 0..V {
        let y = t.y.add(block * 16);
        store!(block, y, t.y_picture * 4);
        if !t.sums.is_null() {
            let to = t.sums.add(block * 48);
            let mut sums = BlockSums::begin(to, t.starts_sums, Avx512::load_first(y, lanes));
            for picture in 0..t.pictures {
                sums.add(Avx512::load_first(y.add(picture * t.y_picture), lanes));
            }
            sums.store(to);
        }
    }
}

/// Computes 16 input channels and `V` blocks of output channels.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn outer<const V: usize>(t: &Outer<'_>) {
    /// 16 rows of 16 units.
    #[repr(align(64))]
    struct Square([f32; 256]);
    configure(16, 16, 0);
    let mut channels_first = Square([0.0; 256]);
    clear_sums();
    for run in t.runs {
        let mut x = t.x.add(run.x as usize * 16);
        let mut dy = t.dy.add(run.dy as usize * 16);
        for _ in 0..run.len / 16 {
            Avx512::transpose(&*x.cast(), &mut channels_first.0);
            multiply_add!(V, "tmm4", "tmm5", channels_first.0.as_ptr(), dy, ROW_BYTES, t.dy_block);
            (x, dy) = (x.add(256), dy.add(256));
        }
        let units = run.len as usize % 16 * 16;
        if units > 0 {
            // Copies the last pixels, with zeros after them.
            let (mut last_x, mut last_dy) = (Square([0.0; 256]), [const { Square([0.0; 256]) }; V]);
            last_x.0.as_mut_ptr().copy_from_nonoverlapping(x, units);
            for (block, last_dy) in last_dy.iter_mut().enumerate() {
                last_dy.0.as_mut_ptr().copy_from_nonoverlapping(dy.add(block * t.dy_block), units);
            }
            Avx512::transpose(&last_x.0, &mut channels_first.0);
            let last_dy = last_dy.as_ptr().cast::<f32>();
            multiply_add!(V, "tmm4", "tmm5", channels_first.0.as_ptr(), last_dy, ROW_BYTES, 256);
        }
    }
    for block in 0..V {
        let mut sums = Square([0.0; 256]);
        store!(block, sums.0.as_mut_ptr(), ROW_BYTES);
        for channel in 0..t.channels {
            add_to_weights(t, block, channel, Avx512::load(sums.0.as_ptr().add(channel * 16)));
        }
    }
}
