//! The pictures that are part of the program: a subset of Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), as IDX files.

use lockstep_server::Bundled;
use rust_embed::RustEmbed;
use std::borrow::Cow;

#[derive(RustEmbed)]
#[folder = "assets/fashion-mnist/"]
struct FashionMnist;

/// The dataset of `lockstep demo`, which every server offers.
pub(super) const PICTURES: Bundled = Bundled { name: "fashion-mnist", files };

fn files() -> Vec<(String, Cow<'static, [u8]>)> {
    let file = |name: Cow<'static, str>| Some((name.to_string(), FashionMnist::get(&name)?.data));
    FashionMnist::iter().filter_map(file).collect()
}
