//! Fuzzes picture files of all formats. A decoded picture must have as many bytes as its size and channels require.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_data::Picture;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(picture) = Picture::decode(bytes) {
        let size = u64::from(picture.width) * u64::from(picture.height) * u64::from(picture.channels);
        assert_eq!(picture.pixels.len() as u64, size);
        let square = picture.centre_square(8);
        assert_eq!(square.pixels.len() as u32, 8 * 8 * square.channels);
    }
});
