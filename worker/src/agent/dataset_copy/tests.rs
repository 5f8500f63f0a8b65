use super::*;

fn later() -> CopyError {
    CopyError::Server(Failed::Later("the files are cut off".into()))
}

#[test]
fn unreachable_servers_are_waited_for_and_stalled_ones_are_not() {
    let mut tries = RetryCounts::default();
    let (away, nothing, more) = (
        PullProgress::default(),
        PullProgress { answered: true, advanced: false },
        PullProgress { answered: true, advanced: true },
    );
    for _ in 0..10 * MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(later(), away).unwrap();
        tries.note(later(), more).unwrap();
    }
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(later(), nothing).unwrap();
        tries.note(later(), away).unwrap();
    }
    // Data arrives, so the count starts again.
    tries.note(later(), more).unwrap();
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(later(), nothing).unwrap();
    }
    match tries.note(later(), nothing) {
        Err(CopyError::Unusable(why)) => {
            assert_eq!(why, "the files are cut off; no further data arrived in 10 attempts");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn changed_and_damaged_files_are_retried_a_few_times() {
    let mut tries = RetryCounts::default();
    let more = PullProgress { answered: true, advanced: true };
    for _ in 0..MAX_RESTARTS {
        tries.note(CopyError::Changed("x has changed".into()), more).unwrap();
    }
    assert!(matches!(
        tries.note(CopyError::Damaged("x came damaged".into()), more),
        Err(CopyError::Damaged(_))
    ));
    assert!(tries.note(later(), more).is_ok());
    let refused = CopyError::NoSpace("full".into());
    assert!(matches!(RetryCounts::default().note(refused, more), Err(CopyError::NoSpace(_))));
}
