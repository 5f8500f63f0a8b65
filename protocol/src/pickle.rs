//! Files of `torch.save`: pickles, which can run code and are never read. This module recognises their names and
//! explains how to convert them to safetensors.

/// Usual endings of the names of pickles.
const ENDINGS: [&str; 6] = [".pt", ".pth", ".pth.tar", ".ckpt", ".pkl", ".pickle"];

/// Whether a file's name has one of the usual endings of pickles.
pub fn has_pickle_extension(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    ENDINGS.iter().any(|ending| path.ends_with(ending))
}

/// Advice about a pickle, to be appended to the file's name. If a shell would change the name, the command has the
/// placeholder `FILE.pth`.
pub fn conversion_advice(path: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=@:,".contains(c);
    let lower = path.to_ascii_lowercase();
    let ending = ENDINGS.iter().filter(|ending| lower.ends_with(*ending)).map(|ending| ending.len()).max();
    let stem = &path[..path.len() - ending.unwrap_or(0)];
    let (from, to) = if path.chars().all(is_plain) {
        (path.to_owned(), format!("{stem}.safetensors"))
    } else {
        ("FILE.pth".into(), "FILE.safetensors".into())
    };
    format!(
        "is a PyTorch pickle. Loading a pickle can run code, so Lockstep does not read it. Convert it to safetensors: python3 -c \"import \
         sys, torch; from safetensors.torch import save_file; save_file(torch.load(sys.argv[1], map_location='cpu', \
         weights_only=True), sys.argv[2])\" {from} {to}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pickles_are_recognised_by_extension_and_get_advice() {
        for name in ["resnet18.pth", "/a b/last.PT", "model_best.pth.tar", "x.ckpt", "weights.pkl"] {
            assert!(has_pickle_extension(name), "{name}");
        }
        for name in ["resnet18.safetensors", "pt", "job-1-40", "/data/x.pt/model.safetensors"] {
            assert!(!has_pickle_extension(name), "{name}");
        }
        assert!(
            conversion_advice("w/best.pth.tar").ends_with("sys.argv[2])\" w/best.pth.tar w/best.safetensors")
        );
        assert!(conversion_advice("weights").ends_with(" weights weights.safetensors"));
        assert!(conversion_advice("my $(weights).pth").ends_with(" FILE.pth FILE.safetensors"));
    }
}
