//! Owns `strftime_now`: today's date in the words of C's `strftime`, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// A moment on the calendar.
struct Moment {
    year: i64,
    /// From 1.
    month: i64,
    /// From 1.
    day: i64,
    /// From 0, Monday.
    weekday: i64,
    /// From 1.
    day_of_year: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

/// Writes `now` in `format`; a directive that is not known is an error, not left in the prompt.
pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, String> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64);
    let moment = Moment::from_unix(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = chars.next();
        }
        let text = directive.and_then(|directive| moment.directive(directive));
        let text = text.ok_or_else(|| format!("strftime_now: unknown directive in {format:?}"))?;
        out.push_str(if unpadded { without_padding(&text) } else { &text });
    }
    Ok(out)
}

fn without_padding(text: &str) -> &str {
    let trimmed = text.trim_start_matches(['0', ' ']);
    if trimmed.is_empty() { "0" } else { trimmed }
}

impl Moment {
    fn from_unix(seconds: i64) -> Self {
        let (days, time) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Years are counted from March, so that the leap day is a year's last: 146,097 days in 400 years.
        let since_march_0 = days + 719_468;
        let era = since_march_0.div_euclid(146_097);
        let day_of_era = since_march_0.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_in_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_in_march_year + 2) / 153;
        let day = day_in_march_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let day_of_year = match month {
            1 | 2 => day_in_march_year - 305,
            _ => day_in_march_year + 60 + i64::from(leap),
        };
        Self {
            year,
            month,
            day,
            weekday: (days + 3).rem_euclid(7),
            day_of_year,
            hour: time / 3_600,
            minute: time / 60 % 60,
            second: time % 60,
        }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let half_day_hour = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{half_day_hour:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => MONTHS[self.month as usize - 1].to_owned(),
            'b' | 'h' => MONTHS[self.month as usize - 1][..3].to_owned(),
            'A' => WEEKDAYS[self.weekday as usize].to_owned(),
            'a' => WEEKDAYS[self.weekday as usize][..3].to_owned(),
            'u' => (self.weekday + 1).to_string(),
            'w' => ((self.weekday + 1) % 7).to_string(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[track_caller]
    fn check(seconds: u64, format: &str, expect: &str) {
        assert_eq!(strftime(format, UNIX_EPOCH + Duration::from_secs(seconds)).as_deref(), Ok(expect));
    }

    #[test]
    fn dates_read_as_in_c() {
        check(0, "%A %d %B %Y %H:%M:%S %j", "Thursday 01 January 1970 00:00:00 001");
        check(951_782_400, "%Y-%m-%d %a %j", "2000-02-29 Tue 060");
        check(978_220_800, "%F %j", "2000-12-31 366");
        check(1_740_787_199, "%d %b %Y %I:%M %p", "28 Feb 2025 11:59 PM");
        check(1_740_787_200, "%-d/%-m/%y %e %-H|%u%w", "1/3/25  1 0|66");
        check(4_107_542_400, "%F %j 100%%", "2100-03-01 060 100%");
    }

    #[test]
    fn unknown_directives_are_refused() {
        for format in ["%Q", "%", "%-"] {
            assert!(strftime(format, UNIX_EPOCH).unwrap_err().contains("unknown directive"), "{format}");
        }
    }
}
