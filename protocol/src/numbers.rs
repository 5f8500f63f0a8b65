//! Numbers for people, the same on every page and in every command.

/// Formats `0.886` as `88.6 %`. Ties are rounded up, as browsers do: 84.25 is 84.3 everywhere.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", (share * 100.0).next_up())
}

/// Formats a loss or a learning rate with four decimals; a small value with three digits and a power of ten.
pub fn value(v: f64) -> String {
    let magnitude = v.abs();
    if !v.is_finite() {
        "not finite".into()
    } else if magnitude >= 1e5 || (magnitude > 0.0 && magnitude < 1e-3) {
        format!("{v:.2e}")
    } else if magnitude >= 100.0 {
        format!("{v:.1}")
    } else {
        format!("{v:.4}")
    }
}

/// Formats a loss with four decimals; the loss of a run that diverges with a power of ten.
pub fn loss(v: f64) -> String {
    if v.abs() < 1e6 || !v.is_finite() { format!("{v:.4}") } else { format!("{v:.2e}") }
}

/// Converts through decimal text, so that a float32 0.1 becomes the float64 0.1 and not 0.10000000149.
pub fn exact(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// With fewer pictures than this, an accuracy is shown with its standard error.
const FEW_PICTURES: u64 = 10_000;

/// Formats an accuracy; if its number of pictures is known, with the standard error in percent and this number:
/// `84.0 % ± 2.6 of 200 pictures`.
pub fn accuracy_of(accuracy: f64, pictures: Option<u64>) -> String {
    let Some(pictures) = pictures else { return percent(accuracy) };
    format!("{}{} of {}", percent(accuracy), standard_error(accuracy, pictures), plural(pictures, "picture"))
}

/// Formats the standard error of an accuracy, in percent: ` ± 2.6`. Empty for many pictures. If all or no pictures are classified
/// correctly, the error's formula gives 0, so an end of the confidence interval is shown instead: ` (at least 84.5 %)`.
pub fn standard_error(accuracy: f64, pictures: u64) -> String {
    if pictures == 0 || pictures >= FEW_PICTURES {
        return String::new();
    }
    let [low, high] = confidence_interval(accuracy, pictures);
    if accuracy <= 0.0 {
        return format!(" (at most {})", percent(high));
    } else if accuracy >= 1.0 {
        return format!(" (at least {})", percent(low));
    }
    let error = accuracy * (1.0 - accuracy) / pictures as f64;
    format!(" ± {:.1}", 100.0 * error.sqrt())
}

/// The 95 % confidence interval of an accuracy (Wilson 1927), which is wide for few pictures, even at 0 and 1.
pub fn confidence_interval(accuracy: f64, pictures: u64) -> [f64; 2] {
    const Z: f64 = 1.96;
    let n = pictures.max(1) as f64;
    let centre = accuracy + Z * Z / (2.0 * n);
    let variance = accuracy * (1.0 - accuracy) / n + Z * Z / (4.0 * n * n);
    let margin = Z * variance.max(0.0).sqrt();
    [centre - margin, centre + margin].map(|end| (end / (1.0 + Z * Z / n)).clamp(0.0, 1.0))
}

/// Formats the standard error of an accuracy, in percent, and the number of pictures: ` ± 2.6 of 200`. Lists and tables show this text
/// after the accuracy. Empty for many pictures and for an unknown number. The same as `uncertainty` in `static/numbers.js`.
pub fn uncertainty(accuracy: f64, pictures: Option<u64>) -> String {
    let few = pictures.filter(|pictures| (1..FEW_PICTURES).contains(pictures));
    few.map_or_else(String::new, |pictures| format!("{} of {pictures}", standard_error(accuracy, pictures)))
}

/// Formats images per second: `38940.2` as `38940`, `9.73` as `9.7`. Pages also separate thousands by commas.
pub fn rate(v: f64) -> String {
    if v >= 99.95 { format!("{v:.0}") } else { format!("{:.1}", v.max(0.0)) }
}

/// Formats `2736` as `2,736`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a duration in seconds, rounded down: `40 s`, `12 min`, `3 h`, `5 d`. Days begin at 48 hours.
pub fn format_duration(secs: i64) -> String {
    match secs {
        ..60 => format!("{secs} s"),
        60..3600 => format!("{} min", secs / 60),
        3600..172_800 => format!("{} h", secs / 3600),
        _ => format!("{} d", secs / 86_400),
    }
}

/// Formats a number with its noun: `1 rank`, `4 ranks`, `2 classes`.
pub fn plural(n: u64, noun: &str) -> String {
    format!("{n} {}", nouns(n, noun))
}

/// The noun in singular or plural, without the number: `rank`, `ranks`. The same as `nouns` in `static/numbers.js`.
pub fn nouns(n: u64, noun: &str) -> String {
    let needs_es = ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end));
    match n {
        1 => noun.to_owned(),
        _ if needs_es => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_durations_have_larger_units() {
        for (secs, shown) in
            [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (172_799, "47 h"), (172_800, "2 d")]
        {
            assert_eq!(format_duration(secs), shown);
        }
    }

    #[test]
    fn speeds_below_100_have_a_decimal() {
        let words = [5.44, 99.94, 99.95, 99.96, 1010.4, -0.1].map(rate);
        assert_eq!(words, ["5.4", "99.9", "100", "100", "1010", "0.0"]);
    }

    #[test]
    fn large_losses_have_a_power_of_ten() {
        let words = [2.5, 999_999.0, 7.57e33, f64::NAN].map(loss);
        assert_eq!(words, ["2.5000", "999999.0000", "7.57e33", "NaN"]);
    }

    #[test]
    fn the_confidence_interval_of_few_pictures_is_wide() {
        for (accuracy, pictures, expected) in
            [(0.84, 200, "78.3 % to 88.4 %"), (1.0, 4, "51.0 % to 100.0 %"), (0.0, 4, "0.0 % to 49.0 %")]
        {
            let [low, high] = confidence_interval(accuracy, pictures).map(percent);
            assert_eq!(format!("{low} to {high}"), expected, "{accuracy} of {pictures}");
        }
    }

    #[test]
    fn an_accuracy_of_few_pictures_has_its_standard_error() {
        for (accuracy, pictures, words) in [
            (0.84, 200, "84.0 % ± 2.6 of 200 pictures"),
            (1.0, 1, "100.0 % (at least 20.7 %) of 1 picture"),
            (0.9, 9_999, "90.0 % ± 0.3 of 9999 pictures"),
            (0.9, 10_000, "90.0 % of 10000 pictures"),
        ] {
            assert_eq!(accuracy_of(accuracy, Some(pictures)), words);
        }
    }
}
