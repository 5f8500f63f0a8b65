//! Sends one message as e-mail, through the configured mail server. The administrator chooses this server, so its address may be private.

use crate::config::smtp::SmtpConfig;
use lettre::{
    Address, AsyncTransport, Message,
    message::{Mailbox, header::ContentType},
};
use percent_encoding::percent_decode_str;
use reqwest::{StatusCode, Url};

/// Why e-mail cannot be sent, and what to do.
pub(crate) const NO_SMTP: &str = "this server has no mail server; start it with --smtp URL --smtp-from ADDRESS, or set LOCKSTEP_SMTP \
     and LOCKSTEP_SMTP_FROM";

/// The addresses in `mailto:ada@example.org,ben@example.org`. `None` if the URL has no such addresses.
pub(crate) fn recipients(url: &Url) -> Option<Vec<Address>> {
    if url.scheme() != "mailto" || url.query().is_some() {
        return None;
    }
    let text = percent_decode_str(url.path()).decode_utf8().ok()?;
    text.split(',').map(|address| address.trim().parse().ok()).collect()
}

/// Sends an e-mail. Returns the mail server's reply code. `id` is the same in each attempt.
pub(super) async fn send(
    smtp: Option<&SmtpConfig>,
    id: &str,
    mailto: &Url,
    subject: String,
    text: String,
) -> Result<StatusCode, String> {
    let smtp = smtp.ok_or(NO_SMTP)?;
    let recipients = recipients(mailto).ok_or("the webhook's URL has no e-mail addresses")?;
    let message = Message::builder()
        .from(smtp.from.clone())
        .message_id(Some(format!("<{id}@{}>", smtp.from.email.domain())))
        .subject(subject)
        .header(ContentType::TEXT_PLAIN);
    let message = recipients.into_iter().fold(message, |message, to| message.to(Mailbox::from(to)));
    let message = message.body(text).map_err(|error| error.to_string())?;
    let reply = smtp.transport.send(message).await.map_err(|error| format!("the mail server: {error}"))?;
    StatusCode::from_u16(reply.code().into()).map_err(|error| error.to_string())
}
