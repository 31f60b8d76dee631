//! The table of flags in README.md is what `--help` says. `UPDATE_README=1 cargo test -p launcher --test readme`
//! writes it anew.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic where it stands")]

use std::fmt::Write;
use std::path::Path;

use clap::{ArgAction, CommandFactory};

const BEGIN: &str = "<!-- flags: written by launcher/tests/readme.rs -->\n";
const END: &str = "<!-- end of flags -->";

fn table() -> String {
    let mut text = String::from("| Flag | Default | Meaning |\n|---|---|---|\n");
    for argument in launcher::Args::command().get_arguments() {
        let Some(long) = argument.get_long().filter(|long| !["help", "version"].contains(long)) else {
            continue;
        };
        let value = match argument.get_action() {
            ArgAction::Set => {
                let name = argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name);
                format!(" {name}")
            }
            _ => String::new(),
        };
        let alias = argument.get_visible_aliases().unwrap_or_default();
        let alias = alias.first().map_or(String::new(), |alias| format!(", `--{alias}`"));
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        // A default that depends on something is told in words, behind the help.
        let (help, in_words) = match help.split_once(" [default: ") {
            Some((help, default)) => (help.to_owned(), default.trim_end_matches(']').to_owned()),
            None => (help, String::new()),
        };
        let literal =
            argument.get_default_values().first().map(|value| format!("`{}`", value.to_string_lossy()));
        let default = match argument.get_action() {
            ArgAction::Set => literal.unwrap_or(in_words),
            _ => String::new(),
        };
        let choices: Vec<_> =
            argument.get_possible_values().iter().map(|v| format!("`{}`", v.get_name())).collect();
        let choices = match argument.get_action() {
            ArgAction::Set if !choices.is_empty() => format!(": {}", choices.join(", ")),
            _ => String::new(),
        };
        writeln!(text, "| `--{long}{value}`{alias} | {default} | {help}{choices} |").unwrap();
    }
    text
}

#[test]
fn the_flags_are_described_as_they_are() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = readme.split_once(BEGIN).expect("the table begins with its marker");
    let (written, tail) = rest.split_once(END).expect("the table ends with its marker");
    let expected = table();
    if std::env::var_os("UPDATE_README").is_some() {
        std::fs::write(path, format!("{head}{BEGIN}{expected}{END}{tail}")).unwrap();
        return;
    }
    assert_eq!(written, expected, "run this test with UPDATE_README=1");
}
