//! The SMTP server through which webhooks send e-mail.

use lettre::{AsyncSmtpTransport, Tokio1Executor, message::Mailbox};

/// How the server sends e-mail. Its `Debug` form has no password.
#[derive(Debug, Clone)]
pub struct SmtpConfig {
    pub(crate) transport: AsyncSmtpTransport<Tokio1Executor>,
    /// The sender of every e-mail.
    pub(crate) from: Mailbox,
}

impl SmtpConfig {
    /// `url` is `smtps://USER:PASSWORD@HOST` for TLS, `smtp://USER:PASSWORD@HOST?tls=required` for STARTTLS, or `smtp://HOST` without
    /// encryption. User and password may be left out. `from` is an address, which may have a name: `Lockstep <lockstep@example.org>`.
    ///
    /// # Errors
    /// The URL or the address is invalid.
    pub fn new(url: &str, from: &str) -> Result<Self, String> {
        let transport = AsyncSmtpTransport::<Tokio1Executor>::from_url(url).map_err(|error| {
            format!("--smtp: {error}; an example is smtps://USER:PASSWORD@mail.example.org")
        })?;
        let from = from.parse::<Mailbox>().map_err(|error| {
            format!("--smtp-from {from:?}: {error}; an example is 'Lockstep <lockstep@example.org>'")
        })?;
        Ok(Self { transport: transport.build(), from })
    }
}
