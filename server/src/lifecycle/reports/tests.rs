use super::*;

fn column(name: &str, steps: &[u64]) -> MetricColumn {
    MetricColumn { name: name.into(), steps: steps.into(), values: steps.iter().map(|s| *s as f32).collect() }
}

fn metrics(rank: u32, columns: &[MetricColumn]) -> AttemptEvent {
    AttemptEvent::Metrics { rank, columns: columns.into() }
}

#[test]
fn points_are_merged_across_log_lines_but_not_across_other_events() {
    let line = AttemptEvent::Log { rank: 0, lines: Vec::new() };
    let checkpoint = AttemptEvent::CheckpointRemoved { epoch: 1, step: 1 };
    let report = vec![
        metrics(0, &[column("loss", &[1]), column("lr", &[1])]),
        line.clone(),
        // A metric of an unknown name is ignored.
        metrics(0, &[column("loss", &[2, 3]), column("not_a_metric", &[2])]),
        metrics(1, &[column("loss", &[2])]),
        checkpoint.clone(),
        metrics(1, &[column("loss", &[4])]),
        // A column with fewer values than steps is ignored.
        metrics(1, &[MetricColumn { values: vec![1.0], ..column("loss", &[5, 6]) }]),
    ];
    let expected = vec![
        metrics(0, &[column("loss", &[1, 2, 3]), column("lr", &[1])]),
        line,
        metrics(1, &[column("loss", &[2])]),
        checkpoint,
        metrics(1, &[column("loss", &[4])]),
    ];
    assert_eq!(merge_points(&report), expected);
}
