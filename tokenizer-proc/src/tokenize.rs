//! Owns the tokenizer: text to ids and back, always off the event loop.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use proto::{TokenBytes, TokenId};
use tokenizers::Tokenizer;
use tokio::sync::Semaphore;

use crate::refusal::Refusal;

/// Texts that are encoded at the same time; more wait without holding a thread.
const PARALLEL_ENCODINGS: usize = 4;

/// Words whose tokens each thread remembers. They may be 255 bytes long and cost some kilobytes, nothing replaces them,
/// and clients choose them: the crate's 10 000 could come to a gigabyte over all threads.
const CACHED_WORDS: usize = 1000;

/// Whether the tokenizer may put its own tokens (begin of sequence, say) around a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpecialTokens {
    /// For raw text.
    Add,
    /// For a rendered chat template, which writes them itself.
    AsWritten,
}

/// The model's tokenizer. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Codec {
    tokenizer: Arc<Tokenizer>,
    /// Makes text, by the rules that streamed answers follow.
    bytes: Arc<TokenBytes>,
    pool: Arc<Semaphore>,
}

impl Codec {
    pub(crate) fn load(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("tokenizer.json");
        let mut tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| anyhow!("{error}"))
            .with_context(|| format!("reading {}", path.display()))?;
        // Both are training settings that some files carry; here they would silently change prompts.
        tokenizer.with_truncation(None).map_err(|error| anyhow!("{error}"))?;
        tokenizer.with_padding(None);
        let mut model = tokenizer.get_model().clone();
        model.resize_cache(CACHED_WORDS);
        tokenizer.with_model(model);
        let bytes = TokenBytes::load(dir).with_context(|| format!("reading {}", path.display()))?;
        let pool = Arc::new(Semaphore::new(PARALLEL_ENCODINGS));
        Ok(Self { tokenizer: Arc::new(tokenizer), bytes: Arc::new(bytes), pool })
    }

    pub(crate) async fn encode(&self, text: String, special: SpecialTokens) -> Result<Vec<TokenId>, Refusal> {
        self.off_loop(move |tokenizer| {
            tokenizer
                .encode_fast(text, special == SpecialTokens::Add)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|error| Refusal::Invalid(format!("cannot tokenize the prompt: {error}")))
        })
        .await
    }

    pub(crate) async fn decode(
        &self,
        ids: Vec<TokenId>,
        skip_special_tokens: bool,
    ) -> Result<String, Refusal> {
        let bytes = Arc::clone(&self.bytes);
        self.off_loop(move |_| Ok(bytes.decode(&ids, skip_special_tokens))).await
    }

    /// The text of one token alone; an id that the tokenizer does not define is empty text.
    pub(crate) fn token_text(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The bytes of one token alone: a part of a character where `token_text` can only show U+FFFD.
    pub(crate) fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.bytes.bytes(id)
    }

    /// A text that differs between tokens where it can: fragments of characters show as one Latin-1 character
    /// per byte.
    pub(crate) fn token_label(&self, id: TokenId) -> String {
        let text = self.token_text(id);
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            return text;
        }
        self.token_bytes(id).iter().copied().map(char::from).collect()
    }

    async fn off_loop<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tokenizer) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let permit = Arc::clone(&self.pool)
            .acquire_owned()
            .await
            .map_err(|_| Refusal::Unavailable("The server is stopping.".to_owned()))?;
        let tokenizer = Arc::clone(&self.tokenizer);
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&tokenizer)
        })
        .await
        .map_err(|error| Refusal::Internal(format!("the tokenizer failed: {error}")))?
    }
}
