//! Exchange of parts of activations between the ranks of a group.

use super::groups::Group;
use crate::net::Placement;
use lockstep_comm::CommError;
use lockstep_kernels::sums;
use std::ops::Range;

/// A box of an NHWC activation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) pictures: Range<usize>,
    pub(super) pixels: Range<usize>,
    pub(super) channels: Range<usize>,
}

impl Region {
    pub(super) fn len(&self) -> usize {
        self.pictures.len() * self.pixels.len() * self.channels.len()
    }

    fn intersection(&self, other: &Self) -> Self {
        let intersect = |a: &Range<usize>, b: &Range<usize>| {
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        };
        Self {
            pictures: intersect(&self.pictures, &other.pictures),
            pixels: intersect(&self.pixels, &other.pixels),
            channels: intersect(&self.channels, &other.channels),
        }
    }

    /// Calls `visit` with the range, in this box's values, of each contiguous run of values of `inner`, a box inside this one.
    fn for_each_run(&self, inner: &Self, mut visit: impl FnMut(Range<usize>)) {
        if inner.len() == 0 {
            return;
        }
        let width = self.channels.len();
        let first_channel = inner.channels.start - self.channels.start;
        for picture in inner.pictures.clone() {
            let first_pixel = (picture - self.pictures.start) * self.pixels.len();
            let index = |pixel: usize| (first_pixel + pixel - self.pixels.start) * width + first_channel;
            if inner.channels.len() == width {
                visit(index(inner.pixels.start)..index(inner.pixels.end));
                continue;
            }
            inner.pixels.clone().map(index).for_each(|start| visit(start..start + inner.channels.len()));
        }
    }
}

/// Rank `r` of `group` has the region `from[r]` and gets the region `to[r]`. A value that several ranks have is summed over these
/// ranks. `x` has the values of this rank's `from` region; `y` receives the values of its `to` region.
///
/// In each round every rank exchanges with at most one other rank, so there are no chains of waiting ranks.
pub(super) fn exchange(
    group: &Group,
    (from, to): (&[Region], &[Region]),
    x: &[f32],
    y: &mut [f32],
) -> Result<(), CommError> {
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    y.fill(0.0);
    let mut buffer = Vec::new();
    for round in 0..size {
        let peer = (round + size - rank) % size;
        let (outgoing, incoming) = (from[rank].intersection(&to[peer]), from[peer].intersection(&to[rank]));
        let send = |buffer: &mut Vec<f32>| {
            buffer.clear();
            from[rank].for_each_run(&outgoing, |range| buffer.extend_from_slice(&x[range]));
            if peer == rank { Ok(()) } else { group.send((&*buffer).into(), peer as u32) }
        };
        if rank <= peer {
            send(&mut buffer)?;
        }
        let mut received = vec![0.0; if peer == rank { 0 } else { incoming.len() }];
        group.recv((&mut received).into(), peer as u32)?;
        if rank > peer {
            send(&mut buffer)?;
        }
        let mut values = if peer == rank { &buffer[..] } else { &received[..] };
        to[rank].for_each_run(&incoming, |range| {
            let (run, rest) = values.split_at(range.len());
            sums::add(&mut y[range], run);
            values = rest;
        });
    }
    Ok(())
}

/// The pictures of a micro-batch on the ranks of a model group.
#[derive(Debug, Clone, Default)]
pub(super) struct Pictures {
    /// By rank: index of the rank's first picture among the group's pictures. The last element is the number of all pictures.
    pub(super) bounds: Vec<usize>,
    pub(super) rank: usize,
}

impl Pictures {
    pub(super) fn of_one_rank(pictures: usize) -> Self {
        Self { bounds: vec![0, pictures], rank: 0 }
    }

    pub(super) fn of_group(counts: impl IntoIterator<Item = usize>, rank: usize) -> Self {
        let mut bounds = vec![0];
        bounds.extend(counts.into_iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        }));
        Self { bounds, rank }
    }

    /// The range of this rank's pictures among the group's pictures.
    pub(super) fn own_range(&self) -> Range<usize> {
        self.bounds[self.rank]..self.bounds[self.rank + 1]
    }

    pub(super) fn total(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Number of pictures that this rank has of an activation with this placement.
    pub(super) fn count(&self, placement: &Placement) -> usize {
        if *placement == Placement::Batch { self.own_range().len() } else { self.total() }
    }

    /// Each rank's region of an activation of `pixels` pixels and `channels` channels.
    fn regions(&self, placement: &Placement, pixels: usize, channels: usize) -> Vec<Region> {
        let of_rank = |rank: usize| {
            let mut region = Region { pictures: 0..self.total(), pixels: 0..pixels, channels: 0..channels };
            match placement {
                Placement::Batch => region.pictures = self.bounds[rank]..self.bounds[rank + 1],
                Placement::Channels(bounds) => region.channels = bounds[rank]..bounds[rank + 1],
                Placement::Whole | Placement::Partial => {}
            }
            region
        };
        (0..self.bounds.len() - 1).map(of_rank).collect()
    }

    /// Redistributes the activation `x` over `group`, from any placement but [`Placement::Whole`] to any placement but
    /// [`Placement::Partial`]. `channels` is the number of channels of the whole activation.
    pub(super) fn redistribute(
        &self,
        group: &Group,
        (from, to): (&Placement, &Placement),
        (pixels, channels): (usize, usize),
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), CommError> {
        let [sources, targets] = [from, to].map(|placement| self.regions(placement, pixels, channels));
        match (from, to) {
            (Placement::Partial, Placement::Whole) => {
                y.copy_from_slice(x);
                if y.is_empty() { Ok(()) } else { group.all_reduce(y.into()) }
            }
            _ => exchange(group, (&sources, &targets), x, y),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Rows;
    use lockstep_comm::rendezvous::loopback::on_connected_ranks;
    use lockstep_kernels::synthetic::values;
    use std::time::Duration;

    const RANKS: usize = 3;

    /// Runs `work` on three ranks and returns their results.
    fn on_ranks<T: Send>(work: impl Fn(Group) -> T + Sync) -> Vec<T> {
        let timeout = Duration::from_secs(60);
        on_connected_ranks(RANKS as u32, timeout, |_, ring| work(Group::of_all_ranks(ring)))
    }

    fn product(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    /// The backward pass is the transpose of the forward pass A if the sums over ranks of <A x, g> and of <x, A^T g> are equal.
    fn assert_transposed(case: &str, [forward, backward]: [f64; 2]) {
        assert!((forward - backward).abs() < 1e-5 * forward.abs().max(1.0), "{case}: {forward} {backward}");
    }

    /// One rank has no picture.
    #[test]
    fn the_backward_pass_of_each_redistribution_is_its_transpose() {
        let (pixels, channels) = (4, 7);
        let split = |bounds: [usize; 4]| Placement::Channels(bounds.to_vec());
        let (uneven, other) = (split([0, 3, 5, 7]), split([0, 1, 2, 7]));
        let sources = [Placement::Batch, Placement::Partial, uneven.clone(), other.clone()];
        let targets = [Placement::Batch, Placement::Whole, uneven, other];
        let products = on_ranks(|group| {
            let rank = group.rank() as usize;
            let pictures = Pictures::of_group([3, 0, 2], rank);
            let len = |placement: &Placement| pictures.regions(placement, pixels, channels)[rank].len();
            let mut products = Vec::new();
            for from in &sources {
                for to in &targets {
                    let x = values(&format!("redistribute.x.{rank}"), len(from));
                    let gradient = values(&format!("redistribute.g.{rank}"), len(to));
                    let (mut y, mut dx) = (vec![0.0; len(to)], vec![0.0; len(from)]);
                    let shape = (pixels, channels);
                    pictures.redistribute(&group, (from, to), shape, &x, &mut y).unwrap();
                    let back = [to, from].map(Placement::of_gradient);
                    pictures.redistribute(&group, (&back[0], &back[1]), shape, &gradient, &mut dx).unwrap();
                    products.push([product(&y, &gradient), product(&x, &dx)]);
                }
            }
            products
        });
        for case in 0..products[0].len() {
            let sums = [0, 1].map(|side| products.iter().map(|rank| rank[case][side]).sum::<f64>());
            assert_transposed(&format!("case {case}"), sums);
            assert!(sums[0] != 0.0);
        }
    }

    /// For windows of any size, stride and padding, over rows that do not divide evenly: a row arrives in its place at each rank
    /// whose windows reach it, and nowhere else. The backward pass is the transpose.
    #[test]
    fn halo_exchanges_deliver_rows_and_sum_their_gradients() {
        const ABOVE: isize = 16;
        for (kernel, stride, padding, whole) in
            [(3, 1, 1, 7), (7, 2, 3, 8), (1, 2, 0, 5), (5, 1, 2, 3), (2, 2, 0, 9), (3, 3, 1, 11)]
        {
            let rows = Rows::shared(whole, RANKS);
            let output_rows = Rows::shared((whole + 2 * padding - kernel) / stride + 1, RANKS);
            let windows = rows.reached(&output_rows, kernel, stride, padding);
            let region = |rows: &Range<isize>| Region {
                pictures: 0..2,
                pixels: (rows.start + ABOVE) as usize * 3..(rows.end + ABOVE) as usize * 3,
                channels: 0..2,
            };
            let [own, reached] =
                [&rows, &windows].map(|rows| rows.of_rank.iter().map(region).collect::<Vec<_>>());
            let products = on_ranks(|group| {
                let rank = group.rank() as usize;
                for hot in 0..whole as isize {
                    let one_hot = |rows: &Range<isize>| -> Vec<f32> {
                        let picture = rows.clone().flat_map(|row| [f32::from(u8::from(row == hot)); 6]);
                        picture.collect::<Vec<_>>().repeat(2)
                    };
                    let x = one_hot(&rows.of_rank[rank]);
                    let mut y = vec![9.0; reached[rank].len()];
                    exchange(&group, (&own, &reached), &x, &mut y).unwrap();
                    assert_eq!(y, one_hot(&windows.of_rank[rank]), "{kernel} {stride} {padding}: row {hot}");
                }
                let x = values(&format!("rows.x.{rank}"), own[rank].len());
                let gradient = values(&format!("rows.g.{rank}"), reached[rank].len());
                let (mut y, mut dx) = (vec![9.0; gradient.len()], vec![9.0; x.len()]);
                exchange(&group, (&own, &reached), &x, &mut y).unwrap();
                exchange(&group, (&reached, &own), &gradient, &mut dx).unwrap();
                [product(&y, &gradient), product(&x, &dx)]
            });
            let sums = [0, 1].map(|side| products.iter().map(|rank| rank[side]).sum::<f64>());
            assert_transposed(&format!("windows of {kernel} rows"), sums);
        }
    }
}
