use super::*;

fn interrupted() -> CopyError {
    CopyError::Server(RequestError::Later("the files are cut off".into()))
}

#[test]
fn retries_wait_for_unreachable_servers_but_not_for_stalled_ones() {
    let mut tries = RetryCounts::default();
    let (unreachable, stalled, advancing) = (
        PullProgress::default(),
        PullProgress { has_answered: true, has_advanced: false },
        PullProgress { has_answered: true, has_advanced: true },
    );
    for _ in 0..10 * MAX_TRIES_WITHOUT_PROGRESS {
        tries.count_failure(interrupted(), unreachable).unwrap();
        tries.count_failure(interrupted(), advancing).unwrap();
    }
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.count_failure(interrupted(), stalled).unwrap();
        tries.count_failure(interrupted(), unreachable).unwrap();
    }
    // Data arrives, so the count starts again.
    tries.count_failure(interrupted(), advancing).unwrap();
    for _ in 1..MAX_TRIES_WITHOUT_PROGRESS {
        tries.count_failure(interrupted(), stalled).unwrap();
    }
    let why = "the files are cut off; no further data arrived in 10 attempts";
    assert!(
        matches!(tries.count_failure(interrupted(), stalled), Err(CopyError::Unusable(found)) if found == why)
    );
}

#[test]
fn changed_and_damaged_files_are_retried_a_few_times() {
    let mut tries = RetryCounts::default();
    let advancing = PullProgress { has_answered: true, has_advanced: true };
    for _ in 0..MAX_RESTARTS {
        tries.count_failure(CopyError::Changed("x has changed".into()), advancing).unwrap();
    }
    assert!(matches!(
        tries.count_failure(CopyError::Damaged("x came damaged".into()), advancing),
        Err(CopyError::Damaged(_))
    ));
    assert!(tries.count_failure(interrupted(), advancing).is_ok());
    let refused = CopyError::NoSpace("full".into());
    assert!(matches!(RetryCounts::default().count_failure(refused, advancing), Err(CopyError::NoSpace(_))));
}
