//! Parses Slurm's lists of machines and of the tasks on each machine.

/// Returns the number of ranks on the machine with the index `machine`, from Slurm's list for all machines: `4`, or `4(x2),3` if the
/// numbers differ.
pub(super) fn tasks_of(list: &str, machine: u32) -> Option<u32> {
    let mut remaining = machine;
    for entry in list.split(',') {
        let (tasks, machines) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        if remaining < machines {
            return tasks.parse().ok();
        }
        remaining -= machines;
    }
    None
}

/// Returns the first machine of a list such as `node[007-010,12],login`: names with ranges of numbers in brackets.
pub(super) fn first_node(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (mut name, mut rest) = (list[..end].to_owned(), &list[end..]);
    // A name may have several pairs of brackets: `rack[1-2]node[1-4]`.
    while let Some(inside) = rest.strip_prefix('[') {
        let (range, after) = inside.split_once(']')?;
        let first = range.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        name.push_str(first);
        let end = after.find([',', '[']).unwrap_or(after.len());
        name.push_str(&after[..end]);
        rest = &after[end..];
    }
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_machine_of_a_list_is_found() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[1-4]", "node1"),
            ("node[007-010,12],login", "node007"),
            ("node[3,5-6]", "node3"),
            ("rack[2-3]n[10-11].site", "rack2n10.site"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", "[", "node[", "node[]", "node[x-y]"] {
            assert_eq!(first_node(list), None, "{list}");
        }
    }
}
