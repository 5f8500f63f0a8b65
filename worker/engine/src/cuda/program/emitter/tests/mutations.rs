//! The verification refuses lists of commands that a test has damaged.

use super::*;

/// Settings with several streams, collectives and reuse of memory: a single rank, and each kind of group.
fn settings() -> Vec<Setting> {
    let network = build(Arch::ResNet50, Stem::Imagenet, 64, 10);
    [Ranks::Single, Ranks::Local, Ranks::PeerMemory, Ranks::Nccl]
        .into_iter()
        .map(|ranks| Setting::new(&network, 32, DType::F16, 90, ranks))
        .collect()
}

/// The valid list of a step.
fn valid_commands(setting: &Setting) -> Vec<Command> {
    setting.emit_valid(Phase::Train(ONLY), true).commands
}

fn refusal(commands: &[Command]) -> Option<String> {
    verify::verify(commands, false).err()
}

/// Every wait is needed, except waits that another wait implies: a weight gradient whose inputs existed at an earlier weight gradient, and
/// in groups a wait of a collective for which another command waits. A needed wait is also refused without its recorded event.
#[test]
fn a_missing_wait_is_refused() {
    for setting in settings() {
        let commands = valid_commands(&setting);
        let waits = numbers(&commands, |c| matches!(c, Command::Wait { .. }));
        let (needed, implied): (Vec<usize>, Vec<usize>) =
            waits.iter().partition(|number| refusal(&without(&commands, **number)).is_some());
        assert!(needed.len() > 4 * implied.len(), "{} of {}", needed.len(), waits.len());
        for number in implied {
            let Command::Wait { event, .. } = commands[number] else { unreachable!() };
            let is_single = setting.statistics.is_none();
            assert!(event == EventId::SideBegin || !is_single, "{event:?} is not needed");
            assert!(event != EventId::CollectivesDone, "nothing waits for the sums");
        }
        for number in needed {
            let Command::Wait { event, .. } = commands[number] else { unreachable!() };
            let records = |c: &Command| matches!(c, Command::Record { event: other, .. } if *other == event);
            let recorded = commands[..number].iter().rposition(records).unwrap();
            assert!(refusal(&without(&commands, recorded)).is_some(), "{event:?} is not recorded");
        }
    }
}

/// Every command that writes an activation or the values of a batch norm is needed by a later command.
#[test]
fn a_missing_command_of_the_forward_pass_is_refused() {
    for setting in settings() {
        let commands = valid_commands(&setting);
        let end = commands.iter().position(|c| *c == Command::Part(Part::Loss)).unwrap();
        let is_kept = |operand: &Operand| matches!(operand.region, Region::Arena | Region::NormValues);
        let writes =
            |c: &Command| c.accesses().iter().any(|(o, access)| *access == Access::Write && is_kept(o));
        let all = numbers(&commands[..end], writes);
        assert!(all.len() > 50, "{} commands", all.len());
        for number in all {
            assert!(refusal(&without(&commands, number)).is_some(), "{:?}", commands[number]);
        }
    }
}

#[test]
fn an_allocation_that_is_moved_is_refused() {
    // Only a single rank and NCCL.
    for setting in settings().into_iter().step_by(3) {
        let commands = valid_commands(&setting);
        for number in numbers(&commands, |c| matches!(c, Command::Alloc { .. })) {
            let mut moved = commands.clone();
            let Command::Alloc { at, .. } = &mut moved[number] else { continue };
            at.offset += 256;
            assert!(refusal(&moved).is_some(), "{:?}", commands[number]);
        }
    }
}

#[test]
fn allocations_that_overlap_are_refused() {
    let commands = valid_commands(&settings()[0]);
    let allocs = numbers(&commands, |c| matches!(c, Command::Alloc { .. }));
    for pair in allocs.windows(2) {
        let (Command::Alloc { at: first, .. }, Command::Alloc { at: second, .. }) =
            (&commands[pair[0]], &commands[pair[1]])
        else {
            continue;
        };
        let freed = commands[pair[0]..pair[1]].contains(&Command::Free { at: *first });
        if freed {
            continue;
        }
        let moved =
            Command::Alloc { content: Content::Argmax(0), at: Operand { offset: first.offset, ..*second } };
        let damaged = [&commands[..pair[1]], &[moved], &commands[pair[1] + 1..]].concat();
        assert!(refusal(&damaged).unwrap().contains("is allocated"));
    }
}

#[test]
fn memory_that_is_freed_too_early_or_twice_is_refused() {
    // Only a single rank and NCCL.
    for setting in settings().into_iter().step_by(3) {
        let commands = valid_commands(&setting);
        for number in numbers(&commands, |c| matches!(c, Command::Free { .. })) {
            let Command::Free { at } = commands[number] else { continue };
            let touches = |c: &Command| c.accesses().iter().any(|(operand, _)| *operand == at);
            let last = commands[..number].iter().rposition(touches).unwrap();
            let mut early = without(&commands, number);
            early.insert(last, commands[number].clone());
            assert!(refusal(&early).is_some(), "{:?}", commands[number]);
            let mut twice = commands.clone();
            twice.insert(number, commands[number].clone());
            assert!(refusal(&twice).unwrap().contains("not allocated"));
        }
    }
}

#[test]
fn collectives_on_two_streams_are_ordered() {
    let reduce = |stream: StreamId, region: Region| {
        Command::all_reduce(stream, Group::World, Operand::new(region, 0, 1024), DType::F32)
    };
    let (main, other, event) = (StreamId::Main, StreamId::Collectives, EventId::BucketReady(0));
    let done = EventId::CollectivesDone;
    let first = [
        Command::Record { stream: main, event },
        Command::Wait { stream: other, event },
        reduce(other, Region::Scratch),
    ];
    let second = [reduce(main, Region::RunningStatistics)];
    let wait = [Command::Record { stream: other, event: done }, Command::Wait { stream: main, event: done }];
    assert_eq!(refusal(&[&first[..], &wait, &second].concat()), None);
    let refused = refusal(&[&first[..], &second, &wait].concat()).unwrap();
    assert!(refused.contains("the collective before it may still run"), "{refused}");
    // The list must not end before the other stream has ended.
    assert!(refusal(&first).unwrap().contains("ends while Collectives may still run"));
    let unforked = refusal(&[reduce(other, Region::Scratch)]).unwrap();
    assert!(unforked.contains("has not waited for the main stream"), "{unforked}");
}

/// Two streams must wait for each other only if they use the same part of a region.
#[test]
fn ranges_of_a_region_are_distinguished() {
    let stamp = |stream: StreamId, offset: usize| Command::Kernel {
        stream,
        kernel: Ops::new(DType::F32, 132, 90).stamp(Operand::new(Region::Stamps, offset, 8), Operand::NONE),
    };
    let (main, side) = (StreamId::Main, StreamId::Side);
    let list = |offset: usize| {
        vec![
            Command::Record { stream: main, event: EventId::SideBegin },
            Command::Wait { stream: side, event: EventId::SideBegin },
            stamp(main, 8),
            stamp(side, offset),
            Command::Record { stream: side, event: EventId::SideEnd },
            Command::Wait { stream: main, event: EventId::SideEnd },
        ]
    };
    assert_eq!([0, 16].map(|offset| refusal(&list(offset))), [None, None]);
    for offset in [1, 8, 15] {
        assert!(refusal(&list(offset)).unwrap().contains("may still run"), "{offset}");
    }
}

/// The host can stop the update: after the last collective and before the first weight changes, the step reads a word in host memory.
#[test]
fn an_update_that_the_host_could_not_stop_is_refused() {
    for setting in settings() {
        let commands = valid_commands(&setting);
        let [at] = numbers(&commands, announces_update)[..] else {
            panic!("a step announces its update once")
        };
        assert!(refusal(&without(&commands, at)).unwrap().contains("it changes weights before"));
        let Some(last) = commands.iter().rposition(|c| matches!(c, Command::Collective { .. })) else {
            continue;
        };
        let mut early = without(&commands, at);
        early.insert(last, commands[at].clone());
        assert!(refusal(&early).unwrap().contains("an update may"), "{early:?}");
        if !setting.statistics.as_ref().is_some_and(Statistics::reduces_gradients_on_main_stream) {
            // If another stream reduces the gradients, a command after the start of the reduction may run before its end.
            early = without(&commands, at);
            early.insert(last + 1, commands[at].clone());
            assert!(refusal(&early).unwrap().contains("before the last collective has ended"));
        }
    }
}

#[test]
fn a_step_saves_running_statistics_before_they_change() {
    for setting in settings() {
        let changes = |c: &Command, region: Region| {
            c.accesses().iter().any(|(o, access)| o.region == region && *access != Access::Read)
        };
        let setting = Setting { accumulates: true, ..setting };
        for (is_first, is_last) in [(true, true), (true, false), (false, false), (false, true)] {
            let micro_batch = MicroBatch { is_first, is_last, ..ONLY };
            let commands = setting.emit_valid(Phase::Train(micro_batch), true).commands;
            let kept = numbers(&commands, |c| changes(c, Region::KeptStatistics));
            let changed = numbers(&commands, |c| changes(c, Region::RunningStatistics));
            assert_eq!(kept.len(), usize::from(is_first));
            assert!(changed.len() >= setting.norms.len() && kept.iter().all(|kept| *kept < changed[0]));
            if let Some((operand, _)) = kept.iter().find_map(|kept| {
                commands[*kept].accesses().into_iter().find(|(o, _)| o.region == Region::RunningStatistics)
            }) {
                let ends = setting.norms.iter().map(|site| site.running_var.end());
                assert!(operand.offset == 0 && ends.max().unwrap() <= operand.end());
            }
        }
        let evaluation = setting.emit_valid(Phase::Evaluate, true).commands;
        assert!(numbers(&evaluation, |c| changes(c, Region::KeptStatistics)).is_empty());
    }
}

#[test]
fn adding_to_gradients_that_do_not_exist_is_refused() {
    for setting in settings() {
        let setting = Setting { accumulates: true, ..setting };
        let later = setting.emit_valid(Phase::Train(MicroBatch { is_first: false, ..ONLY }), true).commands;
        assert!(refusal(&later).unwrap().contains("is read before it is written"));
    }
}
