//! Owns the pre-tokenizers of byte-level vocabularies. GGUF only names them (`tokenizer.ggml.pre`), so what each
//! name stands for is written down here, from the models' published tokenizers. A wrong one gives other ids for
//! the same text without any error, so an unknown name is refused.

use anyhow::{Result, bail};
use serde_json::{Value, json};

/// How text is split before the merges, and what goes with it.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    split: Split,
    nfc: bool,
    /// A word that is a token as a whole is that token, whatever its merges say.
    pub(super) ignore_merges: bool,
    /// Whether texts start with the begin token where the file does not say.
    pub(super) adds_bos: bool,
}

#[derive(Debug)]
enum Split {
    /// GPT-2's own pattern.
    Gpt2,
    /// The same behind single digits.
    DigitsThenGpt2,
    Pattern(&'static str),
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

static KNOWN: [PreTokenizer; 7] = [
    PreTokenizer {
        names: &["gpt-2", "phi-2", "default"],
        split: Split::Gpt2,
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder"],
        split: Split::DigitsThenGpt2,
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["command-r"],
        split: Split::DigitsThenGpt2,
        nfc: true,
        ignore_merges: false,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        split: Split::Pattern(LLAMA3),
        nfc: false,
        ignore_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        split: Split::Pattern(QWEN2),
        nfc: true,
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["gpt-4o"],
        split: Split::Pattern(GPT4O),
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["tekken"],
        split: Split::Pattern(TEKKEN),
        nfc: false,
        ignore_merges: true,
        adds_bos: true,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer of that name. Files from before there were names are of GPT-2's kind.
    pub(super) fn find(name: Option<&str>) -> Result<&'static Self> {
        let name = name.unwrap_or("default");
        match KNOWN.iter().find(|pre| pre.names.contains(&name)) {
            Some(pre) => Ok(pre),
            None => {
                let known: Vec<_> = KNOWN.iter().flat_map(|pre| pre.names).copied().collect();
                bail!(
                    "tokenizer.ggml.pre is {name:?}; known are {}. Name a folder with the model's own \
                     tokenizer.json by --tokenizer-path",
                    known.join(", ")
                )
            }
        }
    }

    pub(super) fn normalizer(&self) -> Value {
        if self.nfc { json!({"type": "NFC"}) } else { Value::Null }
    }

    pub(super) fn pre_tokenizer(&self) -> Value {
        match self.split {
            Split::Gpt2 => byte_level(true),
            Split::DigitsThenGpt2 => {
                sequence([json!({"type": "Digits", "individual_digits": true}), byte_level(true)])
            }
            Split::Pattern(pattern) => sequence([
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}),
                byte_level(false),
            ]),
        }
    }
}

fn sequence(steps: [Value; 2]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}
