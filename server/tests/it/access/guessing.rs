//! Ten thousand wrong passwords, measured.

use super::people::PASSWORD;
use crate::test_server::{TestServer, builder};
use reqwest::Client;
use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Guesses under way at once.
const AT_ONCE: u32 = 64;

fn from(address: [u8; 4]) -> Client {
    let client = builder("").local_address(IpAddr::from(address));
    client.redirect(reqwest::redirect::Policy::none()).build().unwrap()
}

async fn sign_in(client: &Client, url: &str, name: &str, password: &str) -> u16 {
    let request = client.post(url).header("content-type", "application/x-www-form-urlencoded");
    request.body(format!("name={name}&password={password}")).send().await.unwrap().status().as_u16()
}

/// Guesses, some at once; how many were answered with each status.
async fn guess(url: &str, count: u32, addresses: u32, name: fn(u32) -> String) -> BTreeMap<u16, u32> {
    let clients: Arc<Vec<Client>> =
        Arc::new((0..addresses).map(|n| from([127, 9, (n / 250) as u8, (n % 250 + 1) as u8])).collect());
    let next = Arc::new(AtomicU32::new(0));
    let workers = (0..AT_ONCE).map(|_| {
        let (clients, next, url) = (clients.clone(), next.clone(), url.to_owned());
        tokio::spawn(async move {
            let mut answers = BTreeMap::<u16, u32>::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return answers;
                }
                let client = &clients[(n % addresses) as usize];
                let status = sign_in(client, &url, &name(n), &format!("wrong password {n}")).await;
                *answers.entry(status).or_default() += 1;
            }
        })
    });
    let mut all = BTreeMap::<u16, u32>::new();
    for worker in workers.collect::<Vec<_>>() {
        for (status, count) in worker.await.unwrap() {
            *all.entry(status).or_default() += count;
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement that takes minutes: cargo test -p lockstep-server --test it -- --ignored --nocapture ten_thousand"]
async fn ten_thousand_wrong_passwords_leave_others_a_way_in() {
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    server.add_person("bob", "member").await;
    let url = server.url("/login");
    for (what, count, addresses, name) in [
        ("one name from 40 addresses", 8000, 40, (|_| "ada".to_owned()) as fn(u32) -> String),
        ("2000 names from 400 addresses", 2000, 400, |n| format!("name-{n}")),
    ] {
        let over = Arc::new(AtomicBool::new(false));
        let other = {
            let (over, url) = (over.clone(), url.clone());
            tokio::spawn(async move {
                let client = from([127, 0, 0, 77]);
                let mut times = Vec::new();
                while !over.load(Ordering::Relaxed) || times.is_empty() {
                    let since = Instant::now();
                    assert_eq!(sign_in(&client, &url, "bob", PASSWORD).await, 303, "another person signs in");
                    times.push(since.elapsed());
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                times.sort();
                times
            })
        };
        let since = Instant::now();
        let answers = guess(&url, count, addresses, name).await;
        let took = since.elapsed();
        over.store(true, Ordering::Relaxed);
        let times = other.await.unwrap();
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        println!(
            "{what}: {count} guesses in {:.1} s, answers {answers:?}; meanwhile bob signed in {} times, median {:.0} ms, longest {:.0} ms",
            took.as_secs_f64(),
            times.len(),
            median.as_secs_f64() * 1e3,
            longest.as_secs_f64() * 1e3,
        );
        assert_eq!(answers.values().sum::<u32>(), count);
        assert!(answers.keys().all(|status| [401, 429, 503].contains(status)), "{answers:?}");
        if count == 8000 {
            // Thirty a minute for a name, from wherever.
            let minutes = took.as_secs() as u32 / 60 + 1;
            assert!(answers[&401] <= 30 * minutes, "{answers:?}");
        }
    }
    server.stop().await;
}
