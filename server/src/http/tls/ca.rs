//! A certificate authority (CA) of the server's own: for teams without one. Clients trust its certificate once, and the server
//! signs and renews its own certificates with it.
//!
//! It lies in the folder `ca` of the data directory: `ca.crt` to give away, `ca.key` to keep, `server.pem` with what the server
//! serves. `issued.jsonl` lists what was issued, and `ca.crl` what of it was revoked.

mod issued;

pub use issued::{Kind, Record, has_revoked, revocation_list, serial_text};

use super::{
    certificate::Facts,
    files::{self, fingerprint, minute},
    names::is_name,
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use std::{
    fs::{self, DirBuilder, File},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use time::{Duration, OffsetDateTime};

const AUTHORITY_DAYS: i64 = 3650;
/// A certificate of a private CA is refused by some clients when it is valid for longer.
pub const MOST_DAYS: u32 = 825;
/// What it is valid for when nothing is said.
pub const DAYS: u32 = 397;
/// Clocks that are slow must not find it to be of the future.
const EARLIER: Duration = Duration::hours(1);
/// Of a common name.
const COMMON_NAME_CHARS: usize = 64;

/// An authority that can sign.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
    pem: String,
    facts: Facts,
    fingerprint: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate that was issued, and its key.
#[derive(Debug)]
pub struct Issued {
    /// It and the authority's, in PEM.
    pub chain: String,
    /// In PEM.
    pub key: String,
}

/// The folder of a data directory where its authority lies.
pub fn folder(data_dir: &Path) -> PathBuf {
    data_dir.join("ca")
}

/// Whether a data directory has an authority.
pub fn exists(data_dir: &Path) -> bool {
    folder(data_dir).join("ca.crt").exists()
}

impl Authority {
    /// Makes one in a data directory.
    ///
    /// # Errors
    /// There is one already, or it cannot be written.
    pub fn init(data_dir: &Path) -> Result<Self, String> {
        let folder = folder(data_dir);
        let id = uuid::Uuid::new_v4().simple().to_string();
        let (params, key) = new_authority(&id[..8]).map_err(|error| error.to_string())?;
        let certificate = params.self_signed(&key).map_err(|error| error.to_string())?;
        // Complete or not at all: whoever else makes one at the same moment has it first or finds this one.
        let unfinished = data_dir.join(format!("ca.{id}"));
        let written = || -> std::io::Result<()> {
            crate::util::private::data_dir(data_dir)?;
            DirBuilder::new().mode(0o700).create(&unfinished)?;
            write(&unfinished.join("ca.key"), key.serialize_pem().as_bytes())?;
            write(&unfinished.join("ca.crt"), certificate.pem().as_bytes())?;
            // Refused where there is a folder with anything in it.
            fs::rename(&unfinished, &folder)?;
            File::open(data_dir)?.sync_all()
        };
        written().map_err(|error| {
            // What is left of it is of no use.
            let _ = fs::remove_dir_all(&unfinished);
            if folder.exists() {
                format!(
                    "{} is there already; `lockstep ca show` prints its certificate. Every client has to trust a new one: to \
                     make it nevertheless, move the folder away first",
                    folder.display()
                )
            } else {
                format!("{}: {error}", folder.display())
            }
        })?;
        Self::open(data_dir)
    }

    /// Reads that of a data directory.
    ///
    /// # Errors
    /// There is none, or none of ours, or others can read its key.
    pub fn open(data_dir: &Path) -> Result<Self, String> {
        let folder = folder(data_dir);
        let (certificate, key) = (folder.join("ca.crt"), folder.join("ca.key"));
        if !certificate.exists() {
            return Err(format!("there is no {}; make it with `lockstep ca init`", certificate.display()));
        }
        // Its key must be that of its certificate, and its time must not be over.
        let (der, facts) = authority_certificate(&certificate)?;
        let pem = String::from_utf8(files::read(&key, true)?).map_err(|_| not_ours(&key))?;
        let pair = KeyPair::from_pem(&pem).map_err(|_| not_ours(&key))?;
        files::pair(&certificate, &key)?;
        if facts.not_after < crate::now() {
            return Err(format!(
                "the authority {} expired at {}; move the folder away, run `lockstep ca init`, and give the new certificate \
                 to all clients",
                certificate.display(),
                minute(facts.not_after)
            ));
        }
        let name = facts.common_name.clone().ok_or_else(|| not_ours(&certificate))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = AUTHORITY_USES.to_vec();
        let pem = String::from_utf8(files::read(&certificate, false)?).map_err(|_| not_ours(&certificate))?;
        Ok(Self { folder, pem, facts, fingerprint: fingerprint(&der), issuer: Issuer::new(params, pair) })
    }

    /// The authority's certificate, to be given to browsers and clients.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// What it says of itself.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Its SHA-256, by which people can compare it.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// A certificate for a server with these names.
    ///
    /// # Errors
    /// A name that is none, or too many days.
    pub fn issue(&self, names: &[String], days: u32) -> Result<Issued, String> {
        if let Some(name) = names.iter().find(|name| !is_name(name)) {
            return Err(format!(
                "{name:?} is no DNS name and no address; an example is lockstep.example.org"
            ));
        }
        let first = names.first().ok_or("a certificate is for at least one name")?;
        self.sign(Kind::Server, first, names, days)
    }

    /// A certificate by which the agent of this name shows who it is.
    ///
    /// # Errors
    /// A name that no agent can have, or too many days.
    pub fn issue_agent(&self, name: &str, days: u32) -> Result<Issued, String> {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if name.is_empty()
            || name.len() > COMMON_NAME_CHARS
            || !name.bytes().all(is_plain)
            || name.starts_with(['-', '.'])
        {
            return Err(format!(
                "{name:?} is no name for an agent's certificate: 1 to {COMMON_NAME_CHARS} letters, digits, '-', '_' and '.'; an \
                 example is node-a"
            ));
        }
        let names = if is_name(name) { vec![name.to_owned()] } else { Vec::new() };
        self.sign(Kind::Agent, name, &names, days)
    }

    fn sign(&self, kind: Kind, first: &str, names: &[String], days: u32) -> Result<Issued, String> {
        if !(1..=MOST_DAYS).contains(&days) {
            return Err(format!("a certificate is valid for 1 to {MOST_DAYS} days"));
        }
        let now = OffsetDateTime::now_utc();
        let serial = issued::new_serial();
        // An agent's begins when it is issued: one that was issued before its name was taken away stays without effect.
        let not_before = if kind == Kind::Agent { now } else { now - EARLIER };
        let not_after = now + Duration::days(days.into());
        let issue = || -> Result<Issued, rcgen::Error> {
            let mut params = CertificateParams::new(names)?;
            params.distinguished_name = rcgen::DistinguishedName::new();
            if first.len() <= COMMON_NAME_CHARS {
                params.distinguished_name.push(DnType::CommonName, first);
            }
            params.serial_number = Some(SerialNumber::from(serial.clone()));
            params.not_before = not_before;
            params.not_after = not_after;
            params.is_ca = IsCa::ExplicitNoCa;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![match kind {
                Kind::Agent => ExtendedKeyUsagePurpose::ClientAuth,
                Kind::Server | Kind::Unknown => ExtendedKeyUsagePurpose::ServerAuth,
            }];
            params.use_authority_key_identifier_extension = true;
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok(Issued { chain: format!("{}{}", certificate.pem(), self.pem), key: key.serialize_pem() })
        };
        let issued = issue().map_err(|error| error.to_string())?;
        let at = |time: OffsetDateTime| {
            jiff::Timestamp::from_second(time.unix_timestamp()).map_err(|error| error.to_string())
        };
        // Noted before it is given away: what is not in the list is harder to revoke.
        self.note(Record {
            serial: serial_text(&serial),
            name: first.to_owned(),
            kind,
            not_before: at(not_before)?,
            not_after: at(not_after)?,
            revoked_at: None,
        })?;
        Ok(issued)
    }

    /// Where the server's own certificate lies, chain and key in one file.
    pub(super) fn server_file(&self) -> PathBuf {
        self.folder.join("server.pem")
    }

    /// Issues the server's own certificate. The file is the old one or the new one at any moment.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn issue_for_server(&self, names: &[String]) -> Result<(), String> {
        let issued = self.issue(names, DAYS)?;
        self.replace("server.pem", format!("{}{}", issued.chain, issued.key).as_bytes())
    }
}

const AUTHORITY_USES: [KeyUsagePurpose; 2] = [KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];

fn new_authority(id: &str) -> Result<(CertificateParams, KeyPair), rcgen::Error> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let host: String = host.chars().filter(char::is_ascii_graphic).take(40).collect();
    params.distinguished_name.push(DnType::CommonName, format!("Lockstep CA {id} {host}"));
    let now = OffsetDateTime::now_utc();
    params.not_before = now - EARLIER;
    params.not_after = now + Duration::days(AUTHORITY_DAYS);
    // It signs certificates of servers and agents, no other authorities.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = AUTHORITY_USES.to_vec();
    Ok((params, KeyPair::generate()?))
}

/// The certificate of an authority, and what it says.
///
/// # Errors
/// It cannot be read.
fn authority_certificate(path: &Path) -> Result<(Vec<u8>, Facts), String> {
    let der = files::certificates(path)?.swap_remove(0).to_vec();
    let facts = Facts::read(&der).ok_or_else(|| not_ours(path))?;
    Ok((der, facts))
}

fn not_ours(path: &Path) -> String {
    format!("{} is not as `lockstep ca init` makes it; put back what was there", path.display())
}

/// Writes a file that nobody else can read; it must not be there yet.
fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}
