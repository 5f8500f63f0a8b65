//! Datasets for tests: subsets of the bundled Fashion-MNIST, small enough to train on in a second or two, and
//! pseudo-random pictures.

use flate2::read::GzDecoder;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    sync::LazyLock,
};

/// The folder of the bundled pictures.
pub(crate) fn bundled_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/fashion-mnist")
}

/// Pictures of one split with their labels.
pub(crate) struct Pictures {
    /// `SIDE * SIDE` bytes per picture.
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

/// Height and width of a Fashion-MNIST picture.
pub(crate) const SIDE: usize = 28;

impl Pictures {
    /// The bundled pictures of a split: `train` or `t10k`.
    pub(crate) fn bundled(split: &str) -> &'static Self {
        static TRAIN: LazyLock<Pictures> = LazyLock::new(|| Pictures::read("train"));
        static TEST: LazyLock<Pictures> = LazyLock::new(|| Pictures::read("t10k"));
        if split == "train" { &TRAIN } else { &TEST }
    }

    fn read(split: &str) -> Self {
        let read = |kind: &str| {
            let path = bundled_folder().join(format!("{split}-{kind}-ubyte.gz"));
            let mut bytes = Vec::new();
            let file = File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            GzDecoder::new(file).read_to_end(&mut bytes).expect("gzip");
            bytes
        };
        Self { pixels: read("images-idx3")[16..].to_vec(), labels: read("labels-idx1")[8..].to_vec() }
    }

    pub(crate) fn pixels_of(&self, index: usize) -> &[u8] {
        &self.pixels[index * SIDE * SIDE..(index + 1) * SIDE * SIDE]
    }

    pub(crate) fn label_of(&self, index: usize) -> u8 {
        self.labels[index]
    }

    /// Writes the first `count` pictures as IDX files of a split.
    fn write_idx(&self, folder: &Path, split: &str, count: usize) {
        assert!(count <= self.labels.len(), "{split} has {} pictures only", self.labels.len());
        let word = |n: usize| (n as u32).to_be_bytes();
        let mut images = vec![0, 0, 8, 3];
        images.extend([count, SIDE, SIDE].into_iter().flat_map(word));
        images.extend(&self.pixels[..count * SIDE * SIDE]);
        let mut labels = vec![0, 0, 8, 1];
        labels.extend(word(count));
        labels.extend(&self.labels[..count]);
        fs::write(folder.join(format!("{split}-images-idx3-ubyte")), images).expect("images");
        fs::write(folder.join(format!("{split}-labels-idx1-ubyte")), labels).expect("labels");
    }
}

/// Writes an IDX dataset with these numbers of training and test pictures, and returns its folder.
pub(crate) fn idx_dataset(folder: &Path, train: usize, test: usize) -> PathBuf {
    let path = folder.join(format!("fashion-{train}-{test}"));
    fs::create_dir_all(&path).expect("a folder");
    Pictures::bundled("train").write_idx(&path, "train", train);
    Pictures::bundled("t10k").write_idx(&path, "t10k", test);
    path
}

/// Writes an image folder with the splits `train` and `val`, two classes, and `per_class` PNG files of
/// each class in each split, and returns its path.
pub(crate) fn image_folder(folder: &Path, per_class: usize) -> PathBuf {
    let root = folder.join("folder");
    let pictures = Pictures::bundled("train");
    for (class, label) in [("boot", 9), ("trouser", 1)] {
        let mut of_class = (0..).filter(|i| pictures.label_of(*i) == label);
        for split in ["train", "val"] {
            let to = root.join(split).join(class);
            fs::create_dir_all(&to).expect("a folder");
            for index in of_class.by_ref().take(per_class) {
                let side = SIDE as u32;
                let picture = image::GrayImage::from_raw(side, side, pictures.pixels_of(index).to_vec());
                picture.expect("28 x 28").save(to.join(format!("{index}.png"))).expect("a PNG file");
            }
        }
    }
    root
}

/// A picture of an image folder's class boot, which is not among its training pictures.
pub(crate) fn boot(image_folder: &Path) -> PathBuf {
    let boots = fs::read_dir(image_folder.join("val/boot")).expect("a folder");
    boots.flatten().next().expect("a picture").path()
}

/// Writes a folder in the binary CIFAR-10 format, with this number of pseudo-random pictures in each file.
pub(crate) fn write_cifar10(folder: &Path, pictures_per_file: usize) {
    fs::create_dir_all(folder).expect("a folder");
    let names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
    fs::write(folder.join("batches.meta.txt"), names.join("\n") + "\n").expect("names");
    let files = (1..=5).map(|number| format!("data_batch_{number}.bin")).chain(["test_batch.bin".into()]);
    for (file, name) in files.enumerate() {
        let record = |i: usize| {
            let pixels = (0..3072).map(move |p| ((p * 31 + i * 17 + file) % 251) as u8);
            std::iter::once((i % 10) as u8).chain(pixels)
        };
        let records: Vec<u8> = (0..pictures_per_file).flat_map(record).collect();
        fs::write(folder.join(name), records).expect("a file");
    }
}
