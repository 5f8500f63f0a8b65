//! Checks that a scan has data for the whole picture, by following its Huffman codes (ITU-T T.81, annex F).
//! `zune-jpeg` and `jpeg-decoder` fill in missing data and report nothing, so they cannot be used. The check needs a
//! third of the time of decoding.

use super::Frame;

/// Maximum length in bits of codes that are looked up in one step.
const LOOKUP_BITS: u32 = 10;
/// The [`Code::step`] of "end of block": more than the number of coefficients in a block.
const END: u32 = 128;

/// A Huffman code and the value that follows it.
#[derive(Clone, Copy, Default)]
struct Code {
    /// Number of bits of the code and the value together.
    bits: u8,
    /// Number of coefficients that the code and the value describe.
    step: u8,
}

struct Table {
    /// Indexed by the next [`LOOKUP_BITS`] bits. `bits` is 0 if the code is longer.
    short: Vec<Code>,
    /// Longer codes in ascending order, each with the end of its range: the next code, left-aligned in 16 bits.
    long: Vec<(u32, Code)>,
}

impl Table {
    /// `spec` contains the number of codes of each length, then their symbols. `None` if the table is invalid: too many
    /// codes, or too few symbols.
    fn new(spec: &[u8], is_dc: bool) -> Option<Self> {
        let (counts, symbols) = spec.split_at_checked(16)?;
        let mut symbols = symbols.iter();
        let mut table = Self { short: vec![Code::default(); 1 << LOOKUP_BITS], long: Vec::new() };
        // The next code, left-aligned in 16 bits.
        let mut next_code = 0;
        for (length, count) in (1..).zip(counts) {
            for _ in 0..*count {
                let symbol = *symbols.next()?;
                let (run, size) = (symbol >> 4, symbol & 15);
                let step = match (run, size) {
                    // The same limit as in libjpeg.
                    _ if is_dc && symbol > 15 => return None,
                    (0..15, 0) => END as u8,
                    _ => run + 1,
                };
                let (code, first) = (Code { bits: length as u8 + size, step }, next_code);
                next_code += 1 << (16 - length);
                if next_code > 1 << 16 {
                    return None;
                }
                if length <= LOOKUP_BITS {
                    let index = |left_aligned: u32| (left_aligned >> (16 - LOOKUP_BITS)) as usize;
                    table.short[index(first)..index(next_code)].fill(code);
                } else {
                    table.long.push((next_code, code));
                }
            }
        }
        Some(table)
    }

    /// The code at the beginning of `bits`.
    fn code(&self, bits: u64) -> Option<Code> {
        let code = self.short[(bits >> (64 - LOOKUP_BITS)) as usize];
        if code.bits > 0 {
            return Some(code);
        }
        let first = (bits >> 48) as u32;
        let index = self.long.partition_point(|(end, _)| *end <= first);
        self.long.get(index).map(|(_, code)| *code)
    }
}

/// The data of a scan, read bit by bit.
struct Bits<'a> {
    data: &'a [u8],
    at: usize,
    /// The next bits, beginning with the most significant bit.
    next: u64,
    /// The number of valid bits in `next`.
    count: u32,
    /// The number of zero bits that were added after the end of the data.
    padding_bits: u32,
}

impl<'a> Bits<'a> {
    fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, next: 0, count: 0, padding_bits: 0 }
    }

    /// Ensures that there are at least 32 bits.
    fn fill(&mut self) {
        if self.count >= 32 {
            return;
        }
        if let Some(eight) = self.data.get(self.at..).and_then(<[u8]>::first_chunk) {
            let word = u64::from_be_bytes(*eight);
            // Whether a byte is 0xff: the usual search for a zero byte in a word, here in the complement.
            let has_marker = (!word).wrapping_sub(0x0101_0101_0101_0101) & word & 0x8080_8080_8080_8080 != 0;
            if !has_marker {
                let bytes = (64 - self.count) / 8;
                self.next |= (word & (u64::MAX << (64 - 8 * bytes))) >> self.count;
                self.at += bytes as usize;
                self.count += 8 * bytes;
                return;
            }
        }
        while self.count <= 56 {
            let byte = match self.data.get(self.at..).unwrap_or_default() {
                [0xff, 0, ..] => {
                    self.at += 2;
                    0xff
                }
                [byte, ..] if *byte != 0xff => {
                    self.at += 1;
                    *byte
                }
                // A marker, or the end of the file.
                _ => {
                    self.padding_bits += 8;
                    0
                }
            };
            self.next |= u64::from(byte) << (56 - self.count);
            self.count += 8;
        }
    }

    /// Skips a code and the value that follows it, and returns their step.
    fn skip_code(&mut self, table: &Table) -> Option<u32> {
        self.fill();
        let Code { bits, step } = table.code(self.next)?;
        self.next <<= bits;
        self.count -= u32::from(bits);
        Some(step.into())
    }

    /// Skips a block of 64 coefficients. `None` if its codes are invalid.
    fn skip_block(&mut self, dc: &Table, ac: &Table) -> Option<()> {
        self.skip_code(dc)?;
        let mut coefficient = 1;
        while coefficient < 64 {
            coefficient += self.skip_code(ac)?;
        }
        (coefficient == 64 || coefficient >= END).then_some(())
    }

    /// Whether all used bits are from the data: the added zero bits are still unused.
    fn is_within_data(&self) -> bool {
        self.padding_bits <= self.count
    }

    /// Skips the restart marker with this number, from 0. `None` if another marker comes first.
    fn skip_restart_marker(&mut self, number: usize) -> Option<()> {
        let rest = &self.data[self.at..];
        let is_marker = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff);
        let offset = rest.windows(2).position(is_marker)?;
        if usize::from(rest[offset + 1]) != 0xd0 + number % 8 {
            return None;
        }
        *self = Self { at: self.at + offset + 2, ..Self::new(self.data) };
        Some(())
    }
}

/// The DC and the AC table of each block in an MCU. `None` if a table is missing.
pub(super) fn blocks<'a>(frame: &Frame<'a>) -> Option<Vec<[&'a [u8]; 2]>> {
    let mut blocks = Vec::new();
    for channel in frame.scan.chunks_exact(2) {
        let described = frame.channels.chunks_exact(3).find(|described| described[0] == channel[0])?;
        let (dc, ac) = (usize::from(channel[1] >> 4), usize::from(channel[1] & 15));
        let tables = [*frame.tables[..4].get(dc)?, *frame.tables[4..].get(ac)?];
        let [Some(dc), Some(ac)] = tables else { return None };
        // If the scan has a single channel, its MCUs have one block.
        let count = if frame.scan.len() == 2 { 1 } else { (described[1] >> 4) * (described[1] & 15) };
        blocks.extend((0..count).map(|_| [dc, ac]));
    }
    Some(blocks)
}

/// Whether the data of a frame's first scan contains a code for each block. The scan must contain all channels.
/// `blocks` is the result of [`blocks`] for this frame.
pub(super) fn is_whole(bytes: &[u8], frame: &Frame<'_>, blocks: &[[&[u8]; 2]]) -> bool {
    let follow = || {
        let mut tables = Vec::new();
        let mut table_index = |spec, is_dc| {
            let known = tables.iter().position(|(known, _)| *known == (spec, is_dc));
            known.or_else(|| {
                tables.push(((spec, is_dc), Table::new(spec, is_dc)?));
                Some(tables.len() - 1)
            })
        };
        let table_indices = |[dc, ac]: &[_; 2]| Some([table_index(*dc, true)?, table_index(*ac, false)?]);
        let blocks = blocks.iter().map(table_indices).collect::<Option<Vec<_>>>()?;
        let side = |length: u32, factors: &mut dyn Iterator<Item = u8>| {
            let factor = if blocks.len() == 1 { 1 } else { factors.max().unwrap_or(1).max(1) };
            length.div_ceil(8 * u32::from(factor)) as usize
        };
        let across = side(frame.width, &mut frame.sampling().map(|sampling| sampling >> 4));
        let down = side(frame.height, &mut frame.sampling().map(|sampling| sampling & 15));
        let mut bits = Bits::new(bytes.get(frame.data_offset..)?);
        for mcu in 0..across * down {
            if frame.restart_interval > 0 && mcu > 0 && mcu % frame.restart_interval == 0 {
                bits.skip_restart_marker(mcu / frame.restart_interval - 1)?;
            }
            for [dc, ac] in &blocks {
                bits.skip_block(&tables[*dc].1, &tables[*ac].1)?;
            }
            if !bits.is_within_data() {
                return None;
            }
        }
        Some(())
    };
    follow().is_some()
}
