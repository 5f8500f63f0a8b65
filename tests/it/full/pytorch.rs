//! The Python package's networks for PyTorch.

use crate::server::Finished;
use std::process::Command;

#[test]
fn the_cifar_family_for_pytorch_has_our_names_and_logits() {
    // Debian's Python, for which Debian packages PyTorch. Another Python may come first on the PATH.
    let mut command = Command::new("/usr/bin/python3");
    command.arg("tests/pytorch/cifar_family.py").current_dir(env!("CARGO_MANIFEST_DIR"));
    let finished = Finished::of(&mut command);
    assert_eq!(finished.ok().lines().count(), 5, "{}", finished.stdout);
}
