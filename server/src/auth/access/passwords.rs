//! Passwords as argon2id hashes. A hash takes tens of milliseconds and 19 MiB on purpose, so hashes run on blocking threads, a few at a
//! time. A request that cannot wait for its turn gets [`PasswordError::Busy`].

use argon2::{
    Algorithm, Argon2, Params, Version,
    password_hash::{PasswordHasher, PasswordVerifier, phc::PasswordHash},
};
use serde::Deserialize;
use std::{fmt, sync::Arc, thread, time::Duration};
use tokio::sync::Semaphore;

/// Memory in KiB, passes and lanes: the minimum for argon2id in OWASP's Password Storage Cheat Sheet.
const COST: (u32, u32, u32) = (19 * 1024, 2, 1);
/// Maximum number of hashes that are computed at the same time. The limit is half of the cores if that is less, so that somebody who
/// guesses passwords cannot occupy all cores.
const MAX_CONCURRENT: usize = 4;
/// Maximum number of requests that wait for a hash.
const MAX_WAITING: usize = 100;
/// Maximum wait of a request.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a password was not hashed.
#[derive(Debug)]
pub(crate) enum PasswordError {
    /// The queue is full, or the request has waited for longer than [`WAIT_TIMEOUT`].
    Busy,
    /// The system has no random bits or no memory, or a stored hash is damaged.
    Failed(String),
}

/// A password. `Debug` does not show it, so it does not appear in logs.
#[derive(Clone, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct Password(pub(crate) String);

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password")
    }
}

/// The requests that hash passwords.
#[derive(Debug)]
struct Queue {
    /// A permit for each hash that is computed at the same time.
    hashing: Arc<Semaphore>,
    /// A permit for each request that waits.
    waiting: Semaphore,
}

impl Queue {
    fn new(concurrent: usize) -> Self {
        Self { hashing: Arc::new(Semaphore::new(concurrent)), waiting: Semaphore::new(MAX_WAITING) }
    }
}

/// Hashes passwords, a limited number at the same time.
#[derive(Debug)]
pub(crate) struct Passwords {
    /// The queue for new passwords, and for sign-ins from addresses from which the person has not signed in before. Guesses come from such
    /// addresses.
    unfamiliar: Queue,
    /// The queue for sign-ins from addresses from which the person has signed in before.
    familiar: Queue,
}

impl Default for Passwords {
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self { unfamiliar: Queue::new((cores / 2).clamp(1, MAX_CONCURRENT)), familiar: Queue::new(1) }
    }
}

impl Passwords {
    /// The hash to store, with a random salt.
    pub(crate) async fn hash(&self, password: Password) -> Result<String, PasswordError> {
        run_in_turn(&self.unfamiliar, move || {
            let hash = argon2()?.hash_password(password.0.as_bytes());
            hash.map(|hash| hash.to_string()).map_err(|error| error.to_string())
        })
        .await
    }

    /// Whether a password matches a hash. Without a hash, returns false after the time of a check, so that the time does not reveal which
    /// names exist.
    /// `is_familiar`: whether the person has signed in from the same address before.
    pub(super) async fn verify(
        &self,
        password: Password,
        hash: Option<String>,
        is_familiar: bool,
    ) -> Result<bool, PasswordError> {
        let queue = if is_familiar { &self.familiar } else { &self.unfamiliar };
        run_in_turn(queue, move || {
            let Some(hash) = hash else {
                let mut thrown_away = [0; Params::DEFAULT_OUTPUT_LEN];
                let hashed = argon2()?.hash_password_into(password.0.as_bytes(), &[0; 16], &mut thrown_away);
                std::hint::black_box(thrown_away);
                return hashed.map(|()| false).map_err(|error| error.to_string());
            };
            let hash = PasswordHash::new(&hash).map_err(|error| format!("a stored hash: {error}"))?;
            // Uses the cost parameters of the stored hash.
            Ok(argon2()?.verify_password(password.0.as_bytes(), &hash).is_ok())
        })
        .await
    }
}

/// Runs `work` on a blocking thread when it is this request's turn.
async fn run_in_turn<T: Send + 'static>(
    queue: &Queue,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, PasswordError> {
    let waiting = queue.waiting.try_acquire().map_err(|_| PasswordError::Busy)?;
    let permit = tokio::time::timeout(WAIT_TIMEOUT, queue.hashing.clone().acquire_owned()).await;
    let permit = permit.map_err(|_| PasswordError::Busy)?.map_err(|_| PasswordError::Busy)?;
    drop(waiting);
    let done = tokio::task::spawn_blocking(move || {
        // Held until the hash is computed, even if the request is cancelled.
        let _permit = permit;
        work()
    });
    done.await.map_err(|error| PasswordError::Failed(error.to_string()))?.map_err(PasswordError::Failed)
}

fn argon2() -> Result<Argon2<'static>, String> {
    let (memory, passes, lanes) = COST;
    let params = Params::new(memory, passes, lanes, None).map_err(|error| error.to_string())?;
    Ok(Argon2::new(Algorithm::Argon2id, Version::V0x13, params))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(text: &str) -> Password {
        Password(text.into())
    }

    #[tokio::test]
    async fn hashes_are_salted_argon2id_and_verify_their_password() {
        let passwords = Passwords::default();
        let first = passwords.hash(password("correct horse")).await.unwrap();
        let second = passwords.hash(password("correct horse")).await.unwrap();
        assert!(first.starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), "{first}");
        assert_ne!(first, second);
        assert!(passwords.verify(password("correct horse"), Some(first.clone()), false).await.unwrap());
        for wrong in ["correct horsf", "", "correct horse "] {
            assert!(!passwords.verify(password(wrong), Some(first.clone()), false).await.unwrap(), "{wrong}");
        }
        assert!(!passwords.verify(password("correct horse"), None, false).await.unwrap());
        assert!(passwords.verify(password("x"), Some("no hash".into()), false).await.is_err());
        assert!(!format!("{:?}", password("correct horse")).contains("horse"));
    }

    #[tokio::test]
    async fn the_number_of_waiting_checks_is_limited() {
        let passwords = Arc::new(Passwords::default());
        // All permits are taken.
        let permits = passwords.unfamiliar.hashing.available_permits() as u32;
        let taken = passwords.unfamiliar.hashing.clone().acquire_many_owned(permits).await.unwrap();
        let waiting: Vec<_> = (0..MAX_WAITING)
            .map(|_| {
                let passwords = passwords.clone();
                tokio::spawn(async move { passwords.verify(password("x"), None, false).await.is_ok() })
            })
            .collect();
        while passwords.unfamiliar.waiting.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(passwords.verify(password("x"), None, false).await, Err(PasswordError::Busy)));
        let familiar = passwords.verify(password("x"), None, true).await;
        assert!(familiar.is_ok(), "familiar addresses do not wait behind other addresses");
        for one in waiting.iter().skip(1) {
            one.abort();
        }
        drop(taken);
        let mut waiting = waiting.into_iter();
        assert!(waiting.next().unwrap().await.unwrap(), "the waiting check is done");
        for aborted in waiting {
            assert!(aborted.await.is_err());
        }
        assert!(passwords.verify(password("x"), None, false).await.is_ok(), "later checks are done, too");
    }
}
