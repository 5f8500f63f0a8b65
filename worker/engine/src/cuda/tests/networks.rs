//! Networks for tests.

use super::*;

/// Small networks that together contain every operation and every fusion.
pub(in crate::cuda) fn operations() -> Vec<Arc<Network>> {
    let mut all = Vec::new();
    let stems = [("stem 3x3", 3, 1, false, 16), ("stem 7x7 and max pooling", 7, 2, true, 64)];
    for (name, kernel, stride, pooled, width) in stems {
        for block in ["basic", "projected", "bottleneck", "bottlenecks", "grouped", "grouped bottlenecks"] {
            all.push((format!("{name} {block}"), kernel, stride, pooled, width, block));
        }
    }
    // Several widths, on which fusion depends.
    for width in [64, 128, 256] {
        all.push((format!("stem 3x3 bottlenecks of {width}"), 3, 2, false, width, "bottlenecks"));
    }
    let network = |(name, kernel, stride, pooled, width, block): (String, _, _, _, _, &str)| {
        let mut net = Network::new(&name, 32, 3, 10);
        let mut x = net.conv("conv1", net.input(), width, kernel, stride);
        x = net.batch_norm("bn1", x);
        x = net.relu(x);
        if pooled {
            x = net.max_pool(x, 3, 2);
        }
        // Kernel, stride, channels and groups: 4 channels per group at stride 1, as in ResNeXt's first stage, 8 at stride 2.
        let widening: &[_] = &[(1, 1, width, 1), (3, 1, width, 1), (1, 1, 4 * width, 1)];
        let grouped: &[_] = &[(1, 1, 2 * width, 1), (3, 1, 2 * width, width / 2), (1, 1, 4 * width, 1)];
        let blocks: &[&[(usize, usize, usize, usize)]] = match block {
            "basic" => &[&[(3, 1, width, 1), (3, 1, width, 1)]],
            "projected" => &[&[(3, 2, 2 * width, 1), (3, 1, 2 * width, 1)]],
            "bottleneck" => &[&[(1, 1, width, 1), (3, 2, width, 1), (1, 1, 4 * width, 1)]],
            "bottlenecks" => &[widening, widening, widening],
            "grouped" => &[&[(1, 1, 2 * width, 1), (3, 2, 2 * width, width / 4), (1, 1, 4 * width, 1)]],
            "grouped bottlenecks" => &[grouped, grouped, grouped],
            _ => &[],
        };
        for (b, convolutions) in blocks.iter().enumerate() {
            let (mut branch, mut shortcut) = (x, x);
            for (i, &(kernel, stride, channels, groups)) in convolutions.iter().enumerate() {
                branch = net.padded_conv(
                    format!("{b}.conv{i}"),
                    branch,
                    channels,
                    (kernel, stride, kernel / 2),
                    groups,
                );
                branch = net.batch_norm(format!("{b}.bn{i}"), branch);
                if i + 1 < convolutions.len() {
                    branch = net.relu(branch);
                }
            }
            if block != "basic" && b == 0 {
                let stride = if block.ends_with("bottlenecks") { 1 } else { 2 };
                shortcut = net.conv("down.0", x, convolutions.last().map_or(0, |c| c.2), 1, stride);
                shortcut = net.batch_norm("down.1", shortcut);
            }
            let sum = net.add(branch, shortcut);
            x = net.relu(sum);
        }
        x = net.global_average_pool(x);
        net.linear("fc", x, 10);
        Arc::new(net)
    };
    all.into_iter().map(network).collect()
}
