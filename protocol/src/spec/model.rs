//! `[model]`: the network.

use super::named::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Networks NAME whose weights `model.pretrained` accepts by name, after `lockstep weights get NAME`. The repository
/// `timm/NAME.a1_in1k` has the weights. They were trained on ImageNet-1k by timm's recipe A1 (Wightman et al. 2021).
pub const KNOWN_WEIGHTS: [&str; 5] = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"];

/// The network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSpec {
    /// Name of the network: torchvision's (`resnet18` to `wide_resnet101_2`), or the name in the CIFAR family of He et al. 2015
    /// (`resnet20` to `resnet110`), whose networks are for pictures of about 32 x 32 pixels. `cifarnet` is a small network for short runs
    /// on pictures of 32 x 32 pixels; the filters of its first convolution are computed from training pictures and not trained.
    pub arch: Arch,
    /// The first layers. `imagenet`: a 7x7 convolution of stride 2 and max pooling. `cifar`: a 3x3 convolution of
    /// stride 1. `auto`: `cifar` for the CIFAR family and for inputs of less than 96 x 96 pixels, otherwise `imagenet`.
    pub stem: Stem,
    /// Start each residual block as the identity: gamma of its last batch norm is 0 (Goyal et al. 2017).
    pub zero_init_residual: bool,
    /// Path of a safetensors file with torchvision's tensor names (timm has the same), a checkpoint's id, a version of a registered model
    /// (`models:/shoes@champion`), or the name of weights that `lockstep weights get` has downloaded on the machine that trains, such as
    /// `resnet18`. All tensor names may share a prefix, such as `module.`. The last layer (`fc`) is initialised randomly if the file has
    /// no `fc` of the same shape. For grey pictures, a first convolution for RGB is summed over its input channels. The log lists the
    /// tensors that were left out or changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pretrained: Option<String>,
    /// Keep batch norms as they are in the `pretrained` file, like torchvision's `FrozenBatchNorm2d`: training normalises with the
    /// running statistics, and changes neither these statistics nor the batch norms' weights and biases. For fine-tuning with small
    /// batches.
    pub freeze_norm: bool,
}

/// The smallest image size, in pixels of a side, for which `auto` chooses the stem `imagenet`.
const IMAGENET_STEM_FROM: usize = 96;

impl ModelSpec {
    /// The stem for pictures of `image_size` x `image_size` pixels; never [`Stem::Auto`].
    pub fn stem_for(&self, image_size: usize) -> Stem {
        match self.stem {
            Stem::Auto if self.arch.is_cifar_family() || image_size < IMAGENET_STEM_FROM => Stem::Cifar,
            Stem::Auto => Stem::Imagenet,
            given => given,
        }
    }
}

words! {
    /// Networks known by name. `resnet18` to `wide_resnet101_2` are torchvision's: ResNets (He et al. 2015), ResNeXts (Xie et
    /// al. 2017) and wide ResNets (Zagoruyko and Komodakis 2016). `resnet20` to `resnet110` are the CIFAR family of He et al.
    /// 2015, section 4.2. `cifarnet` is the network of Jordan 2024 (arXiv 2404.00498).
    #[derive(ToSchema)]
    pub enum Arch: "network" {
        ResNet18 = "resnet18",
        ResNet34 = "resnet34",
        ResNet50 = "resnet50",
        ResNet101 = "resnet101",
        ResNet152 = "resnet152",
        ResNeXt50_32x4d = "resnext50_32x4d",
        ResNeXt101_32x8d = "resnext101_32x8d",
        ResNeXt101_64x4d = "resnext101_64x4d",
        WideResNet50_2 = "wide_resnet50_2",
        WideResNet101_2 = "wide_resnet101_2",
        ResNet20 = "resnet20",
        ResNet32 = "resnet32",
        ResNet44 = "resnet44",
        ResNet56 = "resnet56",
        ResNet110 = "resnet110",
        CifarNet = "cifarnet",
    }
}

impl Arch {
    /// Whether the network belongs to the CIFAR family (three stages of 16, 32 and 64 channels).
    pub fn is_cifar_family(self) -> bool {
        matches!(self, Arch::ResNet20 | Arch::ResNet32 | Arch::ResNet44 | Arch::ResNet56 | Arch::ResNet110)
    }
}

words! {
    /// The first layers of the network.
    #[derive(ToSchema)]
    pub enum Stem: "stem" {
        /// `cifar` for the CIFAR family and for pictures of less than 96 x 96 pixels, otherwise `imagenet`.
        Auto = "auto",
        /// 7x7 convolution of stride 2, then 3x3 max pooling of stride 2.
        Imagenet = "imagenet",
        /// 3x3 convolution of stride 1, no pooling.
        Cifar = "cifar",
    }
}

impl Default for ModelSpec {
    fn default() -> Self {
        Self {
            arch: Arch::ResNet50,
            stem: Stem::Auto,
            zero_init_residual: false,
            pretrained: None,
            freeze_norm: false,
        }
    }
}
