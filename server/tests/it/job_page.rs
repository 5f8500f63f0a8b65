//! The HTML of a job's page, without scripts.

use crate::{
    agent::{best_checkpoint, dataset_info, losses, running, start_job},
    gangs::{connect_machines, rank_killed, start_gang},
    test_server::{TestServer, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Evaluation, Source},
    dataset::SplitInfo,
    job::JobState,
    metric::MetricColumn,
};
use serde_json::{Value, json};
use std::time::Duration;

/// Reads the page of a job. Returns its HTML and the data block for scripts.
async fn read_page(server: &TestServer, id: &str) -> (String, Value) {
    let (status, html) = server.get_text(&format!("/jobs/{id}")).await;
    assert_eq!(status, 200, "{html}");
    let (_, data) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let data = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    (html, data)
}

fn agents_of_ranks(data: &Value) -> Vec<&str> {
    data["ranks"].as_array().unwrap().iter().map(|rank| rank["agent"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn ranks_are_shown_with_their_machines_after_the_attempt() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    assert_eq!(agents_of_ranks(&read_page(&server, &id).await.1), ["a", "a", "b", "b"]);
    b.end(&attempt, Ending::Succeeded { step: 100 }).await;
    a.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&id).await.state, JobState::Succeeded);
    assert_eq!(agents_of_ranks(&read_page(&server, &id).await.1), ["a", "a", "b", "b"]);
    server.stop().await;
}

#[tokio::test]
async fn a_restarting_job_shows_its_place_and_reason() {
    let name = "</script><b>&";
    let (server, mut agent, id, attempt) = start_job(|s| s["name"] = json!(name)).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    let (html, data) = read_page(&server, &id).await;
    assert!(data["job"]["name"] == name && !html.contains("<b>&"), "the name is escaped everywhere: {html}");
    server.submit(|s| s["priority"] = json!(5)).await;
    agent.end(&attempt, rank_killed(1)).await;
    assert_ne!(agent.expect_start().await.attempt.job.as_str(), id, "the other job has a higher priority");
    let mut html = String::new();
    wait_until("the page shows the reason", async || {
        html = read_page(&server, &id).await.0;
        html.contains("waits for 2 slots")
    })
    .await;
    for text in [
        "<b id=\"banner-what\">Starting again, number 1 in the queue:</b>",
        "waits for 2 slots: 0 of 2 on",
        "Before: rank 1 was killed by signal 9 at step 3",
    ] {
        assert!(html.contains(text), "{text}: {html}");
    }
    server.stop().await;
}

fn evaluation(epoch: u32, accuracy: f64) -> AttemptEvent {
    let step = u64::from(epoch) * 25;
    AttemptEvent::Evaluation(Evaluation { epoch, step, accuracy, loss: 1.0, samples: 200, secs: 0.1 })
}

#[tokio::test]
async fn best_accuracy_and_best_checkpoint_are_shown_if_they_differ() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let events = vec![running(100, 0), losses(0, 1..=50), evaluation(2, 0.632)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    agent.report(&attempt, Source::Rank(0), 3, vec![best_checkpoint(2, 50, 0.632)]).await;
    assert!(read_page(&server, &id).await.0.contains(">best 63.2 % at epoch 2</small>"));
    // The next epoch has a better accuracy, but no checkpoint.
    agent.report(&attempt, Source::Rank(0), 4, vec![evaluation(3, 0.822)]).await;
    let (html, _) = read_page(&server, &id).await;
    assert!(html.contains(">best 82.2 % at epoch 3, best checkpoint 63.2 %</small>"), "{html}");
    server.stop().await;
}

#[tokio::test]
async fn a_job_shows_whether_its_accuracy_improves_and_why_it_is_low() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let column = |name: &str, steps: &[u64], values: &[f32]| MetricColumn {
        name: name.into(),
        steps: steps.to_vec(),
        values: values.to_vec(),
    };
    let metrics = |rank: u32, accuracies: &[f32]| {
        let mut columns = vec![column("accuracy", &[1, 49, 60, 100], accuracies)];
        if rank == 0 {
            columns.push(column("val_accuracy", &[50, 60, 100], &[0.7, 0.705, 0.71]));
        }
        AttemptEvent::Metrics { rank, columns }
    };
    let events_of_rank_0 = vec![running(100, 0), losses(0, 1..=99), metrics(0, &[0.1, 0.2, 0.98, 1.0])];
    agent.report(&attempt, Source::Rank(0), 0, events_of_rank_0).await;
    agent.report(&attempt, Source::Rank(1), 0, vec![metrics(1, &[0.1, 0.2, 0.97, 0.97])]).await;
    let measured = Evaluation { epoch: 2, step: 100, accuracy: 0.71, loss: 1.0, samples: 2000, secs: 0.1 };
    agent.report(&attempt, Source::Rank(0), 3, vec![AttemptEvent::Evaluation(measured)]).await;
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(
        job["diagnosis"],
        "Validation accuracy improves: the newest, 71.0 % ± 1.0 of 2000 pictures, is the best so far; the best before was 70.5 %."
    );
    let exploded = AttemptEvent::Metrics { rank: 0, columns: vec![column("loss", &[100], &[500.0])] };
    agent.report(&attempt, Source::Rank(0), 4, vec![exploded]).await;
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(
        job["diagnosis"],
        "The training loss has exploded (0.6111 at the start, 500.0 now): the learning rate is too high. Cancel the job, and start it \
         again with train.lr = 0.001."
    );
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // The training accuracy is the mean of the last epoch's steps of both ranks.
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    let diagnosis = job["diagnosis"].as_str().unwrap();
    for part in [
        "The training loss rose far above its start, to ",
        "Training accuracy is 98.0 %, validation accuracy 71.0 % ± 1.0 of 2000 pictures: ",
    ] {
        assert!(diagnosis.contains(part), "{diagnosis}");
    }
    // The job's validation pictures are now counted, and one class has none.
    let mut counted = dataset_info();
    counted.splits[1] = SplitInfo { name: "test".into(), samples: 2000, per_class: vec![2000, 0] };
    let nothing = json!({});
    let inspect = server.post("/datasets/pictures/inspect", &nothing);
    assert_eq!(tokio::join!(inspect, agent.answer_inspection(Ok(counted))).0.0, 200);
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    let diagnosis = job["diagnosis"].as_str().unwrap();
    assert!(diagnosis.starts_with("1 class has no validation picture: \"dog\". "), "{diagnosis}");
    let (html, _) = read_page(&server, &id).await;
    // The text has quotation marks, which are escaped.
    let (beginning, _) = diagnosis.split_once('"').unwrap();
    assert!(html.contains(&format!("id=\"diagnosis\">{beginning}")), "{html}");
    let (_, list) = server.get("/jobs").await;
    assert_eq!(list["jobs"][0].get("diagnosis"), None);
    server.stop().await;
}

#[tokio::test]
async fn the_run_time_of_a_job_excludes_pauses() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    assert_eq!(server.job(&id).await.ran_secs, None, "the job still runs");
    server.order(&id, "pause").await;
    assert!(agent.expect_stop().await);
    agent.end(&attempt, Ending::Stopped).await;
    let secs_before_pause = server.wait_for_state(&id, JobState::Paused).await.ran_secs.unwrap();
    // The run time must not include this pause.
    let pause = Duration::from_secs(2);
    tokio::time::sleep(pause).await;
    server.order(&id, "resume").await;
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let job = server.job(&id).await;
    let (ran_secs, total) =
        (job.ran_secs.unwrap(), job.finished_at.unwrap().duration_since(job.started_at.unwrap()));
    assert!(ran_secs >= secs_before_pause, "{ran_secs} after {secs_before_pause}");
    assert!(ran_secs <= total.as_secs_f64() - pause.as_secs_f64(), "{ran_secs} s of {total:?}");
    // The page and the list show the same time.
    let shown = format!("0:{:02}", ran_secs.round());
    let (html, _) = read_page(&server, &id).await;
    assert!(html.contains("<dt>Ran for</dt>") && html.contains(&format!(">{shown}</span>")), "{html}");
    let (_, list) = server.get_text("/jobs").await;
    assert!(list.contains(&format!(">ran for {shown}</span>")), "{list}");
    server.stop().await;
}
