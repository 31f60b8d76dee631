//! Compiles the C++ shim against libtorch's headers and lets this package's binaries find libtorch's libraries.

use std::path::Path;

/// The kernels once per instruction set, by the name of the table each makes.
const KERNELS: [(&str, &[&str]); 4] = [
    ("kernels_baseline", &["-march=x86-64"]),
    ("kernels_v3", &["-march=x86-64-v3"]),
    ("kernels_v4", &["-march=x86-64-v4"]),
    ("kernels_amx", &["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]),
];

fn main() {
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys is a direct dependency");
    let lib = std::fs::canonicalize(&lib).unwrap_or_else(|_| lib.into());
    let include = lib.parent().expect("libtorch/lib has a parent").join("include");
    println!("cargo:rerun-if-changed=shim");

    for (table, arch) in KERNELS {
        base()
            .flags(arch)
            .flag("-mprefer-vector-width=512")
            .flag("-Wno-psabi")
            .define("DH_KERNELS", table)
            .file("shim/kernels.cpp")
            .compile(table);
    }
    // at::parallel_for is inline and does nothing in parallel without -fopenmp.
    base()
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .flag("-fopenmp")
        .warnings(false)
        .file("shim/shim.cpp")
        .file("shim/ops.cpp")
        .compile("shim");
    // Static archives are searched in order: the shim's users come before what it uses.
    for (table, _) in KERNELS {
        println!("cargo:rustc-link-lib=static={table}");
    }
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-lib=gomp");
    link_paths(&lib);
}

fn base() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(3);
    build
}

/// First where libtorch was at build time, then beside the repository's `target` folder, so that neither an
/// environment variable nor an unmoved tree is needed.
fn link_paths(lib: &Path) {
    println!("cargo:rustc-link-search=native={}", lib.display());
    for path in
        [lib.display().to_string().as_str(), "$ORIGIN/../../libtorch/lib", "$ORIGIN/../../../libtorch/lib"]
    {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{path}");
    }
}
