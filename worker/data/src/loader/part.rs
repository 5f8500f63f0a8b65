//! The pictures used for training or for validation, and how a picture is opened.

use super::replaced::Broken;
use crate::{
    DataError,
    listing::Listing,
    picture::{Decoder, PictureRef, Resize},
};
use std::sync::Arc;

/// Pictures of one size in memory, or files that are decoded to one size.
#[derive(Debug)]
pub(super) enum Pixels {
    Memory(Arc<Vec<u8>>),
    Files {
        files: Listing,
        /// The side to which the centred square of each picture is scaled. `None` if all files already have the size.
        square: Option<u32>,
    },
}

/// A split as opened for a run, without the files that were found to be broken at its start.
#[derive(Debug)]
pub(super) struct OpenSplit {
    pub(super) pixels: Pixels,
    /// The files that were decoded into memory, if pictures were.
    pub(super) decoded_files: Option<Listing>,
    pub(super) labels: Vec<u32>,
    /// Height, width and channels of a picture in memory, or of the square made from a file.
    pub(super) size: [usize; 3],
}

/// The pictures used for one purpose: training or validation.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) split: Arc<OpenSplit>,
    /// The positions of the part's pictures in the split, in ascending order.
    pub(super) chosen: Vec<u32>,
    /// Whether the transform receives the whole picture of each file, whatever its size.
    pub(super) needs_whole: bool,
    /// Pictures that can no longer be read.
    pub(super) broken: Broken,
}

/// A thread's buffers for opening pictures.
#[derive(Debug, Default)]
pub(super) struct Opener {
    decoder: Decoder,
    resize: Resize,
    square: Vec<u8>,
}

impl Part {
    /// Adds the contents, labels and names of the part's pictures to `hash`, in the order of their positions.
    pub(super) fn add_to(&self, hash: &mut crc32fast::Hasher) {
        match (&self.split.pixels, &self.split.decoded_files) {
            // Another machine's decoder may produce slightly different pixels.
            (_, Some(files)) => {
                let mut digest = crc32fast::Hasher::new();
                (0..files.len()).for_each(|index| files.add_to(&mut digest, index));
                hash.update(&digest.finalize().to_le_bytes());
            }
            (Pixels::Memory(bytes), None) => hash.update(bytes),
            // `Listing::add_to` below adds the content of each file.
            (Pixels::Files { .. }, None) => {}
        }
        for position in &self.chosen {
            hash.update(&self.split.labels[*position as usize].to_le_bytes());
            if let Some(files) = self.files() {
                files.add_to(hash, *position as usize);
            }
        }
    }

    /// The picture at `position` of the split, before the transform.
    pub(super) fn picture<'a>(
        &'a self,
        position: usize,
        opener: &'a mut Opener,
    ) -> Result<PictureRef<'a>, DataError> {
        let size: usize = self.split.size.iter().product();
        let [height, width, channels] = self.split.size.map(|length| length as u32);
        match &self.split.pixels {
            Pixels::Memory(bytes) => {
                Ok(PictureRef { width, height, channels, pixels: &bytes[position * size..][..size] })
            }
            Pixels::Files { files, .. } => self.decode(position, &files.read(position)?, opener),
        }
    }

    /// As [`Part::picture`], from the `bytes` of its file or shard member.
    pub(super) fn decode<'a>(
        &self,
        position: usize,
        bytes: &[u8],
        opener: &'a mut Opener,
    ) -> Result<PictureRef<'a>, DataError> {
        let broken = |detail: String| match self.files() {
            Some(files) => files.broken(position, detail),
            None => DataError::Invalid(detail),
        };
        let decoded = opener.decoder.decode(bytes).map_err(broken)?;
        let size = self.split.size.iter().product();
        let square = self.square().filter(|_| !self.needs_whole);
        match square.and_then(|side| Some((side, decoded.centre_square(side)?))) {
            Some((side, area)) => {
                opener.square.resize(size, 0);
                opener.resize.run(decoded, area, (side, side), &mut opener.square);
                let (channels, pixels) = (decoded.channels, &opener.square[..]);
                Ok(PictureRef { width: side, height: side, channels, pixels })
            }
            None if self.needs_whole || decoded.pixels.len() == size => Ok(decoded),
            None => Err(broken("has changed its size since the job began".into())),
        }
    }

    /// The files that are read in each step. `None` if the pictures are in memory.
    pub(super) fn files(&self) -> Option<&Listing> {
        match &self.split.pixels {
            Pixels::Files { files, .. } => Some(files),
            Pixels::Memory(_) => None,
        }
    }

    /// The side of the square made from each file.
    pub(super) fn square(&self) -> Option<u32> {
        match &self.split.pixels {
            Pixels::Files { square, .. } => *square,
            Pixels::Memory(_) => None,
        }
    }
}
