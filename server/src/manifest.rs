//! What a checkpoint's `MANIFEST.json` says of its files, and whether they are those.

use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::Path,
};

/// The file's name.
pub(crate) const MANIFEST: &str = "MANIFEST.json";

/// The part of a manifest that a copy is checked against.
#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    #[serde(default)]
    pub(crate) epoch: u32,
    #[serde(default)]
    pub(crate) step: u64,
    #[serde(default)]
    pub(crate) files: BTreeMap<String, Written>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Written {
    pub(crate) size_bytes: u64,
    /// Hexadecimal.
    pub(crate) sha256: String,
}

/// The hexadecimal SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(Sha256::digest(bytes).as_slice())
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Whether the files of a checkpoint are those that its manifest names.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] says which one is not.
pub(crate) fn check_whole(folder: &Path) -> io::Result<()> {
    let damaged = |detail: String| io::Error::new(io::ErrorKind::InvalidData, detail);
    let text = fs::read(folder.join(MANIFEST))
        .map_err(|e| damaged(format!("its MANIFEST.json cannot be read ({e})")))?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|e| damaged(format!("its MANIFEST.json cannot be read ({e})")))?;
    for (name, wanted) in &manifest.files {
        let mut file = match fs::File::open(folder.join(name)) {
            Ok(file) if Path::new(name).file_name() == Some(name.as_ref()) => file,
            _ => return Err(damaged(format!("its {name} is missing"))),
        };
        let (mut hash, mut size, mut block) = (Sha256::new(), 0, vec![0; 1 << 18]);
        loop {
            let n = file.read(&mut block)?;
            if n == 0 {
                break;
            }
            hash.update(&block[..n]);
            size += n as u64;
        }
        if size != wanted.size_bytes {
            return Err(damaged(format!(
                "its {name} has {size} bytes and was written with {}",
                wanted.size_bytes
            )));
        }
        if hexadecimal(hash.finalize().as_slice()) != wanted.sha256 {
            return Err(damaged(format!("the bytes of its {name} are not those that were written")));
        }
    }
    Ok(())
}
