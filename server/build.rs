//! Embedded migrations, static files and documentation are read at compile time: build again when one changes.
fn main() {
    println!("cargo:rerun-if-changed=../migrations");
    println!("cargo:rerun-if-changed=../static");
    println!("cargo:rerun-if-changed=../docs");
}
