//! Passwords as argon2id hashes. A hash takes tens of milliseconds and 19 MiB on purpose, so hashes run on blocking threads, a few at a
//! time. A request that cannot wait for its turn gets [`PasswordError::Busy`].

use argon2::{
    Algorithm, Argon2, Params, Version,
    password_hash::{PasswordHasher, PasswordVerifier, phc::PasswordHash},
};
use serde::Deserialize;
use std::{fmt, sync::Arc, thread, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory in KiB, passes and lanes: the minimum for argon2id in OWASP's Password Storage Cheat Sheet.
const COST: (u32, u32, u32) = (19 * 1024, 2, 1);
/// Maximum number of hashes that are computed at the same time. The limit is half of the cores if that is less, so that guessing leaves
/// cores for other work.
const MAX_CONCURRENT: usize = 4;
/// Maximum number of requests that wait for a hash.
const MAX_WAITING: usize = 100;
/// Maximum wait of a request.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The queue in which a password waits to be hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// For addresses from which the person has not signed in before. They may guess passwords.
    Strangers,
    /// For addresses from which the person has signed in before: a short queue.
    Familiar,
}

/// Why a password was not hashed.
#[derive(Debug)]
pub(crate) enum PasswordError {
    /// Too many requests wait.
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

/// Hashes passwords, a limited number at the same time.
#[derive(Debug)]
pub(crate) struct Passwords {
    permits: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    /// For [`Lane::Familiar`]: permits to hash, and permits to wait.
    familiar: (Arc<Semaphore>, Arc<Semaphore>),
}

impl Default for Passwords {
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            permits: Arc::new(Semaphore::new((cores / 2).clamp(1, MAX_CONCURRENT))),
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            familiar: (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(MAX_WAITING))),
        }
    }
}

impl Passwords {
    /// The hash to store, with a random salt.
    pub(crate) async fn hash(&self, password: Password) -> Result<String, PasswordError> {
        self.work(Lane::Strangers, move || {
            let hash = argon2()?.hash_password(password.0.as_bytes());
            hash.map(|hash| hash.to_string()).map_err(|error| error.to_string())
        })
        .await
    }

    /// Whether a password matches a hash. Without a hash, the check takes as long and fails, so the time does not reveal which names exist.
    pub(super) async fn verify(
        &self,
        password: Password,
        hash: Option<String>,
        lane: Lane,
    ) -> Result<bool, PasswordError> {
        self.work(lane, move || {
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

    async fn work<T: Send + 'static>(
        &self,
        lane: Lane,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, PasswordError> {
        let permit = self.permit(lane).await?;
        let done = tokio::task::spawn_blocking(move || {
            // Held until the hash is computed, even if the request is cancelled.
            let _permit = permit;
            work()
        });
        done.await.map_err(|error| PasswordError::Failed(error.to_string()))?.map_err(PasswordError::Failed)
    }

    async fn permit(&self, lane: Lane) -> Result<OwnedSemaphorePermit, PasswordError> {
        let (permits, waiting) = match lane {
            Lane::Strangers => (&self.permits, &self.waiting),
            Lane::Familiar => (&self.familiar.0, &self.familiar.1),
        };
        let _waiting = waiting.clone().try_acquire_owned().map_err(|_| PasswordError::Busy)?;
        let permit = tokio::time::timeout(WAIT_TIMEOUT, permits.clone().acquire_owned()).await;
        permit.map_err(|_| PasswordError::Busy)?.map_err(|_| PasswordError::Busy)
    }
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
        assert!(
            passwords.verify(password("correct horse"), Some(first.clone()), Lane::Strangers).await.unwrap()
        );
        for wrong in ["correct horsf", "", "correct horse "] {
            assert!(
                !passwords.verify(password(wrong), Some(first.clone()), Lane::Strangers).await.unwrap(),
                "{wrong}"
            );
        }
        assert!(!passwords.verify(password("correct horse"), None, Lane::Strangers).await.unwrap());
        assert!(passwords.verify(password("x"), Some("no hash".into()), Lane::Strangers).await.is_err());
        assert!(!format!("{:?}", password("correct horse")).contains("horse"));
    }

    #[tokio::test]
    async fn the_number_of_waiting_checks_is_limited() {
        let passwords = Arc::new(Passwords::default());
        // All permits are taken.
        let permits = passwords.permits.available_permits() as u32;
        let taken = passwords.permits.clone().acquire_many_owned(permits).await.unwrap();
        let waiting: Vec<_> = (0..MAX_WAITING)
            .map(|_| {
                let passwords = passwords.clone();
                tokio::spawn(
                    async move { passwords.verify(password("x"), None, Lane::Strangers).await.is_ok() },
                )
            })
            .collect();
        while passwords.waiting.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(
            passwords.verify(password("x"), None, Lane::Strangers).await,
            Err(PasswordError::Busy)
        ));
        let familiar = passwords.verify(password("x"), None, Lane::Familiar).await;
        assert!(familiar.is_ok(), "known addresses do not wait behind strangers");
        for one in waiting.iter().skip(1) {
            one.abort();
        }
        drop(taken);
        let mut waiting = waiting.into_iter();
        assert!(waiting.next().unwrap().await.unwrap(), "the waiting check is done");
        for aborted in waiting {
            assert!(aborted.await.is_err());
        }
        assert!(
            passwords.verify(password("x"), None, Lane::Strangers).await.is_ok(),
            "later checks are done, too"
        );
    }
}
