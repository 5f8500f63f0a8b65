//! Chooses whether a rank's GPU or CPU cores decode JPEG files.

use super::{TrainError, Training};
use lockstep_data::loader::DataSource;
use lockstep_engine::DeviceChoice;
use lockstep_protocol::spec::Precision;
use std::ffi::OsStr;

/// The environment variable that selects the decoder: `auto`, `cpu` or `gpu`.
const DECODER_VARIABLE: &str = "LOCKSTEP_DECODER";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecoderChoice {
    /// The GPU decodes the files that it supports, and CPU cores decode the other files.
    Auto,
    Cores,
    /// As `Auto`, but the job fails if the GPU cannot decode.
    Gpu,
}

impl DecoderChoice {
    /// Parses the value of the environment variable.
    fn of(value: Option<&OsStr>) -> Result<Self, String> {
        match value.map(OsStr::to_string_lossy).as_deref() {
            None | Some("" | "auto") => Ok(Self::Auto),
            Some("cpu") => Ok(Self::Cores),
            Some("gpu") => Ok(Self::Gpu),
            Some(other) => Err(format!("{DECODER_VARIABLE} is {other:?}; give auto, cpu or gpu")),
        }
    }

    /// Checks whether the GPU's decoder should be opened.
    ///
    /// # Errors
    /// The decoder should not be opened. `Some` contains the reason to log.
    fn check_job(self, on_gpu: bool, decodes_jpeg: bool, deterministic: bool) -> Result<(), Option<String>> {
        match self {
            Self::Gpu if !on_gpu && decodes_jpeg => Err(Some("this rank has no GPU".into())),
            _ if !on_gpu || !decodes_jpeg => Err(None),
            Self::Cores => Err(Some(format!("{DECODER_VARIABLE} is cpu"))),
            Self::Auto if deterministic => {
                Err(Some("train.deterministic requires the same bits on every machine".into()))
            }
            Self::Auto | Self::Gpu => Ok(()),
        }
    }
}

/// Makes this rank's GPU decode JPEG files if it can. Returns a line for the log.
pub(super) fn choose_decoder(
    training: &Training<'_>,
    precision: Precision,
    data: &mut DataSource,
) -> Result<Option<String>, TrainError> {
    let choice =
        DecoderChoice::of(std::env::var_os(DECODER_VARIABLE).as_deref()).map_err(TrainError::Impossible)?;
    let DeviceChoice { backend, ordinal } = training.device;
    let checked =
        choice.check_job(backend.needs().decodes, data.decodes_jpeg(), training.spec.train.deterministic);
    let opened = checked.and_then(|()| backend.decoder(ordinal, precision).map_err(Some));
    Ok(match opened {
        Ok(decoder) => {
            let line = format!("JPEG files are decoded by the GPU ({})", decoder.name());
            data.set_decoder(decoder);
            Some(line)
        }
        Err(Some(why)) if choice == DecoderChoice::Gpu => {
            return Err(TrainError::Impossible(format!("{DECODER_VARIABLE} is gpu: {why}")));
        }
        Err(why) => why.map(|why| format!("JPEG files are decoded on CPU cores: {why}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_rank_decodes_jpeg_by_default() {
        let choice = |value: &str| DecoderChoice::of(Some(OsStr::new(value)));
        assert_eq!(DecoderChoice::of(None), Ok(DecoderChoice::Auto));
        assert_eq!(choice(""), Ok(DecoderChoice::Auto));
        assert_eq!((choice("cpu"), choice("gpu")), (Ok(DecoderChoice::Cores), Ok(DecoderChoice::Gpu)));
        assert!(choice("shared").unwrap_err().contains("auto, cpu or gpu"));
        // Whether the rank has a GPU, the dataset has JPEG files, and the job is deterministic.
        for (choice, (on_gpu, decodes_jpeg, deterministic), expected) in [
            (DecoderChoice::Auto, (true, true, false), Ok(())),
            (DecoderChoice::Gpu, (true, true, true), Ok(())),
            (DecoderChoice::Auto, (false, true, false), Err(None)),
            (DecoderChoice::Gpu, (false, true, false), Err(Some("this rank has no GPU".into()))),
            (DecoderChoice::Gpu, (true, false, false), Err(None)),
        ] {
            let checked = choice.check_job(on_gpu, decodes_jpeg, deterministic);
            assert_eq!(checked, expected, "{choice:?} {on_gpu} {decodes_jpeg} {deterministic}");
        }
        for (choice, deterministic, word) in [
            (DecoderChoice::Auto, true, "train.deterministic"),
            (DecoderChoice::Cores, false, DECODER_VARIABLE),
        ] {
            let (on_gpu, decodes_jpeg) = (true, true);
            let why = choice.check_job(on_gpu, decodes_jpeg, deterministic).unwrap_err().unwrap();
            assert!(why.contains(word), "{why}");
        }
    }
}
