//! Owns the filter `tojson`: Python's `json.dumps`, as transformers sets it up.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Unlike plain Jinja2's filter, this one escapes no HTML and keeps characters outside ASCII.
pub(super) fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(usize::try_from(width)?)),
    };
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")?.map(<[String; 2]>::try_from) {
        Some(Ok([item, key])) => (item, key),
        Some(Err(_)) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair of strings"));
        }
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        key,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.dump(value, 0, &mut out)?;
    Ok(out)
}

/// The arguments of `json.dumps`.
struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Style {
    fn dump(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.dump_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.dump_entries(('[', ']'), items, depth, out)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let entries = keys.into_iter().map(|key| Ok((Some(key_text(&key)?), value.get_item(&key)?)));
                self.dump_entries(('{', '}'), entries.collect::<Result<_, Error>>()?, depth, out)?;
            }
            kind => {
                let message = format!("a value of kind {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn dump_entries(
        &self,
        (open, close): (char, char),
        entries: Vec<(Option<String>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        out.push(open);
        let any = !entries.is_empty();
        for (at, (key, value)) in entries.into_iter().enumerate() {
            separate(at, &self.item, out);
            self.new_line(depth + 1, out);
            if let Some(key) = key {
                self.dump_string(&key, out);
                out.push_str(&self.key);
            }
            self.dump(&value, depth + 1, out)?;
        }
        if any {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn dump_string(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            out.push_str(&quoted);
            return;
        }
        let mut units = [0; 2];
        for c in quoted.chars() {
            if c.is_ascii() && c != '\u{7f}' {
                out.push(c);
            } else {
                c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            }
        }
    }
}

/// A key as `json.dumps` turns it into a string.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(number(key)?),
        kind => {
            let message = format!("a key of kind {kind} is not JSON serializable");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

fn separate(at: usize, separator: &str, out: &mut String) {
    if at > 0 {
        out.push_str(separator);
    }
}

/// An integer as it is, a float in Python's shortest form.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() { Ok(value.to_string()) } else { Ok(float(f64::try_from(value.clone())?)) }
}

/// An exponent below 1e-4 and from 1e16 on, and always a point or an exponent.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    match exponent.parse::<i32>().expect("the exponent is a number") {
        exponent @ -4..16 => {
            let plain = value.to_string();
            if exponent >= 0 && !plain.contains('.') { format!("{plain}.0") } else { plain }
        }
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
    }
}
