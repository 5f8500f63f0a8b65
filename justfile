# Shortcuts; every one is a plain command that works without `just` too.

# Serve, with a job on bundled pictures already running.
demo:
    cargo run --release -- demo

# What CI runs.
ci:
    bash .ci/run

test:
    bash tests/run

# The Rust tests whose name contains NAME.
test-one NAME:
    cargo test --workspace {{NAME}}

fmt:
    cargo fmt --all

# Writes docs/reference anew: after a change of a key, a command or a route.
reference:
    cargo run -- reference

lint:
    cargo clippy --workspace --all-targets -- -D warnings
    bash .ci/dependency-rule

# Known vulnerabilities; needs the RustSec database from the network.
advisories:
    cargo deny check advisories

# Ours against PyTorch (which must be installed) on this machine's CPU.
bench-cpu:
    cargo build --release
    python3 tests/bench/cpu_vs_torch.py
