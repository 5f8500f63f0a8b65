//! Measures how ten thousand wrong passwords affect the sign-in of other people.

use super::people::PASSWORD;
use crate::test_server::{TestServer, client_from, with_form};
use reqwest::Client;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Number of concurrent guesses.
const CONCURRENT: u32 = 64;

async fn sign_in(client: &Client, url: &str, name: &str, password: &str) -> u16 {
    let form = with_form(client.post(url), format!("name={name}&password={password}"));
    form.send().await.unwrap().status().as_u16()
}

/// Tries `count` wrong passwords concurrently, and returns the number of responses with each status. `name_of(n)` is the name of guess `n`.
async fn guess(url: &str, count: u32, address_count: u32, name_of: fn(u32) -> String) -> BTreeMap<u16, u32> {
    let clients = (0..address_count).map(|n| client_from([127, 9, (n / 250) as u8, (n % 250 + 1) as u8]));
    let clients: Arc<Vec<Client>> = Arc::new(clients.collect());
    let next = Arc::new(AtomicU32::new(0));
    let workers = (0..CONCURRENT).map(|_| {
        let (clients, next, url) = (clients.clone(), next.clone(), url.to_owned());
        tokio::spawn(async move {
            let mut responses = BTreeMap::<u16, u32>::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return responses;
                }
                let client = &clients[(n % address_count) as usize];
                let status = sign_in(client, &url, &name_of(n), &format!("wrong password {n}")).await;
                *responses.entry(status).or_default() += 1;
            }
        })
    });
    let mut totals = BTreeMap::<u16, u32>::new();
    for worker in workers.collect::<Vec<_>>() {
        for (status, count) in worker.await.unwrap() {
            *totals.entry(status).or_default() += count;
        }
    }
    totals
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement that takes minutes: cargo test --release --workspace --test server -- --ignored --nocapture ten_thousand"]
async fn ten_thousand_wrong_passwords_do_not_lock_others_out() {
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    server.add_person("bob", "member").await;
    server.add_person("carol", "member").await;
    let url = server.url("/login");
    for (case, count, address_count, name_of) in [
        ("one name from 40 addresses", 8000, 40, (|_| "ada".to_owned()) as fn(u32) -> String),
        ("2000 names from 400 addresses", 2000, 400, |n| format!("name-{n}")),
    ] {
        let finished = Arc::new(AtomicBool::new(false));
        let sign_in_repeatedly = |person: &'static str, addresses: Vec<[u8; 4]>| {
            let (finished, url) = (finished.clone(), url.clone());
            tokio::spawn(async move {
                let (mut times, mut refused) = (Vec::new(), BTreeMap::<u16, u32>::new());
                for address in addresses.iter().cycle() {
                    let client = client_from(*address);
                    let since = Instant::now();
                    match sign_in(&client, &url, person, PASSWORD).await {
                        303 => times.push(since.elapsed()),
                        status => *refused.entry(status).or_default() += 1,
                    }
                    if finished.load(Ordering::Relaxed) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                times.sort();
                (person, times, refused)
            })
        };
        // Bob has signed in from his address before. Carol uses a new address each time, so only Carol may be refused.
        assert_eq!(sign_in(&client_from([127, 0, 0, 77]), &url, "bob", PASSWORD).await, 303);
        let others = [
            sign_in_repeatedly("bob", vec![[127, 0, 0, 77]]),
            sign_in_repeatedly("carol", (0..250).map(|n| [127, 8, address_count as u8, n + 1]).collect()),
        ];
        let since = Instant::now();
        let responses = guess(&url, count, address_count, name_of).await;
        let took = since.elapsed();
        finished.store(true, Ordering::Relaxed);
        eprintln!("{case}: {count} guesses in {:.1} s, responses {responses:?}", took.as_secs_f64());
        for other in others {
            let (person, times, refused) = other.await.unwrap();
            let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
            eprintln!(
                "  meanwhile {person} signed in {} times, median {:.0} ms, longest {:.0} ms; refused: {refused:?}",
                times.len(),
                median.as_secs_f64() * 1e3,
                longest.as_secs_f64() * 1e3,
            );
            assert!(refused.is_empty() || person == "carol", "{person}: {refused:?}");
        }
        assert_eq!(responses.values().sum::<u32>(), count);
        assert!(responses.keys().all(|status| [401, 429, 503].contains(status)), "{responses:?}");
        if count == 8000 {
            // At most 30 attempts per name and minute, from all addresses together.
            let minutes = took.as_secs() as u32 / 60 + 1;
            assert!(responses[&401] <= 30 * minutes, "{responses:?}");
        }
    }
    server.stop().await;
}
