//! The fine-tuning of docs/training.md, with the page's three commands: a folder of many classes with few small pictures and some broken
//! files, and weights in torchvision's format.

use crate::{
    pages,
    server::{Agents, Finished, Folder, Server, training_permit},
    tensors::floats,
};
use image::{Rgb, RgbImage};
use lockstep_engine::net::{init, resnet};
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
use safetensors::{Dtype, tensor::TensorView};
use std::{fs, path::Path};

const CLASSES: usize = 131;
/// Pictures of each class.
const PICTURES: usize = 3;

/// Settings that make the job small enough for two cores.
const SIZES: &str = " --set data.image_size=32 --set model.stem=imagenet --set train.epochs=1";

fn class_name(class: usize) -> String {
    format!("flower {class:03}")
}

/// Writes a picture in the colour of its class. Sizes and shapes differ.
fn write_picture(path: &Path, class: usize, number: usize) {
    let (width, height) = (20 + 7 * number as u32, 28 - 3 * number as u32);
    let colour = |x: u32, y: u32, channel: usize| {
        ((class * [53, 101, 197][channel]) as u32 + x * (channel as u32 + 1) + y * number as u32) as u8
    };
    let picture = RgbImage::from_fn(width, height, |x, y| Rgb([0, 1, 2].map(|c| colour(x, y, c))));
    picture.save(path).expect("a JPEG file");
}

fn write_folder(folder: &Path) {
    for class in 0..CLASSES {
        let to = folder.join("train").join(class_name(class));
        fs::create_dir_all(&to).expect("a folder");
        (0..PICTURES).for_each(|number| write_picture(&to.join(format!("{number}.jpg")), class, number));
    }
    let train = folder.join("train");
    fs::write(train.join("flower 003/notes.jpg"), "which flower was this?").expect("a file");
    fs::write(train.join("flower 007/empty.jpg"), "").expect("a file");
    let intact = fs::read(train.join("flower 011/0.jpg")).expect("a picture");
    fs::write(train.join("flower 011/cut.jpg"), &intact[..intact.len() / 2]).expect("a file");
}

/// Writes a file in the format of `safetensors.torch.save_file(torchvision.models.resnet18().state_dict(), ...)`.
fn write_weights(path: &Path) {
    let model = ModelSpec { arch: Arch::ResNet18, stem: Stem::Imagenet, ..ModelSpec::default() };
    let network = resnet::build(&model, 224, 3, 1000).expect("a network");
    let tensors = init::initial_parameters(&network, false, 77);
    let mut all: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in tensors {
        if let Some(norm) = name.strip_suffix("running_mean") {
            all.push((format!("{norm}num_batches_tracked"), Dtype::I64, vec![], 9i64.to_le_bytes().to_vec()));
        }
        let bytes = tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect();
        all.push((name, Dtype::F32, tensor.shape, bytes));
    }
    let views = all.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
    });
    fs::write(path, safetensors::serialize(views, None).expect("safetensors")).expect("a file");
}

#[tokio::test]
async fn fine_tuning_takes_three_commands_from_a_folder_to_a_prediction() {
    let _permit = training_permit().await;
    let cache = Folder::new();
    let environment = vec![("LOCKSTEP_CACHE".into(), cache.path().display().to_string())];
    let server = Server::start_in(Agents::Local { cpu_slots: 2 }, environment).await;
    let here = server.folder().path();
    let folder = here.join("home/pictures/flowers");
    write_folder(&folder);
    let weights = here.join("resnet18.safetensors");
    write_weights(&weights);
    let file = pages::files("docs/training.md").into_iter().find(|(name, _)| name == "finetune.toml");
    server.folder().write("finetune.toml", file.expect("the job").1);
    fs::copy(folder.join("train/flower 042/1.jpg"), here.join("new.jpg")).expect("a picture");
    let run_line = |line: &str| {
        let mut shell = pages::shell(line);
        Finished::of(shell.current_dir(here).envs(server.client_variables()).env("HOME", here.join("home")))
    };

    run_line(&pages::line("docs/training.md", "lockstep dataset add flowers "))
        .assert_prints(&["131", "3 unusable files"]);
    server.cli(&["validate", "finetune.toml"]).ok();
    let submit = pages::line("docs/training.md", "lockstep submit finetune.toml");
    // Weights of another network, a missing file and a file without weights are refused at submission.
    for (set, words) in [
        (
            "model.arch=\"resnet34\"",
            &["model.pretrained", "does not fit a resnet34", "layer1.2.bn1.bias, ", "77 more are missing"][..],
        ),
        ("model.stem=\"cifar\"", &["model.pretrained", "conv1.weight is [64, 3, 7, 7]", "set model.stem"]),
        ("model.pretrained=\"/no/weights.safetensors\"", &["model.pretrained", "/no/weights.safetensors"]),
        ("model.pretrained=\"resnet18\"", &["model.pretrained", "run `lockstep weights get resnet18`"]),
        ("model.pretrained=\"finetune.toml\"", &["model.pretrained", "not a whole safetensors file"]),
    ] {
        run_line(&format!("{submit}{SIZES} --set '{set}'")).assert_usage_error(words);
    }
    // The agent finds downloaded weights by their name.
    fs::create_dir(cache.path().join("weights")).expect("a folder");
    fs::copy(&weights, cache.path().join("weights/resnet18.safetensors")).expect("a copy");
    let watched = run_line(&format!("{submit}{SIZES} --set 'model.pretrained=\"resnet18\"'"));
    let last = watched.ok().lines().last().expect("a last line");
    assert!(last.starts_with("succeeded after ") && last.contains(" s: validation accuracy "), "{last}");
    let response = run_line(&pages::line("docs/training.md", "lockstep predict flowers new.jpg"));
    let (_, classes) = response.ok().split_once("new.jpg: ").expect("the picture's name");
    let named = classes.trim().split(", ").map(|item| item.rsplit_once(' ').expect("a share").0.to_owned());
    let names: Vec<String> = (0..CLASSES).map(class_name).collect();
    assert_eq!(named.clone().count(), 5, "{classes}");
    for name in named {
        let class = name.rsplit_once(' ').expect("a number before the %").0;
        assert!(names.iter().any(|n| n == class), "{class:?} in {classes}");
    }

    let shown = server.cli(&["show", "flowers", "--json"]).json();
    let id = shown["id"].as_str().expect("an id");
    let train = &shown["spec"]["train"];
    assert_eq!((train["lr"].as_f64(), train["schedule"].as_str()), (Some(0.00125), Some("cosine")));
    // Broken files are named, and a fifth of the pictures is used for validation.
    let log = server.cli(&["logs", id]);
    log.assert_prints(&[
        "3 broken files are left out",
        "notes.jpg",
        "empty.jpg",
        "cut.jpg",
        "classes have no validation picture",
    ]);
    let counts =
        log.stdout.split(" pixels; ").nth(1).expect("counts").split(" validation").next().expect("counts");
    let (training, held_out) = counts.split_once(" training and ").expect("two counts");
    let (training, held_out): (u32, u32) =
        (training.parse().expect("a count"), held_out.parse().expect("a count"));
    assert!(training + held_out == (CLASSES * PICTURES) as u32 && (50..110).contains(&held_out), "{counts}");
    assert!(log.stdout.contains("[1000, 512], this job's is [131, 512]"), "{}", log.stdout);

    // Training began with these weights: one epoch at a small learning rate changes them little.
    let model = server.last_model(id).await;
    let given = fs::read(&weights).expect("the weights");
    let (given, model) = (floats(&given), floats(&model));
    let (before, after) = (&given["layer3.0.conv1.weight"], &model["layer3.0.conv1.weight"]);
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let change = norm(&mut before.iter().zip(after).map(|(a, b)| a - b)) / norm(&mut before.iter().copied());
    assert!(change > 0.0 && change < 0.2, "{change}");
    server.stop().await;
}
