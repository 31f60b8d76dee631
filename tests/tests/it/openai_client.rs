//! OpenAI's own Python client, in a virtual environment of its own, against a live server.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::ngram;

const PACKAGE: &str = "openai==3.57.0";

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?} ended with {}\n{text}", output.status);
    text
}

/// The environment's Python; made once, in the target folder.
fn python() -> PathBuf {
    let dir = tests::target_dir().join("py-openai");
    let python = dir.join("bin/python");
    let stamp = dir.join("installed");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == PACKAGE) {
        return python;
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&dir));
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]));
    std::fs::write(stamp, PACKAGE).unwrap();
    python
}

#[test]
fn the_official_client_works() {
    let python = python();
    let server = ngram();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/py/openai_client.py");
    let said = run(Command::new(python).arg(script).arg(server.base()));
    assert!(said.contains("all checks passed"), "{said}");
}
