//! Owns the bytes of every message: msgpack with field names, so that a field added later is skipped by an older
//! reader and defaulted by a newer one. Knows nothing of sockets; whatever arrives is treated as hostile.

mod shape;

use serde::{Serialize, de::DeserializeOwned};

pub use shape::ShapeError;

/// The version said in every hello. Grows when a peer of the previous version could misread a message.
pub const PROTOCOL_VERSION: u16 = 2;

/// Longest message in bytes, both ways.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Deepest nesting a message may have. Ours need fewer than 10; the stack of the link thread bears far more.
pub const MAX_DEPTH: usize = 64;

/// Why bytes are not a message, or a message not bytes. `target` is the type that was wanted.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("{target}: {bytes} bytes are over the limit of {MAX_MESSAGE_BYTES}")]
    TooLarge { target: &'static str, bytes: usize },
    #[error("{target}: refused unread: {source}")]
    Shape { target: &'static str, source: ShapeError },
    #[error("{target}: {bytes} bytes are left over behind the message")]
    Trailing { target: &'static str, bytes: usize },
    #[error("{target}: {source}")]
    Malformed { target: &'static str, source: rmp_serde::decode::Error },
    #[error("{target}: cannot be encoded: {source}")]
    Unencodable { target: &'static str, source: rmp_serde::encode::Error },
}

pub fn encode<T: Serialize + ?Sized>(message: &T) -> Result<Vec<u8>, WireError> {
    encode_behind(&[], message)
}

/// Encodes behind a header that the caller has laid out, so that header and message share one buffer. The limit
/// counts the message alone.
pub fn encode_behind<T: Serialize + ?Sized>(header: &[u8], message: &T) -> Result<Vec<u8>, WireError> {
    let target = std::any::type_name::<T>();
    let mut bytes = Vec::with_capacity(header.len() + 256);
    bytes.extend_from_slice(header);
    rmp_serde::encode::write_named(&mut bytes, message)
        .map_err(|source| WireError::Unencodable { target, source })?;
    match bytes.len() - header.len() {
        length if length > MAX_MESSAGE_BYTES => Err(WireError::TooLarge { target, bytes: length }),
        _ => Ok(bytes),
    }
}

/// Reads exactly one message. Its outline is checked before anything is built, so that no length it claims and no
/// number of empty lists makes it ask for much more memory than it has bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let target = std::any::type_name::<T>();
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(WireError::TooLarge { target, bytes: bytes.len() });
    }
    let length = shape::measure(bytes, MAX_DEPTH).map_err(|source| WireError::Shape { target, source })?;
    if length < bytes.len() {
        return Err(WireError::Trailing { target, bytes: bytes.len() - length });
    }
    let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
    reader.set_max_depth(2 * MAX_DEPTH);
    T::deserialize(&mut reader).map_err(|source| WireError::Malformed { target, source })
}
