//! The public datasets that `lockstep dataset get` downloads, with their URLs and checksums.

/// A dataset and its files.
#[derive(Debug, Clone)]
pub(super) struct KnownDataset {
    /// The dataset's name in job files.
    pub(super) name: &'static str,
    /// The URL to which a file's name is appended.
    pub(super) base: &'static str,
    pub(super) files: &'static [RemoteFile],
    /// Names of the classes, if the files do not contain them.
    pub(super) classes: &'static [&'static str],
}

/// A file to download.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteFile {
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    /// Checksum of the file, in hexadecimal.
    pub(crate) sha256: &'static str,
    /// Names of the files to unpack from a gzipped tar archive, without folders. If empty, the file itself is kept.
    pub(crate) members: &'static [&'static str],
}

const fn plain_file(name: &'static str, bytes: u64, sha256: &'static str) -> RemoteFile {
    RemoteFile { name, bytes, sha256, members: &[] }
}

/// The known datasets, with their publishers' URLs. The publishers give MD5 checksums; these are SHA-256 checksums of the same files.
pub(super) const KNOWN: [KnownDataset; 3] = [
    KnownDataset {
        name: "cifar10",
        base: "https://www.cs.toronto.edu/~kriz/",
        files: &[RemoteFile {
            name: "cifar-10-binary.tar.gz",
            bytes: 170_052_171,
            sha256: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            members: &[
                "batches.meta.txt",
                "data_batch_1.bin",
                "data_batch_2.bin",
                "data_batch_3.bin",
                "data_batch_4.bin",
                "data_batch_5.bin",
                "test_batch.bin",
            ],
        }],
        classes: &[],
    },
    KnownDataset {
        name: "cifar100",
        base: "https://www.cs.toronto.edu/~kriz/",
        files: &[RemoteFile {
            name: "cifar-100-binary.tar.gz",
            bytes: 168_513_733,
            sha256: "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            members: &["coarse_label_names.txt", "fine_label_names.txt", "train.bin", "test.bin"],
        }],
        classes: &[],
    },
    KnownDataset {
        name: "fashion-mnist",
        base: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files: &[
            plain_file(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            plain_file(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            plain_file(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            plain_file(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ],
        classes: &FASHION_CLASSES,
    },
];

/// Names of Fashion-MNIST's classes in the order of labels, from the publisher's page.
const FASHION_CLASSES: [&str; 10] = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
];

impl KnownDataset {
    /// Returns the names of the dataset's files after archives are unpacked.
    pub(super) fn unpacked_file_names(&self) -> impl Iterator<Item = &'static str> {
        self.files.iter().flat_map(|file| {
            let names: &[&str] =
                if file.members.is_empty() { std::slice::from_ref(&file.name) } else { file.members };
            names.iter().copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_can_be_checked() {
        for known in KNOWN {
            assert!(known.base.ends_with('/'), "{}", known.name);
            for file in known.files {
                let is_sum = file.sha256.len() == 64
                    && file.sha256.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c));
                assert!(is_sum && file.bytes > 0, "{file:?}");
                assert_eq!(file.name.ends_with(".tar.gz"), !file.members.is_empty(), "{file:?}");
            }
        }
    }
}
