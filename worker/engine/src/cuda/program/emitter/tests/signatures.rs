//! Every launch has the arguments that its kernel declares: their number and types match, and written memory is not `const`. Blocks have
//! at most as many threads as the kernel is compiled for (`__launch_bounds__`).

use super::*;
use crate::cuda::kernels::SOURCE;
use std::{collections::BTreeMap, sync::LazyLock};

/// Parameters, by kernel and index, that are only read, but are not `const`.
const READS: [(&str, usize); 2] = [("lamb", 2), ("lamb", 3)];

/// Maximum number of threads in a block of a kernel that declares no bound.
const MAX_THREADS: u32 = 1024;

/// A kernel's declaration of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Declared {
    Pointer { constant: bool },
    Number(&'static str),
}

/// What a kernel declares.
struct Signature {
    parameters: Vec<Declared>,
    /// Maximum number of threads in a block.
    threads: u32,
}

/// What each kernel declares, by its name.
static DECLARED: LazyLock<BTreeMap<String, Signature>> = LazyLock::new(declared);

/// Reads the source. Expands macros that stand for parameters, and follows macros that define kernels.
fn declared() -> BTreeMap<String, Signature> {
    let source: String = SOURCE.replace("\\\n", " ");
    let lines: Vec<&str> = source.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let defines = || lines.iter().filter_map(|line| line.trim_start().strip_prefix("#define "));
    let mut parameters: Vec<(&str, &str)> = defines()
        .filter_map(|define| define.split_once(char::is_whitespace))
        .filter(|(name, _)| name.ends_with("_PARAMETERS"))
        .collect();
    // Longer names first, since a name may be the end of another name.
    parameters.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    let mut all = BTreeMap::new();
    let mut add = |name: &str, list: &str, threads: u32| {
        let mut list = list.to_owned();
        parameters.iter().for_each(|(macro_name, text)| list = list.replace(macro_name, text));
        all.insert(
            name.to_owned(),
            Signature { parameters: list.split(',').map(parameter).collect(), threads },
        );
    };
    let plain = lines.iter().filter(|line| !line.trim_start().starts_with("#define")).copied();
    for (name, list, threads) in kernels_in(&plain.collect::<Vec<_>>().join(" ")) {
        add(&name, &list, threads);
    }
    for define in defines().filter(|define| define.contains("__global__")) {
        let macro_name = define.split('(').next().unwrap().trim();
        let (_, list, threads) = kernels_in(define).into_iter().next().unwrap();
        for line in &lines {
            let Some(inside) = line.trim().strip_prefix(macro_name).and_then(|rest| rest.strip_prefix('('))
            else {
                continue;
            };
            add(inside.split([',', ')']).next().unwrap().trim(), &list, threads);
        }
    }
    all
}

/// Name, parameters and maximum number of threads in a block of each `__global__` function in a text without line breaks.
fn kernels_in(text: &str) -> Vec<(String, String, u32)> {
    let after = text.split("__global__").skip(1);
    after
        .map(|text| {
            let mut threads = MAX_THREADS;
            // Launch bounds may contain parentheses.
            let text = match text.split_once("__launch_bounds__") {
                Some((before, rest)) if !before.contains('(') => {
                    let mut depth = 0;
                    let end = rest.find(|c| {
                        depth += i32::from(c == '(') - i32::from(c == ')');
                        c == ')' && depth == 0
                    });
                    let bound = rest[1..].split([',', ')']).next().unwrap();
                    threads = bound.trim().parse().unwrap();
                    format!("{before}{}", &rest[end.unwrap() + 1..])
                }
                _ => text.to_owned(),
            };
            let (name, rest) = text.split_once('(').unwrap();
            let name = name.split_whitespace().last().unwrap();
            (name.to_owned(), rest.split(')').next().unwrap().to_owned(), threads)
        })
        .collect()
}

fn parameter(text: &str) -> Declared {
    let text = text.trim();
    if text.contains('*') {
        return Declared::Pointer { constant: text.starts_with("const ") };
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let known = ["u32", "u64", "float", "double"].into_iter().find(|kind| *kind == words[words.len() - 2]);
    Declared::Number(known.unwrap_or_else(|| panic!("{text}")))
}

fn fits(kernel: &Kernel, index: usize, declared: Declared) -> bool {
    match (kernel.args[index], declared) {
        (Arg::In(operand), Declared::Pointer { constant }) => {
            constant || operand.is_none() || READS.contains(&(kernel.name, index))
        }
        (Arg::Out(operand) | Arg::InOut(operand), Declared::Pointer { constant }) => {
            !constant || operand.is_none()
        }
        (Arg::Unused(_), Declared::Pointer { .. })
        | (Arg::U32(_), Declared::Number("u32"))
        | (Arg::U64(_), Declared::Number("u64"))
        | (Arg::F32(_), Declared::Number("float"))
        | (Arg::F64(_), Declared::Number("double")) => true,
        _ => false,
    }
}

pub(super) fn check(kernel: &Kernel) {
    let Signature { parameters, threads } = &DECLARED[kernel.name];
    let block: u32 = kernel.geometry.block.iter().product();
    assert!(block <= *threads, "{}: {block} threads in a block, compiled for {threads}", kernel.name);
    assert_eq!(kernel.args.len(), parameters.len(), "{}", kernel.name);
    for (index, declared) in parameters.iter().enumerate() {
        assert!(fits(kernel, index, *declared), "{} {index}: {:?}", kernel.name, kernel.args[index]);
    }
}

/// Pictures of a dataset on the GPU, scaled or not, mixed or not.
#[test]
fn every_way_to_gather_pictures_is_valid() {
    let network = build(Arch::ResNet18, Stem::Imagenet, 224, 10);
    let setting = Setting::new(&network, 32, DType::F16, 90, Ranks::Single);
    let table = ops::ScaleTable::new(32, 224);
    let augmented = GatherMode::Augmented { crop_padding: 4, reflects: false };
    let mixed = GatherMode::Mixed { crop_padding: 4, reflects: true };
    for (mode, phase, scales, name) in [
        (augmented, Phase::Train(ONLY), false, "gather"),
        (mixed, Phase::Train(ONLY), false, "gather_mixed"),
        (augmented, Phase::Train(ONLY), true, "gather_scaled"),
        (mixed, Phase::Train(ONLY), true, "gather_scaled_mixed"),
        (GatherMode::Indexed, Phase::Evaluate, true, "gather_scaled"),
    ] {
        let side = if scales { 32 } else { 224 };
        let input = Input::Dataset { pictures: 0, height: side, width: side, mode };
        let facts = Facts { scaling: scales.then_some([&table, &table]), ..setting.facts() };
        let commands = emit(&facts, phase, input, StreamId::Side).unwrap().commands;
        assert_eq!(verify::verify(&commands, phase.carries_over()), Ok(()), "{name}");
        let gathers: Vec<&Kernel> = commands
            .iter()
            .filter_map(|command| match command {
                Command::Kernel { kernel, .. } if kernel.name.starts_with("gather") => Some(kernel),
                _ => None,
            })
            .collect();
        assert_eq!(gathers.iter().map(|kernel| kernel.name).collect::<Vec<_>>(), [name]);
        check(gathers[0]);
        assert!(gathers[0].geometry.shared_bytes <= 44 << 10, "{name}");
    }
}
