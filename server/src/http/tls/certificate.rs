//! The content of a certificate: names and validity. Signatures are not verified here, because clients decide whether to trust a
//! certificate.

use jiff::Timestamp;
use std::{fmt, net::IpAddr};
use x509_parser::{
    certificate::{Validity, X509Certificate},
    extensions::GeneralName,
    prelude::FromDer,
    revocation_list::CertificateRevocationList,
    time::ASN1Time,
};

/// A name for which a certificate is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// A DNS name. The first label may be `*`.
    Dns(String),
    /// An IP address.
    Address(IpAddr),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Dns(name) => f.write_str(name),
            Name::Address(address) => address.fmt(f),
        }
    }
}

impl Name {
    /// Whether the name matches `host` (without port and brackets). A `*` stands for one label.
    pub fn matches(&self, host: &str) -> bool {
        match self {
            Name::Address(address) => host.parse() == Ok(*address),
            Name::Dns(name) => match name.strip_prefix("*.") {
                Some(rest) => host.split_once('.').is_some_and(|(label, parent)| {
                    !label.is_empty() && parent.eq_ignore_ascii_case(rest) && host.parse::<IpAddr>().is_err()
                }),
                None => name.eq_ignore_ascii_case(host),
            },
        }
    }
}

/// Facts of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The serial number, the most significant byte first.
    pub serial: Vec<u8>,
    /// The subject's last common name.
    pub common_name: Option<String>,
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity.
    pub not_after: Timestamp,
    /// The subject alternative names, which clients compare with the address that they connect to.
    pub names: Vec<Name>,
}

impl Facts {
    /// Reads a certificate (DER). `None` if it is not an X.509 certificate.
    pub fn read(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let common_name = certificate.subject().iter_common_name().last();
        let common_name = common_name.and_then(|name| String::from_utf8(name.as_slice().to_vec()).ok());
        let mut names = Vec::new();
        for name in
            certificate.subject_alternative_name().ok()?.iter().flat_map(|all| &all.value.general_names)
        {
            match name {
                GeneralName::DNSName(name) => names.push(Name::Dns((*name).to_owned())),
                GeneralName::IPAddress(bytes) => names.push(Name::Address(address(bytes)?)),
                // An invalid DNS name (tag 2) or address (tag 7). Names of other kinds are ignored.
                GeneralName::Invalid(tag, _) if matches!(tag.0, 2 | 7) => return None,
                _ => {}
            }
        }
        let Validity { not_before, not_after } = certificate.validity();
        Some(Self {
            serial: certificate.raw_serial().to_vec(),
            common_name,
            not_before: timestamp(*not_before),
            not_after: timestamp(*not_after),
            names,
        })
    }

    /// Whole days until the certificate expires; 0 if it has expired.
    pub fn days_left(&self, now: Timestamp) -> i64 {
        (self.not_after.as_second() - now.as_second()).max(0) / DAY
    }

    /// Whether the certificate expires soon: in fewer than 90 days, or, if it is valid for at most 90 days, in less than a quarter of its
    /// validity.
    pub fn expires_soon(&self, now: Timestamp) -> bool {
        let left = self.not_after.as_second() - now.as_second();
        let life = self.not_after.as_second() - self.not_before.as_second();
        left < if life > SOON { SOON } else { life / 4 }
    }

    /// The names, separated by commas.
    pub fn names_in_words(&self) -> String {
        self.names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// When the next version of a certificate revocation list is due (RFC 5280, section 5.1). `None` if the list does not say, or cannot be
/// read.
pub(super) fn next_update(list: &[u8]) -> Option<Timestamp> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    list.next_update().map(timestamp)
}

const DAY: i64 = 24 * 3600;
/// A certificate expires soon if it is valid for fewer seconds. For certificates with a shorter validity, see [`Facts::expires_soon`].
const SOON: i64 = 90 * DAY;

/// Converts a time. Certificates without an end have the last second of the year 9999, which is later than [`Timestamp::MAX`].
fn timestamp(time: ASN1Time) -> Timestamp {
    Timestamp::from_second(time.timestamp()).unwrap_or(Timestamp::MAX)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, date_time_ymd};

    fn certificate(change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let names = ["lockstep.example.org", "*.lab.example", "10.1.2.3", "2001:db8::7"].map(str::to_owned);
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = date_time_ymd(2026, 2, 3);
        params.not_after = date_time_ymd(2027, 2, 3);
        change(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn names_and_dates_of_certificates_are_read() {
        let facts = Facts::read(&certificate(|_| {})).unwrap();
        assert_eq!(facts.not_before, "2026-02-03T00:00:00Z".parse().unwrap());
        assert_eq!(facts.not_after, "2027-02-03T00:00:00Z".parse().unwrap());
        assert_eq!(facts.names_in_words(), "lockstep.example.org, *.lab.example, 10.1.2.3, 2001:db8::7");
        assert_eq!(facts.common_name.as_deref(), Some("rcgen self signed cert"));
        let far = Facts::read(&certificate(|p| p.not_after = date_time_ymd(2080, 1, 1))).unwrap();
        assert_eq!(far.not_after, "2080-01-01T00:00:00Z".parse().unwrap());
        let never = Facts::read(&certificate(|p| p.not_after = date_time_ymd(9999, 12, 31))).unwrap();
        assert_eq!(never.not_after, Timestamp::MAX);
        let subject = |p: &mut CertificateParams| p.distinguished_name.push(DnType::OrganizationName, "Lab");
        let of_lab = Facts::read(&certificate(subject)).unwrap();
        assert_eq!(of_lab.common_name.as_deref(), Some("rcgen self signed cert"));
        assert_eq!(Facts::read(&certificate(|p| p.subject_alt_names.clear())).unwrap().names, []);
    }

    #[test]
    fn incomplete_certificates_are_refused() {
        let whole = certificate(|_| {});
        for length in 0..whole.len() {
            assert_eq!(Facts::read(&whole[..length]), None, "{length}");
        }
        // Changed bytes must not cause a panic.
        for at in 0..whole.len() {
            for byte in [0, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = byte;
                let _ = Facts::read(&damaged);
            }
        }
    }

    #[test]
    fn the_next_update_of_a_revocation_list_is_read() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let list = rcgen::CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 2, 3),
            next_update: date_time_ymd(2026, 2, 10),
            crl_number: rcgen::SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&rcgen::Issuer::new(params, key)).unwrap();
        assert_eq!(next_update(list.der()), Some("2026-02-10T00:00:00Z".parse().unwrap()));
        for length in 0..80 {
            assert_eq!(next_update(&list.der()[..length]), None);
        }
        assert_eq!(next_update(&certificate(|_| {})), None);
    }

    #[test]
    fn a_wildcard_matches_one_label() {
        let star = Name::Dns("*.lab.example".into());
        for (host, fits) in [
            ("a.lab.example", true),
            ("A.LAB.example", true),
            ("lab.example", false),
            ("a.b.lab.example", false),
            (".lab.example", false),
        ] {
            assert_eq!(star.matches(host), fits, "{host}");
        }
        assert!(Name::Address("::1".parse().unwrap()).matches("0:0:0:0:0:0:0:1"));
    }

    #[test]
    fn certificates_expire_soon_90_days_or_a_quarter_of_their_life_before_the_end() {
        let facts = |days: i64| Facts {
            serial: Vec::new(),
            common_name: None,
            not_before: Timestamp::UNIX_EPOCH,
            not_after: Timestamp::from_second(days * DAY).unwrap(),
            names: Vec::new(),
        };
        let at = |day: i64| Timestamp::from_second(day * DAY).unwrap();
        assert!(!facts(400).expires_soon(at(310)) && facts(400).expires_soon(at(311)));
        for days in [91, 180, 359, 360] {
            assert!(
                !facts(days).expires_soon(at(days - 90)) && facts(days).expires_soon(at(days - 89)),
                "{days}"
            );
        }
        assert!(!facts(90).expires_soon(at(67)) && facts(90).expires_soon(at(68)));
        assert!(!facts(80).expires_soon(at(60)) && facts(80).expires_soon(at(61)));
        assert_eq!((facts(80).days_left(at(61)), facts(80).days_left(at(90))), (19, 0));
    }
}
