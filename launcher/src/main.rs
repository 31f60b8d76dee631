//! The launcher's entry point.

fn main() -> std::process::ExitCode {
    launcher::main(std::env::args_os())
}
