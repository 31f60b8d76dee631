//! Owns the building blocks of a decoder. Each holds its weights in the layout its kernel wants.

pub mod embedding;
pub mod experts;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;
