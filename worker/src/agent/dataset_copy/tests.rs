use super::*;

fn interrupted() -> CopyError {
    CopyError::Server(Failed::Later("the files are cut off".into()))
}

#[test]
fn retries_wait_for_unreachable_servers_but_not_for_stalled_ones() {
    let mut tries = RetryCounts::default();
    let (unreachable, stalled, advancing) = (
        PullProgress::default(),
        PullProgress { answered: true, advanced: false },
        PullProgress { answered: true, advanced: true },
    );
    for _ in 0..10 * MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(interrupted(), unreachable).unwrap();
        tries.note(interrupted(), advancing).unwrap();
    }
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(interrupted(), stalled).unwrap();
        tries.note(interrupted(), unreachable).unwrap();
    }
    // Data arrives, so the count starts again.
    tries.note(interrupted(), advancing).unwrap();
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.note(interrupted(), stalled).unwrap();
    }
    match tries.note(interrupted(), stalled) {
        Err(CopyError::Unusable(why)) => {
            assert_eq!(why, "the files are cut off; no further data arrived in 10 attempts");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn changed_and_damaged_files_are_retried_a_few_times() {
    let mut tries = RetryCounts::default();
    let advancing = PullProgress { answered: true, advanced: true };
    for _ in 0..MAX_RESTARTS {
        tries.note(CopyError::Changed("x has changed".into()), advancing).unwrap();
    }
    assert!(matches!(
        tries.note(CopyError::Damaged("x came damaged".into()), advancing),
        Err(CopyError::Damaged(_))
    ));
    assert!(tries.note(interrupted(), advancing).is_ok());
    let refused = CopyError::NoSpace("full".into());
    assert!(matches!(RetryCounts::default().note(refused, advancing), Err(CopyError::NoSpace(_))));
}
